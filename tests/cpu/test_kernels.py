"""Kernels against numpy float64 from the same inputs, at odd sizes, on every instruction set."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from dualpace.cpu import _native

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def relative_l2(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Relative L2 error over the last axis."""
    return np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (15, 31), (48, 100), (33, 576), (160, 257)])
def test_linear_matches_float64_for_every_row_count(engine, dtype, n, k):
    rng = np.random.default_rng(n * k)
    weight = rng.standard_normal((n, k)).astype(DTYPES[dtype])
    bias = rng.standard_normal(n).astype(np.float32)
    # What kernels that take bfloat16 activations see exactly.
    inputs = rng.standard_normal((33, k)).astype(DTYPES[dtype]).astype(np.float32)
    for m in range(1, 34):
        x = inputs[:m]
        stored = weight if dtype == "float32" else weight.view(np.uint16)
        for added in (None, bias):
            out = np.empty((m, n), np.float32)
            engine.linear(x, stored, added, out)
            terms = x.astype(np.float64)[:, None, :] * weight.astype(np.float64)
            shift = 0.0 if added is None else added.astype(np.float64)
            # An error bound per element: cancellation must not hide a wrong or missing term.
            bound = 1e-6 * (np.abs(terms).sum(-1) + np.abs(shift))
            assert (np.abs(out - terms.sum(-1) - shift) <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 9, 40, 150])
def test_linear_of_long_rows_matches_float64_where_k_is_cut_to_fit_the_cache(engine, dtype, m):
    n, k = 72, 9001
    rng = np.random.default_rng(m)
    weight = rng.standard_normal((n, k)).astype(DTYPES[dtype])
    x = rng.standard_normal((m, k)).astype(DTYPES[dtype]).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32)
    out = np.empty((m, n), np.float32)
    engine.linear(x, weight if dtype == "float32" else weight.view(np.uint16), bias, out)
    wide = weight.astype(np.float64).T
    bound = 1e-6 * (np.abs(x) @ np.abs(wide) + np.abs(bias))
    assert (np.abs(out - x.astype(np.float64) @ wide - bias) <= bound).all()


@pytest.mark.parametrize("n", [2, 7, 16, 48, 577])
def test_rms_norm_matches_float64(engine, n):
    rng = np.random.default_rng(n)
    x = rng.standard_normal((3, n)).astype(np.float32)
    weight = rng.standard_normal(n).astype(np.float32)
    out = np.empty_like(x)
    engine.rms_norm(x, weight, 1e-5, out)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
    assert relative_l2(out, want).max() < 1e-6


@pytest.mark.parametrize("head_dim", [2, 6, 16, 40, 64, 256])
def test_rope_rotates_dimension_pairs_half_a_head_apart(engine, head_dim):
    rng = np.random.default_rng(head_dim)
    x = rng.standard_normal((3, head_dim)).astype(np.float32)
    angle = rng.standard_normal(head_dim // 2)
    pairs = x[:, : head_dim // 2] + 1j * x[:, head_dim // 2 :]
    turned = pairs * np.exp(1j * angle)
    got = x.copy()
    engine.rope(got, np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))
    assert relative_l2(got, np.concatenate([turned.real, turned.imag], 1)).max() < 1e-6


def softmax_attention(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """float64: query [group, d], keys and values [tokens, d]."""
    scores = query.astype(np.float64) @ keys.astype(np.float64).T / np.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ values.astype(np.float64) / weights.sum(-1, keepdims=True)


def attend_in_poisoned_arena(
    engine, dtype, lengths, group, kv_heads, head_dim, spread=1.0, float_query=False, page_tokens=16
):
    """Run rows of `lengths` over shuffled pages in which every unused slot is NaN.

    Queries are numbers of the cache's type, or, with `float_query`, any.

    Returns the output and the float64 reference, [rows, heads, head_dim].
    """
    num_layers, layer = 2, 1
    rng = np.random.default_rng(head_dim * group)
    counts = [-(-length // page_tokens) for length in lengths]
    shape = (sum(counts) + 3, num_layers, 2, kv_heads, page_tokens, head_dim)
    arena = np.full(shape, np.nan, DTYPES[dtype])
    ids = rng.permutation(len(arena))[: sum(counts)].astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    query = spread * rng.standard_normal((len(lengths), kv_heads * group, head_dim))
    query = query.astype(np.float32 if float_query else DTYPES[dtype]).astype(np.float32)
    want = np.empty(query.shape)
    for row, length in enumerate(lengths):
        kv = rng.standard_normal((2, kv_heads, length, head_dim)).astype(DTYPES[dtype])
        for p in range(length):
            arena[ids[offsets[row] + p // page_tokens], layer, :, :, p % page_tokens] = kv[:, :, p]
        for head in range(kv_heads):
            heads = slice(head * group, (head + 1) * group)
            want[row, heads] = softmax_attention(query[row, heads], kv[0, head], kv[1, head])
    out = np.full(query.shape, np.nan, np.float32)
    engine.attention(
        query,
        memoryview(arena.view(np.uint8)),
        dtype,
        num_layers,
        layer,
        kv_heads,
        page_tokens,
        np.array(lengths, np.int64) - 1,
        offsets,
        ids,
        out,
    )
    return out, want


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("group", "kv_heads", "head_dim"),
    [
        (1, 2, 16),
        (3, 3, 64),
        (4, 1, 20),
        (5, 1, 80),
        (8, 2, 128),
        (7, 1, 6),
        (2, 1, 256),
        (1, 1, 128),
        (4, 2, 128),
        (6, 1, 96),
        (11, 1, 48),
        (12, 2, 64),
        (17, 1, 160),
    ],
)
def test_attention_reads_only_the_slots_of_its_row(engine, dtype, group, kv_heads, head_dim):
    lengths = [1, 31, 32, 33, 64, 65]
    out, want = attend_in_poisoned_arena(engine, dtype, lengths, group, kv_heads, head_dim)
    assert relative_l2(out, want).max() < 5e-6


@pytest.mark.parametrize(("group", "head_dim"), [(3, 64), (8, 128)])
@pytest.mark.parametrize("lengths", [[2000], [700, 1, 640, 3, 900]])
def test_attention_of_long_contexts_is_cut_and_joined_exactly(engine, lengths, group, head_dim):
    out, want = attend_in_poisoned_arena(engine, "bfloat16", lengths, group, 1, head_dim)
    assert relative_l2(out, want).max() < 5e-6


@pytest.mark.parametrize("page_tokens", [48, 100, 200])
def test_contexts_are_cut_at_pages_of_any_length(engine, page_tokens):
    out, want = attend_in_poisoned_arena(
        engine, "bfloat16", [300, 1000], 2, 1, 64, page_tokens=page_tokens
    )
    assert relative_l2(out, want).max() < 5e-6


def test_attention_of_long_contexts_keeps_heads_together(engine):
    lengths = [3000, 17, 4500, 2600]
    out, want = attend_in_poisoned_arena(engine, "bfloat16", lengths, 3, 4, 64)
    assert relative_l2(out, want).max() < 5e-6


@pytest.mark.parametrize("group", [4, 8])
def test_attention_keeps_the_precision_of_queries_that_are_no_bfloat16(engine, group):
    lengths = [1, 65, 300]
    out, want = attend_in_poisoned_arena(
        engine, "bfloat16", lengths, group, 1, 128, float_query=True
    )
    # Two bfloat16 in place of a float lose 2^-18 of it; one would lose 2^-9.
    assert relative_l2(out, want).max() < 2e-5


def test_attention_survives_spiky_logits(engine):
    out, want = attend_in_poisoned_arena(engine, "bfloat16", [300, 65], 4, 2, 64, spread=60.0)
    assert relative_l2(out, want).max() < 5e-5


def test_attention_refuses_a_page_outside_the_arena(engine):
    one = np.zeros((1, 1, 16), np.float32)
    with pytest.raises(ValueError, match="page id"):
        engine.attention(
            one, bytearray(2 * 16 * 16 * 4), "float32", 1, 0, 1, 16,
            np.array([0]), np.array([0, 1]), np.array([1], np.int32), one.copy(),
        )  # fmt: skip


def test_an_unknown_instruction_set_is_named_with_the_choices():
    with pytest.raises(ValueError, match=r"unknown instruction set 'sse9'.*portable, avx2"):
        _native.Engine([0], "sse9")


def test_an_unavailable_cpu_is_named():
    with pytest.raises(ValueError, match="CPU 1000 is not available"):
        _native.Engine([1000], "portable")
