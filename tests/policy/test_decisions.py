"""What the policies decide, on views made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from dualpace.policy.chunks import prefill_chunks
from dualpace.policy.dualpace import DualPacePolicy
from dualpace.policy.gpu_only import GpuOnlyPolicy
from dualpace.policy.view import CpuView, GpuView, RowView

PAGE = 16


def row(arrival: int, tokens: int, computed: int = 0, pages: int = 0, **more: Any) -> RowView:
    return RowView(f"r{arrival}", arrival, tokens, computed, pages, **more)


def decoding(arrival: int, tokens: int, pages: int) -> RowView:
    return row(arrival, tokens, tokens - 1, pages)


def view(**fields: Any) -> GpuView:
    defaults = {
        "now": 0.0, "page_tokens": PAGE, "pages_total": 20, "pages_free": 10, "max_rows": 8,
        "max_tokens": 256, "host_open": True, "host_pages_total": 50, "host_pages_free": 50,
    }  # fmt: skip
    return GpuView(**{**defaults, **fields})


def test_the_oldest_gets_the_seat_be_it_on_the_host_or_waiting() -> None:
    policy = DualPacePolicy(max_host_rows=8)
    old_host = policy.plan_gpu(view(host=(row(1, 40),), waiting=(row(2, 100),), pages_free=4))
    assert (old_host.promote, old_host.admit, old_host.reserve) == (("r1",), (), ("r2",))
    old_waiting = policy.plan_gpu(view(host=(row(2, 40),), waiting=(row(1, 40),), pages_free=4))
    assert (old_waiting.admit, old_waiting.promote) == (("r1",), ())


def test_a_seat_waits_for_the_oldest_that_could_ever_sit_in_it() -> None:
    policy = DualPacePolicy(max_host_rows=8)
    blocked = policy.plan_gpu(view(host=(row(1, 200), row(2, 10)), pages_free=5))
    assert blocked.promote == ()
    never = policy.plan_gpu(view(host=(row(1, 20 * PAGE), row(2, 10)), pages_free=5))
    assert never.promote == ("r2",)


def test_admission_leaves_a_free_page_for_each_resident_row() -> None:
    policy = DualPacePolicy(max_host_rows=8)
    residents = tuple(decoding(i, 20, 2) for i in range(4))
    assert policy.plan_gpu(view(decoding=residents, waiting=(row(9, 31),), pages_free=6)).admit
    assert not policy.plan_gpu(view(decoding=residents, waiting=(row(9, 31),), pages_free=5)).admit


def test_under_pressure_the_youngest_goes_to_the_host_if_the_host_can_hold_it() -> None:
    policy = DualPacePolicy(max_host_rows=8)
    full = tuple(decoding(i, 33, 2) for i in range(3))
    assert policy.plan_gpu(view(decoding=full, pages_free=2)).demote == ("r2",)
    assert policy.plan_gpu(view(decoding=full, pages_free=3)).demote == ()
    for closed in ({"host_open": False}, {"host_pages_total": 2}):
        decision = policy.plan_gpu(view(decoding=full, pages_free=2, **closed))
        assert (decision.demote, decision.preempt) == ((), ("r2",))


def test_the_host_takes_no_more_than_its_rows_and_pages() -> None:
    waiting = tuple(row(i, 20) for i in range(6))
    tight = view(pages_total=0, pages_free=0, waiting=waiting, host_rows=2, host_pages_free=8)
    assert DualPacePolicy(8).plan_gpu(tight).reserve == ("r0", "r1")
    assert DualPacePolicy(3).plan_gpu(tight).reserve == ("r0",)


def test_a_chunk_into_host_pages_ends_on_a_page_boundary_or_the_prompts_end() -> None:
    rows = (row(1, 100, 32, tier="host"), row(2, 40, 0, 3))
    assert prefill_chunks(rows, 50, PAGE) == (("r1", 48), ("r2", 2))
    assert prefill_chunks(rows, 70, PAGE) == (("r1", 68), ("r2", 2))


def test_gpu_only_preempts_the_youngest_and_admits_nobody_meanwhile() -> None:
    full = tuple(decoding(i, 33, 2) for i in range(3))
    decision = GpuOnlyPolicy().plan_gpu(view(decoding=full, waiting=(row(9, 4),), pages_free=1))
    assert (decision.preempt, decision.admit) == (("r2",), ())
    assert GpuOnlyPolicy().plan_gpu(view(waiting=(row(9, 4),))).admit == ("r9",)


def test_a_request_that_no_open_tier_can_hold_does_not_hold_up_those_behind_it() -> None:
    waiting = (row(0, 20 * PAGE), row(1, 20))
    assert GpuOnlyPolicy().plan_gpu(view(waiting=waiting)).admit == ("r1",)
    down = view(waiting=waiting, host_open=False, host_pages_total=0, host_pages_free=0)
    assert DualPacePolicy(8).plan_gpu(down).admit == ("r1",)


@pytest.mark.parametrize(("free", "sent_back"), [(2, ()), (1, ("r1",)), (0, ("r1",))])
def test_a_full_host_sends_its_youngest_back_and_never_its_oldest(
    free: int, sent_back: tuple[str, ...]
) -> None:
    rows = (decoding(0, 33, 2), decoding(1, 33, 2))
    decision = DualPacePolicy(8).plan_cpu(
        CpuView(now=0.0, page_tokens=PAGE, pages_free=free, max_rows=8, rows=rows)
    )
    assert decision.send_back == sent_back
    assert "r0" in decision.run
