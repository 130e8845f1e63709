"""From files into a torch device's memory, through a few buffers of fixed size.

Threads read pieces of tensors from disk or page cache into the buffers while earlier pieces are on
their way to the device. On CUDA the buffers are pinned, so that copies out of them run by
themselves; on the CPU device only the pinning and the events are left out.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from dualpace.models.safetensors_file import FileTensor

READERS = 4  # pieces that are read at a time; one thread reads slower than PCIe takes it
SLOTS = 2 * READERS  # as many again on their way to the device
SLOT_BYTES = 16 * 2**20

_TORCH_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(ml_dtypes.bfloat16): torch.bfloat16,
    np.dtype(np.float16): torch.float16,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class _Slot:
    """A buffer, and on CUDA the event after which it may be written again."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self.buffer = torch.empty(SLOT_BYTES, dtype=torch.uint8, pin_memory=on_cuda)
        self.copied = torch.cuda.Event() if on_cuda else None

    def record(self) -> None:
        if self.copied is not None:
            self.copied.record()

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


@dataclass
class _Piece:
    """Consecutive elements of a tensor that are being read into a slot."""

    slot: _Slot
    reading: Future[None]
    staged: Tensor  # part of the slot's buffer, as stored
    place: Tensor  # on the device, flat


class Staging:
    """A context: when it is left without an error, everything has arrived.

    For one thread; copies run on its current CUDA stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: list[_Slot] = []
        self._used = 0  # pieces so far; they take the slots in turn
        self._pieces: deque[_Piece] = deque()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="weights")

    def copy(self, tensor: FileTensor, place: Tensor) -> None:
        """Start filling `place` (contiguous, of the tensor's shape), converting to its dtype.

        Raises `ModelError` when this tensor or an earlier one cannot be read.
        """
        flat = place.view(-1)
        size = tensor.stored.itemsize
        for number, part in enumerate(flat.split(SLOT_BYTES // size)):
            slot = self._next_slot()
            staged = slot.buffer[: len(part) * size]
            reading = self._readers.submit(
                tensor.read_into, memoryview(staged.numpy()), number * SLOT_BYTES
            )
            self._pieces.append(
                _Piece(slot, reading, staged.view(_TORCH_DTYPES[tensor.stored]), part)
            )

    def _next_slot(self) -> _Slot:
        if len(self._pieces) == READERS:
            self._send(self._pieces.popleft())
        if len(self._slots) < SLOTS:
            self._slots.append(_Slot(self._device))
        slot = self._slots[self._used % SLOTS]
        self._used += 1
        slot.wait()
        return slot

    def _send(self, piece: _Piece) -> None:
        piece.reading.result()
        staged = piece.staged
        if staged.dtype != piece.place.dtype:
            # Converted on the device: from host memory torch would convert first, and wait for it.
            staged = staged.to(self._device, non_blocking=True)
        piece.place.copy_(staged, non_blocking=True)
        piece.slot.record()

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        try:
            while self._pieces and failure is None:
                self._send(self._pieces.popleft())
            for slot in self._slots:
                slot.wait()
        finally:
            self._readers.shutdown(cancel_futures=True)
