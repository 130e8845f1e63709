"""Seats in arrival order whatever the load, and no move without need."""

from __future__ import annotations

import random

import pytest

from dualpace.kv.pages import pages_for
from dualpace.policy.dualpace import DualPacePolicy
from dualpace.policy.view import GpuView, RowView

PAGE = 16


def random_view(rng: random.Random) -> GpuView:
    """Any load: rows in every phase, arrivals interleaved, pools from empty to roomy."""
    arrivals = list(range(rng.randint(1, 40)))
    rng.shuffle(arrivals)
    groups: dict[str, list[RowView]] = {"decoding": [], "prefilling": [], "waiting": [], "host": []}
    used = 0
    for arrival in sorted(arrivals):
        group = rng.choice([*groups])
        tokens = rng.randint(2, 600)
        computed = {"decoding": tokens - 1, "prefilling": rng.randrange(tokens - 1)}.get(group, 0)
        tier = rng.choice(["gpu", "host"]) if group == "prefilling" else "gpu"
        pages = 0 if group in ("waiting", "host") else pages_for(tokens + rng.randint(0, 1), PAGE)
        used += pages if tier == "gpu" else 0
        groups[group].append(RowView(f"r{arrival}", arrival, tokens, computed, pages, tier))
    free = rng.choice([0, rng.randint(0, 20), rng.randint(0, 400)])
    return GpuView(
        now=0.0, page_tokens=PAGE, pages_total=used + free, pages_free=free,
        max_rows=rng.choice([4, 64]), max_tokens=rng.choice([32, 2048]),
        host_open=rng.random() < 0.8, host_pages_total=1000,
        host_pages_free=rng.choice([0, 50, 1000]), host_rows=len(groups["host"]),
        **{name: tuple(rows) for name, rows in groups.items()},
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(300))
def test_seats_go_to_the_oldest_without_one(seed: int) -> None:
    view = random_view(random.Random(seed))
    decision = DualPacePolicy(max_host_rows=64).plan_gpu(view)
    seated = {*decision.admit, *decision.promote}
    could_sit = sorted(
        (
            row
            for row in (*view.waiting, *view.host)
            if pages_for(row.tokens + 1, PAGE) <= view.pages_total
        ),
        key=lambda row: row.arrival,
    )
    assert seated == {row.id for row in could_sit[: len(seated)]}
    assert {*decision.admit} <= {row.id for row in view.waiting}
    assert {*decision.promote} <= {row.id for row in view.host}
    assert not seated & {*decision.reserve}


@pytest.mark.parametrize("seed", range(300))
def test_who_leaves_is_the_youngest_and_nobody_comes_in_the_same_step(seed: int) -> None:
    view = random_view(random.Random(seed))
    decision = DualPacePolicy(max_host_rows=64).plan_gpu(view)
    leaving = {*decision.demote, *decision.preempt}
    if leaving:
        assert leaving == {row.id for row in view.decoding[-len(leaving) :]}
        assert not decision.admit
        assert not decision.promote
