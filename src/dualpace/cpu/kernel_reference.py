"""Relative L2 errors of the kernels against float64, on samples of the inputs they were run with.

Knows formulas and NumPy; measures no time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dualpace.cpu import _native

SAMPLED_ROWS = 2
SAMPLED_COLUMNS = 64
PANEL = 16  # columns of gate, then of up, in turn

Float64 = NDArray[np.float64]


def relative_l2(got: NDArray[Any], want: Float64) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def attention_error(
    out: NDArray[np.float32],
    query: NDArray[np.float32],
    cache: NDArray[Any],
    pages: NDArray[np.int32],
) -> float:
    """The worst head of the first and last KV head of some rows.

    out, query: [rows, heads, head_dim]; cache: [page, 2, kv_head, page_tokens, head_dim], one
    layer; pages: [rows, pages of a row], full to the last token.
    """
    kv_heads, head_dim = cache.shape[2], cache.shape[4]
    group = query.shape[1] // kv_heads
    worst = 0.0
    for row in range(min(SAMPLED_ROWS, len(query))):
        for kv_head in {0, kv_heads - 1}:
            heads = slice(kv_head * group, (kv_head + 1) * group)
            kv = cache[pages[row], :, kv_head].astype(np.float64)
            keys, values = (kv[:, i].reshape(-1, head_dim) for i in (0, 1))
            scores = query[row, heads].astype(np.float64) @ keys.T / np.sqrt(head_dim)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            want = weights @ values / weights.sum(-1, keepdims=True)
            worst = max(worst, *map(relative_l2, out[row, heads], want))
    return worst


def linear_error(
    bench: _native.LinearBench,
    x: NDArray[np.float32],
    n: int,
    swiglu: bool,
    rng: np.random.Generator,
) -> float:
    """Some columns of all rows, with the first copy of the weights. x: [m, k], as in `bench`."""
    bench.run(0)
    outputs = n // 2 if swiglu else n
    out = np.empty((len(x), outputs), np.float32)
    bench.output(out)
    columns = rng.choice(outputs, SAMPLED_COLUMNS, replace=False)
    wide = x.astype(np.float64)
    if not swiglu:
        return relative_l2(out[:, columns], wide @ _weights(bench, columns, x.shape[1]).T)
    gate_rows = columns // PANEL * 2 * PANEL + columns % PANEL
    gate = wide @ _weights(bench, gate_rows, x.shape[1]).T
    up = wide @ _weights(bench, gate_rows + PANEL, x.shape[1]).T
    return relative_l2(out[:, columns], gate / (1.0 + np.exp(-gate)) * up)


def rms_norm_error(
    out: NDArray[np.float32], x: NDArray[np.float32], weight: NDArray[np.float32], eps: float
) -> float:
    """out, x: [rows, n]; weight: [n]."""
    wide = x.astype(np.float64)
    return relative_l2(out, wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight)


def rope_error(out: NDArray[np.float32], x: NDArray[np.float32], angles: Float64) -> float:
    """out, x: [heads, head_dim]; angles: [head_dim / 2]."""
    half = len(angles)
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return relative_l2(out, np.concatenate([turned.real, turned.imag], axis=1))


def _weights(bench: _native.LinearBench, rows: NDArray[np.int64], k: int) -> Float64:
    weights = np.empty((len(rows), k), np.float32)
    for row, into in zip(rows, weights, strict=True):
        bench.weight_row(0, int(row), into)
    return weights.astype(np.float64)
