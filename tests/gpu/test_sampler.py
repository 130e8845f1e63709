"""The torch sampler against a transcription of its definition in numpy float64 and Python ints."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from dualpace.core.sampling import DecodeParams
from dualpace.gpu.sampler import sample

MASK = 2**64 - 1


def mix(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def expected_token(logits: list[float], p: DecodeParams, position: int, banned: set[int]) -> int:
    """One row by the book, as the definition reads."""
    l = np.array(logits, dtype=np.float32)  # noqa: E741
    l[np.isnan(l)] = -np.inf
    l[list(banned)] = -np.inf
    if p.temperature == 0:
        return int(l.argmax())
    s = l.astype(np.float64) / p.temperature
    w = np.exp(s - s.max())
    kept = w >= p.min_p
    if 0 < p.top_k < len(s):
        kept &= s >= np.sort(s)[-p.top_k]
    if p.top_p < 1:
        order = sorted(np.flatnonzero(kept), key=lambda i: (-s[i], i))
        total, running, count = sum(w[i] for i in order), 0.0, 0
        for i in order:
            running, count = running + w[i], count + 1
            if running >= p.top_p * total:
                break
        kept = np.isin(np.arange(len(s)), order[:count])
    golden = 0x9E3779B97F4A7C15
    key = mix(p.seed + golden * (position + 1) & MASK)
    h = [mix(key + golden * (i + 1) & MASK) for i in range(len(s))]
    u = np.array([((x >> 11) + 0.5) * 2.0**-53 for x in h])
    score = np.where(kept, s - np.log(-np.log(u)), -np.inf)
    return int(score.argmax())


RULES = [
    DecodeParams(),
    DecodeParams(temperature=1.0),
    DecodeParams(temperature=0.3, seed=2**64 - 1),
    DecodeParams(temperature=2.0, top_k=1),
    DecodeParams(temperature=2.0, top_k=5, seed=2**63),
    DecodeParams(temperature=1.0, top_k=97),
    DecodeParams(temperature=1.0, top_k=500),
    DecodeParams(temperature=1.5, top_p=0.7),
    DecodeParams(temperature=1.0, top_p=1e-9),
    DecodeParams(temperature=1.0, min_p=0.2),
    DecodeParams(temperature=1.0, min_p=1.0),
    DecodeParams(temperature=5.0, top_k=20, top_p=0.6, min_p=0.05),
]


def test_a_mixed_batch_equals_the_definition_row_by_row() -> None:
    generator = np.random.default_rng(0)
    params, positions, banned, rows = [], [], [], []
    for trial in range(8):
        for rule in RULES:
            # Coarse values make many ties.
            logits = np.round(generator.normal(0, 2, 97) * (4 if trial % 2 else 1e6))
            logits = (logits / (4 if trial % 2 else 1e6)).astype(np.float32)
            logits[generator.integers(0, 97, 3)] = (np.nan, -np.inf, logits.max())
            rows.append(logits)
            params.append(msgspec.structs.replace(rule, seed=(rule.seed + trial) % 2**64))
            positions.append(int(generator.integers(0, 2**20)))
            banned.append({int(np.nanargmax(logits)), 0} if trial % 3 == 0 else set[int]())
    actual = sample(torch.tensor(np.stack(rows)), params, positions, [sorted(b) for b in banned])
    expected = [
        expected_token(list(row), p, position, ban)
        for row, p, position, ban in zip(rows, params, positions, banned, strict=True)
    ]
    assert actual.tolist() == expected


def test_a_token_depends_on_nothing_else_in_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(12, 50, generator=torch.Generator().manual_seed(1))
    params = [msgspec.structs.replace(rule, seed=i) for i, rule in enumerate(RULES)]
    positions = list(range(12))
    together = sample(logits.clone(), params, positions, [()] * 12).tolist()
    alone = [sample(logits[i : i + 1].clone(), [params[i]], [i], [()]).item() for i in range(12)]
    assert together == alone
    monkeypatch.setattr("dualpace.gpu.sampler.SLICE_LOGITS", 150)
    assert sample(logits.clone(), params, positions, [()] * 12).tolist() == together


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_frequencies_are_the_softmax(vary: str) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, 1.5, -1.0, 0.5])
    draws = 20000
    seeds = range(draws) if vary == "seed" else [11] * draws
    positions = list(range(draws)) if vary == "position" else [40] * draws
    params = [DecodeParams(temperature=0.8, top_k=4, seed=seed) for seed in seeds]
    tokens = sample(logits.repeat(draws, 1), params, positions, [()] * draws)
    frequency = torch.bincount(tokens, minlength=6).double() / draws
    kept = torch.tensor([True, True, False, True, False, True])
    expected = torch.softmax((logits.double() / 0.8).masked_fill(~kept, -torch.inf), dim=0)
    # Five standard deviations of the largest binomial.
    assert (frequency - expected).abs().max() < 5 * (0.25 / draws) ** 0.5
    assert frequency[~kept].sum() == 0


def test_a_row_with_nothing_left_still_gives_a_token() -> None:
    logits = torch.full((3, 4), torch.nan)
    params = [DecodeParams(), DecodeParams(temperature=1.0), RULES[-1]]
    assert sample(logits, params, [1, 2, 3], [()] * 3).tolist() == [0, 0, 0]
