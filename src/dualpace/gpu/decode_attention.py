"""Paged decode attention for batches inside a CUDA graph: the plan of a step, and its kernel.

The plan is host arrays that travel with a step's other inputs; the launch reads all that changes
from step to step from device memory, so that one captured launch serves every batch of its bucket.
Knows block tables and lengths; KV has been written into the pages before `run` is called.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

TILE_ELEMENTS = 8192  # of keys in a tile: 64 tokens of a head of 128
ROW_FIELDS = 4  # of a tile's record before its pages
OPENS = 1 << 16  # beside the number of tokens: the tile is its row's first
CLOSES = 1 << 17  # its row's last

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class DecodePlanner:
    """Cuts contexts into tiles of whole pages, `tile_tokens` each."""

    page_tokens: int
    tile_tokens: int

    @classmethod
    def of(cls, head_dim: int, page_tokens: int) -> DecodePlanner:
        return cls(page_tokens, max(page_tokens, TILE_ELEMENTS // head_dim))

    @property
    def tile_pages(self) -> int:
        return self.tile_tokens // self.page_tokens

    @property
    def tile_fields(self) -> int:
        """int32 of a tile's record."""
        return ROW_FIELDS + self.tile_pages

    def max_tiles(self, rows: int, pages: int) -> int:
        """Most tiles of `rows` whose block tables name `pages` pages altogether."""
        return pages // self.tile_pages + rows

    def plan(
        self, lengths: Int32Array, indptr: Int32Array, indices: Int32Array
    ) -> dict[str, Int32Array]:
        """Arrays of one step. A row of length 0 gets zeros as its result.

        lengths: tokens of context [rows]; indptr: [rows + 1], where each row's pages start in
        indices: [pages]. Returns "tile_count": [1], and "tiles": [tiles, tile_fields], whose size
        alone depends on more than the number of rows: row, tokens (fewer than a tile's only at the
        end of a row), first and end tile of the row, pages.
        """
        size, pages = self.tile_tokens, self.tile_pages
        per_row = np.maximum(-(-lengths // size), 1)
        ends = np.cumsum(per_row, dtype=np.int32)
        firsts = ends - per_row
        rows = np.arange(len(lengths), dtype=np.int32)
        shift = indptr[:-1] - firsts * pages  # from tiles' places to those of their pages
        number = np.arange(ends[-1], dtype=np.int32)
        tiles = np.empty((len(number), self.tile_fields), dtype=np.int32)
        tiles[:, 0] = np.repeat(rows, per_row)
        tiles[:, 1] = size
        tiles[ends - 1, 1] = lengths - (per_row - 1) * size
        tiles[firsts, 1] |= OPENS
        tiles[ends - 1, 1] |= CLOSES
        tiles[:, 2] = np.repeat(firsts, per_row)
        tiles[:, 3] = np.repeat(ends, per_row)
        place = np.repeat(shift, per_row) + number * pages
        some = indices if len(indices) else np.zeros(1, dtype=np.int32)
        for page in range(pages):
            # Past a row's end any page will do: nothing of it is read.
            tiles[:, ROW_FIELDS + page] = np.take(some, place + page, mode="clip")
        return {"tile_count": ends[-1:], "tiles": tiles}


class TritonDecode:
    """The launch, with its workspace: one at a time, whatever the bucket."""

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, page_tokens: int, device: torch.device,
        programs_per_sm: int = 2, num_warps: int = 4, num_stages: int = 3, tile_tokens: int = 0,
        min_run: int = 2, block_group: int = 1,
    ) -> None:  # fmt: skip
        self.planner = DecodePlanner.of(head_dim, page_tokens)
        if tile_tokens:
            self.planner = DecodePlanner(page_tokens, tile_tokens)
        self._group = heads // kv_heads
        processors = 132
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._programs = processors * programs_per_sm
        self._num_warps = num_warps
        self._min_run = min_run
        self._block_group = max(block_group, 1 << (self._group - 1).bit_length())
        # So many that all programs are resident, but for their shared memory.
        self._registers = min(255, 2**16 // (32 * num_warps * programs_per_sm) // 8 * 8)
        self._num_stages = num_stages
        slots = 2 * self._programs * self._group
        self._partial = torch.empty((slots, head_dim), dtype=torch.float32, device=device)
        self._stats = torch.empty(slots, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(self._programs, dtype=torch.int32, device=device)

    def run(
        self, query: Tensor, pool: Tensor, out: Tensor, tiles: Tensor, tile_count: Tensor
    ) -> None:
        """query, out: bfloat16 [rows, heads, D], contiguous; pool: a layer's view
        [pages, 2, kv_heads, page_tokens, D]; tiles and tile_count: a plan's, on the device."""
        from dualpace.gpu.triton_decode import decode

        kv_heads, head_dim = pool.shape[2], pool.shape[4]
        planner = self.planner
        decode[(self._programs,)](
            query, pool, out, tiles, tile_count, self._partial, self._stats, self._arrived,
            math.log2(math.e) / math.sqrt(head_dim),
            pool.stride(0), pool.stride(1), pool.stride(2),
            KV_HEADS=kv_heads, GROUP=self._group, D=head_dim,
            PAGE_TOKENS=planner.page_tokens, TILE=planner.tile_tokens,
            FIELDS=planner.tile_fields, MIN_RUN=self._min_run,
            BLOCK_GROUP=self._block_group,
            BLOCK_SLOTS=max(1, 4096 // (self._block_group * head_dim)),
            num_warps=self._num_warps, num_stages=self._num_stages,
            maxnreg=self._registers,
        )  # fmt: skip
