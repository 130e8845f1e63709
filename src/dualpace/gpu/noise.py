"""Gumbel noise from a counter-based hash (splitmix64), on the host for keys, on the device for ids.

The noise of (seed, position, token id) depends on nothing else, so it needs no state.

    u_i = ((mix(key + G (i + 1)) >> 11) + 0.5) 2^-53,  key = mix(seed + G (position + 1))
    noise_i = -log(-log u_i)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def noise_keys(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.int64]:
    """The key of each (seed, position), [R]; uint64 read as int64."""
    x = np.array(seeds, np.uint64)
    x += np.uint64(_GOLDEN) * (np.array(positions, np.uint64) + np.uint64(1))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return (x ^ (x >> np.uint64(31))).view(np.int64)


def gumbel_noise(keys: Tensor, ids: Tensor) -> Tensor:
    """keys: int64 [R]; ids: int64 [V], or [R, V] where rows differ. Returns float64 [R, V]."""
    hashed = _mix(keys[:, None] + (ids + 1) * _signed(_GOLDEN))
    uniform = (_shift_right(hashed, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


# int64 arithmetic wraps like that of uint64.


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of `value`."""
    return (value + 2**63) % 2**64 - 2**63


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _signed(_FIRST)
    x = (x ^ _shift_right(x, 27)) * _signed(_SECOND)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64 >> copies the sign bit, which the mask takes away."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
