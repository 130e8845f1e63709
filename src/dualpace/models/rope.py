"""Rotary frequencies in float32, by the scaling rules that checkpoints name.

Knows config dictionaries, not files. The arithmetic follows `modeling_rope_utils` of transformers
operation by operation, since a last-bit difference grows with the position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dualpace.core.errors import ModelError

FloatArray = npt.NDArray[np.float32]


def inverse_frequencies(theta: float, head_dim: int) -> FloatArray:
    """theta ** (-2i / head_dim) for i in 0 … head_dim/2 - 1; float32 [head_dim / 2]."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # The power in double, then rounded: numpy's own float32 power is often a last bit off torch's.
    power = np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)
    return np.asarray(np.float32(1.0) / power, dtype=np.float32)


def scaled_frequencies(
    parameters: Mapping[str, Any], head_dim: int, default_length: int
) -> FloatArray:
    """Frequencies for a transformers `rope_parameters` dictionary; float32 [head_dim / 2].

    default_length: the original context length where the dictionary does not state it.
    Raises `ModelError` for a rule other than default, linear and llama3.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if float(parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("partial rotary embeddings are not supported")
    inv_freq = inverse_frequencies(float(parameters["rope_theta"]), head_dim)
    try:
        if kind == "default":
            return inv_freq
        if kind == "linear":
            return inv_freq / np.float32(parameters["factor"])
        if kind == "llama3":
            return _llama3(
                inv_freq,
                factor=float(parameters["factor"]),
                low=float(parameters["low_freq_factor"]),
                high=float(parameters["high_freq_factor"]),
                length=float(parameters.get("original_max_position_embeddings", default_length)),
            )
    except KeyError as missing:
        raise ModelError(f"rope type {kind!r} lacks the parameter {missing}") from None
    raise ModelError(f"rope type {kind!r} is not supported (default, linear and llama3 are)")


def _llama3(
    inv_freq: FloatArray, *, factor: float, low: float, high: float, length: float
) -> FloatArray:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended."""
    wavelength = np.float32(2 * math.pi) / inv_freq
    scaled = np.where(
        wavelength > np.float32(length / low), inv_freq / np.float32(factor), inv_freq
    )
    smooth = (np.float32(length) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - smooth) * scaled / np.float32(factor) + smooth * scaled
    between = (wavelength >= np.float32(length / high)) & (wavelength <= np.float32(length / low))
    return np.where(between, blended, scaled).astype(np.float32)
