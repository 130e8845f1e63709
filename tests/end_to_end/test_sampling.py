"""Both engines sample alike: the same logits, the same rules, the same token and logprobs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dualpace.core.history import TokenHistory
from dualpace.core.logprobs import asking_rows, unpack_logprobs
from dualpace.core.plan import BatchRow
from dualpace.core.sampling import DecodeParams
from dualpace.cpu import _native
from dualpace.cpu.sampling import logprobs_buffer, read_logprobs, sampling_arrays
from dualpace.gpu.sampler import SampleRow, sample

RULES = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.95},
    {"temperature": 1.2, "min_p": 0.03},
    {"repetition_penalty": 1.3},
    {"temperature": 0.9, "presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"temperature": 1.0, "repetition_penalty": 0.8, "frequency_penalty": 1.1, "top_p": 0.99},
    {"temperature": 1.0, "logit_bias": ((11, 30.0), (500, 28.0), (999, -100.0)), "top_k": 3},
]


def test_the_same_logits_give_the_same_tokens_and_logprobs_on_either_engine() -> None:
    vocab, count = 32_000, 64
    generator = np.random.default_rng(8)
    logits = (generator.standard_normal((count, vocab)) * 3).astype(np.float32)
    # As a model in bf16 makes them: full of ties.
    logits[::2] = torch.tensor(logits[::2]).bfloat16().float().numpy()
    rows = []
    for index in range(count):
        rules = RULES[index % len(RULES)]
        params = DecodeParams(**rules, seed=index * 2**55, logprobs=[None, 0, 20][index % 3])
        prompt = generator.integers(0, vocab, 300).tolist()
        likely = np.argsort(logits[index])[-40:].tolist()
        history = TokenHistory().counts(prompt, likely * (index % 4))
        banned = tuple(likely[-2:]) if index % 5 == 0 else ()
        row = BatchRow("r", [0], 10 * index, [0], "host", True, params, banned, history)
        rows.append(row)
    engine = _native.Engine([0], "auto")
    tokens = np.empty(count, np.int32)
    buffer = logprobs_buffer(rows, vocab)
    positions = np.array([row.end for row in rows])
    engine.sample(logits, positions, sampling_arrays(rows), tokens, buffer)
    on_cpu = read_logprobs(rows, buffer)

    sampled = sample(
        torch.tensor(logits),
        [SampleRow(row.params, row.end, row.banned_ids, row.history) for row in rows],
    )
    assert sampled.tokens.tolist() == tokens.tolist()
    assert sampled.logprobs is not None
    asked = asking_rows(row.params.logprobs for row in rows)
    on_gpu = unpack_logprobs(asked, sampled.logprobs.tolist())
    assert on_gpu.keys() == on_cpu.keys()
    for index, got in on_gpu.items():
        assert (got.rank, got.top_ids) == (on_cpu[index].rank, on_cpu[index].top_ids)
        assert got.logprob == pytest.approx(on_cpu[index].logprob, abs=1e-12)
        assert got.top_logprobs == pytest.approx(on_cpu[index].top_logprobs, abs=1e-12)
