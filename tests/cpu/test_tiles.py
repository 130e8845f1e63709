"""The AMX linear layer's loops and blocking, on tiles in plain C++ and, where it is, on AMX."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import pytest

from dualpace.cpu import _native

ISAS = ["amx_emulated", *(isa for isa in _native.supported_isas() if isa.startswith("amx"))]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("rows", "columns", "features"),
    [
        (range(1, 34), 48, 96),  # every row count, an odd number of panels
        ((1, 16, 17, 64), 16, 31),  # one panel, features that fill no step
        ((40, 65, 100), 80, 8224),  # features in several blocks, row tails
        ((256, 257), 33, 4500),  # many row blocks, columns that fill no panel
    ],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_tile_linear_matches_float64(
    isa: str, rows: range, columns: int, features: int, with_bias: bool
) -> None:
    engine = _native.Engine(sorted(os.sched_getaffinity(0))[:2], isa)
    rng = np.random.default_rng(columns + features)
    weight = rng.standard_normal((columns, features)).astype(ml_dtypes.bfloat16)
    bias = rng.standard_normal(columns).astype(np.float32) if with_bias else None
    x = rng.standard_normal((max(rows), features)).astype(ml_dtypes.bfloat16)
    want = x.astype(np.float64) @ weight.astype(np.float64).T
    want += 0.0 if bias is None else bias
    for m in rows:
        out = np.full((m, columns), np.nan, np.float32)
        engine.linear(x[:m].astype(np.float32), weight.view(np.uint16), bias, out)
        error = np.linalg.norm(out - want[:m]) / np.linalg.norm(want[:m])
        assert error < 1e-5
        # No single element may hide in the norm: a missing k block or a wrong column is large.
        assert np.abs(out - want[:m]).max() < 0.02 * np.sqrt(features)
