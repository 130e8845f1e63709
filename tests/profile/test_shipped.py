"""The profiles that come along, against measurements they were not made from; and what-ifs."""

from __future__ import annotations

import pytest

from dualpace.core.errors import ConfigError
from dualpace.policy.cost_model import gpu_step
from dualpace.profile.shipped import open_profile, shipped_names
from dualpace.profile.what_if import what_if

# Steps on the reference machine under load, docs/log.md: decode rows, their context, chunks of
# prompts, and milliseconds.
STEPS = [
    ("8b", 32, 32 * 1000, [], 6.0),
    ("8b", 29, 33_000, [], 6.02),
    ("8b", 1, 700, [], 4.85),
    ("8b", 29, 33_000, [(153, 990)], 8.59),
    ("8b", 29, 33_000, [(343, 990)], 12.68),
    ("8b", 29, 33_000, [(995, 0)], 24.26),
    ("70b", 11, 12_000, [], 37.5),
    ("70b", 11, 12_000, [(1013, 0)], 219.0),
]


def test_each_says_what_it_is() -> None:
    notes = {name: open_profile(name).note for name in shipped_names()}
    begins = {name: note.split()[0] for name, note in notes.items()}
    assert begins == {
        "h200-llama-3.1-8b": "Measured",
        "h200-llama-3.1-70b": "Measured",
        "rtx4090-llama-3.1-8b": "MODELLED,",
    }
    for name in shipped_names():
        profile = open_profile(name)
        assert profile.gpu_kv_tokens > 10_000
        costs = profile.cost_model()
        assert costs.covers("cpu_attention", "gpu_decode", "gpu_prefill", "assist")


@pytest.mark.parametrize(("shape", "rows", "context", "chunks", "milliseconds"), STEPS)
def test_the_reference_machine_predicts_steps_that_a_server_made(
    shape: str, rows: int, context: int, chunks: list[tuple[int, int]], milliseconds: float
) -> None:
    costs = open_profile(f"h200-llama-3.1-{shape}").cost_model()
    predicted = gpu_step(costs, rows, context, chunks)
    within = 0.11 if chunks else 0.05
    assert predicted.seconds == pytest.approx(milliseconds / 1e3, rel=within)
    # Of 8 rows of the 70B shape no full pool was measured.
    assert shape == "70b" or not predicted.extrapolated


def test_a_what_if_changes_what_it_names_and_says_so() -> None:
    profile = open_profile("rtx4090-llama-3.1-8b")
    other = what_if(profile, "host_bandwidth=2x, gpu_kv=48GiB,host_kv=3x,copy_bandwidth=0.5x")
    before, after = profile.cost_model(), other.cost_model()
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


@pytest.mark.parametrize(
    "text",
    [
        "luck=2x",
        "host_bandwidth=fast",
        "gpu_bandwidth=1008",
        "gpu_flops=0x",
        "gpu_kv=much",
        "gpu_kv=8",
    ],
)
def test_a_what_if_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="what-if"):
        what_if(open_profile("rtx4090-llama-3.1-8b"), text)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="rtx4090"):
        open_profile("h100")
