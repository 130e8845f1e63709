"""Paged decode attention in Triton: one query token a row, bfloat16.

The contexts of all rows are cut into tiles of TILE tokens, whole pages each; with every KV head
they make one line of `tiles × kv_heads` pieces of work, which the programs of a fixed grid share in
equal runs, wherever rows begin or end ("stream-K", Osama et al. 2023). So the grid does not depend
on the batch, no program waits in a second wave, and loads of the next tiles are in flight across
the end of a row. What a program sees of a row that others share goes to float32 slots, two a
program: slot 2p+1 for the row whose first tile it has, 2p for one begun before. Whoever comes last
merges them.

Knows the arrays of `decode_attention.DecodePlanner`; imported only where there is CUDA.
"""

from __future__ import annotations

import triton
import triton.language as tl

OPENS = tl.constexpr(1 << 16)  # beside a tile's number of tokens: it is its row's first
CLOSES = tl.constexpr(1 << 17)  # its row's last
NOTHING = tl.constexpr(-1.0e30)  # maximum of no scores: finite, so that differences are not NaN


@triton.jit
def decode(
    query, pool, out, tiles, count, partial, stats, arrived,
    scale,
    page_stride, part_stride, head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, TILE: tl.constexpr, FIELDS: tl.constexpr, MIN_RUN: tl.constexpr,
    BLOCK_GROUP: tl.constexpr, BLOCK_SLOTS: tl.constexpr,
):  # fmt: skip
    """One program: its run of tiles. scale: of the scores, times log2(e)."""
    tile_count = tl.load(count)
    total = tile_count * KV_HEADS
    program = tl.program_id(0)
    begin, end = _run(program, total, MIN_RUN)
    group = tl.arange(0, BLOCK_GROUP)
    place = tl.arange(0, D)
    token = tl.arange(0, TILE)
    in_group = (group < GROUP)[:, None]
    within = (token % PAGE_TOKENS)[:, None] * D + place[None, :]
    best = tl.full([BLOCK_GROUP], NOTHING, tl.float32)
    weight = tl.zeros([BLOCK_GROUP], tl.float32)
    mixed = tl.zeros([BLOCK_GROUP, D], tl.float32)
    # A tile's record is read a turn ahead, and not by the loads' own pipeline, in which it would
    # take the place of keys and values in flight.
    head = begin // tl.maximum(tile_count, 1)
    tile = begin - head * tile_count
    row, tokens, pages = _record(tiles + tile * FIELDS, TILE // PAGE_TOKENS)
    for piece in tl.range(begin, end):
        page = tl.full([TILE], 0, tl.int32)
        for index in tl.static_range(TILE // PAGE_TOKENS):
            page = tl.where(token // PAGE_TOKENS == index, pages[index], page)
        seen = token < (tokens & 0xFFFF)
        slot = page.to(tl.int64)[:, None] * page_stride + (head * head_stride + within)
        heads = (row * KV_HEADS + head) * GROUP + group
        q = tl.load(query + heads[:, None] * D + place[None, :], mask=in_group, other=0.0)
        # Masked loads, not only masked scores: what no token was written to may hold NaN.
        keys = tl.load(pool + slot, mask=seen[:, None], other=0.0)
        values = tl.load(pool + slot + part_stride, mask=seen[:, None], other=0.0)
        scores = tl.dot(q, keys.T) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        opens = ((tokens & OPENS) != 0) | (piece == begin)
        before = tl.where(opens, NOTHING, best)
        best = tl.maximum(before, tl.max(scores, 1))
        shrink = tl.where(opens, 0.0, tl.exp2(before - best))
        share = tl.exp2(scores - best[:, None])
        weight = weight * shrink + tl.sum(share, 1)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(share.to(tl.bfloat16), values, mixed)
        closes = (tokens & CLOSES) != 0
        if closes | (piece + 1 == end):
            here = head * tile_count + tl.load(tiles + tile * FIELDS + 2) >= begin
            whole = here & closes
            result = mixed / tl.maximum(weight, 1.0e-30)[:, None]
            tl.store(
                out + heads[:, None] * D + place[None, :],
                result.to(tl.bfloat16),
                mask=in_group & whole,
            )
            kept = 2 * program + here.to(tl.int32)
            at = kept * GROUP + group
            shared = (group < GROUP) & (whole == 0)
            tl.store(partial + at[:, None] * D + place[None, :], result, mask=shared[:, None])
            tl.store(stats + at, best + tl.log2(tl.maximum(weight, 1.0e-30)), mask=shared)
        wraps = tile + 1 == tile_count
        head = tl.where(wraps, head + 1, head)
        tile = tl.where(wraps, 0, tile + 1)
        row, tokens, pages = _record(tiles + tile * FIELDS, TILE // PAGE_TOKENS)
    if begin < end:
        _close(
            out, tiles, partial, stats, arrived, begin, end, tile_count, total,
            False, KV_HEADS, GROUP, D, FIELDS, MIN_RUN, BLOCK_GROUP, BLOCK_SLOTS,
        )  # fmt: skip
        _close(
            out, tiles, partial, stats, arrived, begin, end, tile_count, total,
            True, KV_HEADS, GROUP, D, FIELDS, MIN_RUN, BLOCK_GROUP, BLOCK_SLOTS,
        )  # fmt: skip


@triton.jit
def _record(fields, PAGES: tl.constexpr):
    """What `decode_attention` says of a tile."""
    pages = tl.tuple([tl.load(fields + 4)])
    for index in tl.static_range(1, PAGES):
        pages += tl.tuple([tl.load(fields + 4 + index)])
    return tl.load(fields), tl.load(fields + 1), pages


@triton.jit
def _run(program, total, MIN_RUN: tl.constexpr):
    """Bounds of a program's run of `total` pieces of work."""
    programs = _programs(total, MIN_RUN)
    begin = tl.minimum(program, programs).to(tl.int64) * total // programs
    end = tl.minimum(program + 1, programs).to(tl.int64) * total // programs
    return begin.to(tl.int32), end.to(tl.int32)


@triton.jit
def _programs(total, MIN_RUN: tl.constexpr):
    """How many programs have work: the more of them share a row, the longer its merge."""
    return tl.maximum(tl.minimum(tl.num_programs(0), total // MIN_RUN), 1)


@triton.jit
def _program_of(piece, total, MIN_RUN: tl.constexpr):
    """The program whose run has `piece`."""
    return (((piece + 1).to(tl.int64) * _programs(total, MIN_RUN) - 1) // total).to(tl.int32)


@triton.jit
def _close(
    out, tiles, partial, stats, arrived, begin, end, tile_count, total,
    LAST: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    FIELDS: tl.constexpr, MIN_RUN: tl.constexpr,
    BLOCK_GROUP: tl.constexpr, BLOCK_SLOTS: tl.constexpr,
):  # fmt: skip
    """Report this program's part of its first or last row, and merge if no other part is missing.

    Nothing if the program has all of the row, or if its last row is its first.
    """
    piece = end - 1 if LAST else begin
    head = piece // tile_count
    fields = tiles + (piece - head * tile_count) * FIELDS
    row = tl.load(fields)
    low = head * tile_count + tl.load(fields + 2)
    high = head * tile_count + tl.load(fields + 3)
    shared = (low > begin) & (high > end) if LAST else (low < begin) | (high > end)
    if shared:
        low_program = _program_of(low, total, MIN_RUN)
        others = _program_of(high - 1, total, MIN_RUN) - low_program
        tl.debug_barrier()  # all threads have written their part
        before = tl.atomic_add(arrived + low_program, 1, sem="acq_rel")
        if before == others:
            tl.store(arrived + low_program, 0)  # for the next launch
            _merge(
                out, partial, stats, row * KV_HEADS + head, low_program, others + 1,
                GROUP, D, BLOCK_GROUP, BLOCK_SLOTS,
            )  # fmt: skip


@triton.jit
def _merge(
    out, partial, stats, unit, low_program, parts,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK_SLOTS: tl.constexpr,
):  # fmt: skip
    """Weigh the parts of one row and KV head, each normalized, by their log-sum-exp (base 2)."""
    group = tl.arange(0, BLOCK_GROUP)
    place = tl.arange(0, D)
    one = tl.arange(0, BLOCK_SLOTS)
    best = tl.full([BLOCK_GROUP], NOTHING, tl.float32)
    weight = tl.zeros([BLOCK_GROUP], tl.float32)
    mixed = tl.zeros([BLOCK_GROUP, D], tl.float32)
    for start in tl.range(0, parts, BLOCK_SLOTS):
        part = start + one
        slot = 2 * (low_program + part) + (part == 0).to(tl.int32)
        inside = (part < parts)[:, None] & (group < GROUP)[None, :]
        at = slot[:, None] * GROUP + group[None, :]
        size = tl.load(stats + at, mask=inside, other=NOTHING, cache_modifier=".cg")
        result = tl.load(
            partial + at[:, :, None] * D + place[None, None, :],
            mask=inside[:, :, None], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new = tl.maximum(best, tl.max(size, 0))
        shrink = tl.exp2(best - new)
        share = tl.where(inside, tl.exp2(size - new[None, :]), 0.0)
        weight = weight * shrink + tl.sum(share, 0)
        mixed = mixed * shrink[:, None] + tl.sum(share[:, :, None] * result, 0)
        best = new
    result = mixed / tl.maximum(weight, 1.0e-30)[:, None]
    tl.store(
        out + (unit * GROUP + group)[:, None] * D + place[None, :],
        result.to(tl.bfloat16),
        mask=(group < GROUP)[:, None],
    )
