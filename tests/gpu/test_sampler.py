"""The torch sampler against a transcription of its definition in numpy float64 and Python ints."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from dualpace.core.history import TokenHistory
from dualpace.core.logprobs import asking_rows, unpack_logprobs
from dualpace.core.sampling import DecodeParams
from dualpace.gpu.sampler import SampleRow, sample

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


def test_a_mixed_batch_equals_the_definition_row_by_row(device: str) -> None:
    generator = np.random.default_rng(0)
    logit_rows, rows = [], []
    for trial in range(8):
        for rule in RULES:
            # Coarse values make many ties.
            logits = np.round(generator.normal(0, 2, 97) * (4 if trial % 2 else 1e6))
            logits = (logits / (4 if trial % 2 else 1e6)).astype(np.float32)
            logits[generator.integers(0, 97, 3)] = (np.nan, -np.inf, logits.max())
            logit_rows.append(logits)
            params = msgspec.structs.replace(rule, seed=(rule.seed + trial) % 2**64)
            banned = (int(np.nanargmax(logits)), 0) if trial % 3 == 0 else ()
            rows.append(SampleRow(params, int(generator.integers(0, 2**20)), banned))
    sampled = sample(torch.tensor(np.stack(logit_rows), device=device), rows)
    expected = [
        expected_token(list(logits), row.params, row.position, set(row.banned_ids))
        for logits, row in zip(logit_rows, rows, strict=True)
    ]
    assert sampled.tokens.tolist() == expected
    assert sampled.logprobs is None


def test_a_token_depends_on_nothing_else_in_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(12, 50, generator=torch.Generator().manual_seed(1))
    rules = [msgspec.structs.replace(rule, seed=i) for i, rule in enumerate(RULES)]
    rows = [SampleRow(rule, position) for position, rule in enumerate(rules)]
    together = sample(logits.clone(), rows).tokens.tolist()
    alone = [sample(logits[i : i + 1].clone(), [rows[i]]).tokens.item() for i in range(12)]
    assert together == alone
    monkeypatch.setattr("dualpace.gpu.sampler.SLICE_LOGITS", 150)
    assert sample(logits.clone(), rows).tokens.tolist() == together


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_frequencies_are_the_softmax(vary: str) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, 1.5, -1.0, 0.5])
    draws = 20000
    seeds = range(draws) if vary == "seed" else [11] * draws
    positions = list(range(draws)) if vary == "position" else [40] * draws
    rows = [
        SampleRow(DecodeParams(temperature=0.8, top_k=4, seed=seed), position)
        for seed, position in zip(seeds, positions, strict=True)
    ]
    tokens = sample(logits.repeat(draws, 1), rows).tokens
    frequency = torch.bincount(tokens, minlength=6).double() / draws
    kept = torch.tensor([True, True, False, True, False, True])
    expected = torch.softmax((logits.double() / 0.8).masked_fill(~kept, -torch.inf), dim=0)
    # Five standard deviations of the largest binomial.
    assert (frequency - expected).abs().max() < 5 * (0.25 / draws) ** 0.5
    assert frequency[~kept].sum() == 0


def test_a_row_with_nothing_left_still_gives_a_token() -> None:
    logits = torch.full((3, 4), torch.nan)
    rules = [DecodeParams(), DecodeParams(temperature=1.0), RULES[-1]]
    rows = [SampleRow(rule, position) for position, rule in enumerate(rules)]
    assert sample(logits, rows).tokens.tolist() == [0, 0, 0]


def penalised(
    logits: torch.Tensor, prompt: list[int], output: list[int], p: DecodeParams
) -> list[float]:
    """transformers' repetition penalty over all tokens, OpenAI's two over the output."""
    biased = logits.clone()
    for token_id, bias in p.logit_bias:
        biased[token_id] += bias
    repetition = RepetitionPenaltyLogitsProcessor(p.repetition_penalty)
    scores = repetition(torch.tensor([prompt + output]), biased[None])[0].double()
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=len(logits))
    scores -= counts * p.frequency_penalty + (counts > 0) * p.presence_penalty
    return scores.float().tolist()


PENALTIES = [
    DecodeParams(repetition_penalty=1.7),
    DecodeParams(repetition_penalty=0.6, temperature=0.7),
    DecodeParams(presence_penalty=1.9, temperature=0.5),
    DecodeParams(presence_penalty=-2.0, temperature=1.0, top_p=0.9),
    DecodeParams(frequency_penalty=2.0, temperature=1.0, top_k=9),
    DecodeParams(logit_bias=((7, 6.5), (0, -100.0), (44, 5.0)), temperature=1.0),
    DecodeParams(
        presence_penalty=0.3, frequency_penalty=-0.4, repetition_penalty=1.2, temperature=0.9,
        min_p=0.02, logit_bias=((3, 4.0), (40, -3.0)),
    ),
]  # fmt: skip


def test_penalties_are_those_of_others_with_the_newest_token_known_to_the_device_alone(
    device: str,
) -> None:
    generator = np.random.default_rng(4)
    logits = torch.tensor(generator.normal(0, 2, (140, 50)), dtype=torch.float32)
    rows, pending, expected, unmoved = [], [], [], 0
    for index in range(140):
        params = msgspec.structs.replace(PENALTIES[index % 7], seed=index)
        prompt = generator.integers(0, 50, 25).tolist()
        output = generator.integers(0, 20, int(generator.integers(0, 30))).tolist()
        history = TokenHistory().counts(prompt, output)
        rows.append(SampleRow(params, index, (13,), history))
        # Of the prompt, of the output, of neither, or none.
        newest = [prompt[0], (output or prompt)[-1], 49, 0, -1][index % 5]
        pending.append(newest)
        known = output + [newest] * (newest >= 0)
        scores = penalised(logits[index], prompt, known, params)
        expected.append(expected_token(scores, params, index, {13}))
        unmoved += expected[-1] == expected_token(logits[index].tolist(), params, index, {13})
    assert unmoved < 120
    there = torch.tensor(pending, device=device)
    assert sample(logits.to(device), rows, there).tokens.tolist() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_nothing_waits_for_the_device() -> None:
    history = TokenHistory().counts([1, 2], [3])
    rules = [msgspec.structs.replace(rule, logprobs=3) for rule in RULES + PENALTIES]
    rows = [SampleRow(rule, index, (index,), history) for index, rule in enumerate(rules)]
    logits = torch.randn(len(rows), 50, device="cuda")
    pending = torch.arange(len(rows), device="cuda")
    sample(logits, rows, pending)  # sets libraries up
    try:
        torch.cuda.set_sync_debug_mode("error")
        sample(logits, rows, pending)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_logits_are_edited_as_the_rules_say_to_the_last_bit() -> None:
    logits = torch.tensor([[1.5, -2.25, 3.0, 0.5, -torch.inf, 7.0]])
    params = DecodeParams(
        logit_bias=((0, 1.25), (5, -100.0)),
        repetition_penalty=1.3,
        frequency_penalty=0.7,
        presence_penalty=-0.2,
    )
    history = TokenHistory().counts([0, 1, 4], [1, 2, 2])
    sample(logits, [SampleRow(params, 0, (3,), history)], torch.tensor([2]))
    exact = [
        np.float32(1.5 + 1.25) / 1.3,
        -2.25 * 1.3 - 0.7 * 1 + 0.2,
        3.0 / 1.3 - 0.7 * 3 + 0.2,
        -np.inf,
        -np.inf,
        7.0 - 100.0,
    ]
    assert logits[0].tolist() == np.array(exact, np.float32).tolist()


def test_logprobs_are_those_of_the_model_whatever_the_rules_of_sampling(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualpace.gpu.sampler.SLICE_LOGITS", 1000)
    generator = np.random.default_rng(5)
    logits = (generator.standard_normal((40, 300)) * 4).astype(np.float32)
    logits[::3] = np.round(logits[::3])  # ties, and zeros of both signs
    logits[5, 100:] = np.nan
    rules = [
        DecodeParams(logprobs=5),
        DecodeParams(temperature=1.5, logprobs=20),
        DecodeParams(temperature=1.0),
        msgspec.structs.replace(PENALTIES[-1], temperature=2.0, logprobs=0),
    ]
    history = TokenHistory().counts(list(range(0, 300, 3)), list(range(0, 300, 2)))
    rows = [SampleRow(rules[i % 4], i, (int(np.nanargmax(logits[i])),), history) for i in range(40)]
    sampled = sample(torch.tensor(logits, device=device), rows)
    tokens = sampled.tokens.tolist()
    assert sampled.logprobs is not None
    asked = asking_rows(row.params.logprobs for row in rows)
    reported = unpack_logprobs(asked, sampled.logprobs.tolist())
    assert sorted(reported) == [i for i in range(40) if i % 4 != 2]
    for i, got in reported.items():
        exact = np.where(np.isnan(logits[i]), -np.inf, logits[i].astype(np.float64))
        exact -= exact.max()
        exact -= np.log(np.exp(exact).sum())
        assert got.logprob == pytest.approx(exact[tokens[i]], abs=1e-12)
        assert got.rank == 1 + (exact > exact[tokens[i]]).sum()
        best = np.lexsort((np.arange(300), -exact))[: rows[i].params.logprobs].tolist()
        assert got.top_ids == best
        assert got.top_logprobs == pytest.approx(exact[best], abs=1e-12)
