"""The profiles that come along, against measurements they were not made from; and what-ifs."""

from __future__ import annotations

import pytest

from dualpace.core.errors import ConfigError
from dualpace.policy.cost_model import TableCostModel, gpu_step
from dualpace.profile.shipped import open_profile, shipped_names
from dualpace.profile.what_if import what_if

# Steps of the 8B shape on the reference machine, docs/log.md: decode rows, their context, chunks,
# and milliseconds.
MEASURED = [
    (48, 48 * 700, [], 6.47),
    (32, 32 * 1000, [], 6.0),
    (1, 700, [], 4.85),
    (32, 32 * 1000, [(480, 0)], 16.6),
    (32, 32 * 1000, [(1000, 0)], 28.4),
]


def test_each_says_that_it_was_not_measured_as_one() -> None:
    assert len(shipped_names()) == 3
    for name in shipped_names():
        profile = open_profile(name)
        assert profile.note.startswith(("NOT MEASURED", "MODELLED"))
        assert profile.gpu_kv_tokens > 10_000
        costs = TableCostModel(profile.points)
        assert costs.covers("cpu_attention", "gpu_decode", "gpu_prefill", "assist")


@pytest.mark.parametrize(("rows", "context", "chunks", "milliseconds"), MEASURED)
def test_the_reference_machine_predicts_steps_it_was_not_made_from(
    rows: int, context: int, chunks: list[tuple[int, int]], milliseconds: float
) -> None:
    costs = TableCostModel(open_profile("h200-llama-3.1-8b").points)
    predicted = gpu_step(costs, rows, context, chunks)
    assert predicted.seconds == pytest.approx(milliseconds / 1e3, rel=0.08)
    assert not predicted.extrapolated


def test_a_what_if_changes_what_it_names_and_says_so() -> None:
    profile = open_profile("rtx4090-llama-3.1-8b")
    other = what_if(profile, "host_bandwidth=2x, gpu_kv=48GiB,host_kv=3x,copy_bandwidth=0.5")
    before, after = TableCostModel(profile.points), TableCostModel(other.points)
    for rows, context in ((1, 1000), (64, 60_000), (256, 300_000)):
        assert after.cpu_iteration(rows, context).seconds == pytest.approx(
            before.cpu_iteration(rows, context).seconds / 2
        )
        assert after.gpu_decode(rows, context) == before.gpu_decode(rows, context)
    assert other.gpu_kv_tokens == 48 * 2**30 // 131072
    assert other.host_kv_tokens == 3 * profile.host_kv_tokens
    assert other.copy_bandwidth == profile.copy_bandwidth / 2
    assert "What if host_bandwidth=2x" in other.note
    assert what_if(profile, "") == profile


@pytest.mark.parametrize("text", ["luck=2x", "host_bandwidth=fast", "gpu_flops=0", "gpu_kv=much"])
def test_a_what_if_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="what-if"):
        what_if(open_profile("rtx4090-llama-3.1-8b"), text)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="rtx4090"):
        open_profile("h100")
