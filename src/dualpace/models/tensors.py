"""A tensor on its way from a checkpoint into an engine: what loaders hand over, and its dtypes.

Knows no file format, no model and no torch.
"""

from __future__ import annotations

from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dualpace.core.config import DType

Array = npt.NDArray[Any]

NUMPY_DTYPES: dict[DType, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}


class Weight(Protocol):
    """A tensor that may not be in memory yet: its array is made, or read, when NumPy asks for it.

    An array is one itself. `DummyTensor` and `FileTensor` are the ones that are not; whoever knows
    them fills its own memory from them and never makes the array.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        ...

    def __array__(self) -> Array:
        """C-contiguous, perhaps read-only."""
        ...


def converted(array: Array, dtype: np.dtype[Any]) -> Array:
    """`array` (any float dtype) in `dtype`, C-contiguous and aligned; itself where it is that.

    float64 and float16 go to bfloat16 by way of float32, as torch does it.
    """
    if array.dtype != dtype and array.dtype != np.float32:
        array = array.astype(np.float32)  # ml_dtypes converts to and from float32 only
    return np.require(array.astype(dtype, copy=False), requirements=["C_CONTIGUOUS", "ALIGNED"])
