"""The C++ sampler against a direct transcription of its definition, and against the distribution
it must draw from."""

from __future__ import annotations

import math

import numpy as np
import pytest

GOLDEN = 0x9E3779B97F4A7C15
WORD = 2**64 - 1


def mix(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & WORD
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & WORD
    return x ^ x >> 31


def reference(logits, temperature, top_k, top_p, min_p, seed, position, banned) -> int:
    """The definition, step by step, in float64."""
    scores = np.where(np.isnan(logits), -np.inf, logits.astype(np.float64))
    scores[list(banned)] = -np.inf
    if temperature == 0:
        return int(scores.argmax())
    scores = scores / temperature
    weights = np.exp(scores - scores.max())
    keep = np.ones(len(scores), bool)
    if min_p > 0:
        keep &= weights >= min_p
    if 0 < top_k < len(scores):
        keep &= scores >= np.sort(scores)[-top_k]
    if top_p < 1:
        ids = sorted(np.flatnonzero(keep), key=lambda i: (-scores[i], i))
        mass = np.cumsum(weights[ids])
        enough = np.flatnonzero(mass >= top_p * mass[-1])
        keep[ids[int(enough[0]) + 1 :]] = False
    key = mix(seed + GOLDEN * (position + 1) & WORD)
    best, best_score = -1, -math.inf
    for i in np.flatnonzero(keep):
        u = ((mix(key + GOLDEN * (int(i) + 1) & WORD) >> 11) + 0.5) * 2.0**-53
        score = scores[i] - math.log(-math.log(u))
        if score > best_score:
            best, best_score = int(i), score
    return best


def draw(engine, logits, positions, *, temperature, top_k, top_p, min_p, seed, banned=()):
    """Sample every row with the same parameters."""
    rows = len(logits)
    out = np.empty(rows, np.int32)
    engine.sample(
        np.ascontiguousarray(logits, np.float32),
        np.asarray(positions, np.int64),
        np.full(rows, temperature, np.float64),
        np.full(rows, top_k, np.int64),
        np.full(rows, top_p, np.float64),
        np.full(rows, min_p, np.float64),
        np.full(rows, seed, np.uint64),
        np.arange(rows + 1, dtype=np.int64) * len(banned),
        np.array(list(banned) * rows, np.int32),
        out,
    )
    return out


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (0.3, 0, 1.0, 0.0),
        (1.0, 1, 1.0, 0.0),
        (2.0, 20, 1.0, 0.0),
        (1.0, 0, 0.5, 0.0),
        (50.0, 0, 0.95, 0.0),
        (1.0, 0, 1.0, 0.2),
        (0.9, 40, 0.9, 0.05),
        (1.0, 5, 1e-9, 0.0),
    ],
)
def test_every_token_is_the_one_the_definition_gives(engine, temperature, top_k, top_p, min_p):
    rng = np.random.default_rng(11)
    vocab, seed = 601, 2**63 + 12345
    logits = (rng.standard_normal((24, vocab)) * 4).astype(np.float32)
    logits[3] = np.round(logits[3])  # many ties
    logits[4, ::7] = np.nan
    logits[5, 1:] = -np.inf
    positions = np.arange(24) * 977
    banned = (0, 600, int(logits[6].argmax()))
    rules = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
    }
    for bans in ((), banned):
        got = draw(engine, logits, positions, **rules, banned=bans)
        for row in range(24):
            if not np.isfinite(np.delete(logits[row], list(bans))).any():
                continue
            want = reference(
                logits[row], temperature, top_k, top_p, min_p, seed, int(positions[row]), bans
            )
            assert got[row] == want, row


def test_draws_follow_the_softmax(engine):
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.07, 0.03]))
    rows = 40_000
    got = draw(
        engine, np.tile(logits, (rows, 1)), np.arange(rows),
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7,
    )  # fmt: skip
    counts = np.bincount(got, minlength=5)
    expected = np.exp(logits) * rows
    # Chi-squared with 4 degrees of freedom exceeds 23.5 once in 10,000 seeds; this seed is fixed.
    assert ((counts - expected) ** 2 / expected).sum() < 23.5


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-300])
@pytest.mark.parametrize("value", [-np.inf, np.nan, np.inf, 3e38])
def test_hopeless_rows_still_yield_a_valid_id(engine, temperature, value):
    got = draw(
        engine, np.full((3, 10), value), [0, 1, 2],
        temperature=temperature, top_k=3, top_p=0.5, min_p=0.1, seed=0,
    )  # fmt: skip
    assert ((got >= 0) & (got < 10)).all()


def test_a_banned_id_outside_the_vocabulary_is_refused(engine):
    with pytest.raises(ValueError, match="banned id"):
        draw(
            engine, np.zeros((1, 4)), [0],
            temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, banned=(4,),
        )  # fmt: skip
