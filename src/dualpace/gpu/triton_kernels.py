"""What a step needs between library calls, a kernel each: rotation with KV append, drawing, and
copies to the host.

Imported only where there is CUDA: Triton comes with torch's CUDA builds. The definitions followed
are those of `models.reference` (rotation, norms) and `gpu.sampler` (noise, ties).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROPE_HEADS = 8  # heads per program of the rotation
COPY_BLOCK = 256  # words per program of a copy
DRAW_BLOCK = 4096  # logits per program of the first pass of drawing


def rotate_and_append(
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    pages: Tensor,
    offsets: Tensor,
    pool: Tensor,
    query: Tensor,
) -> None:
    """Rotate queries and keys and write keys and values into their pages.

    qkv: bfloat16 [N, (heads + 2·kv_heads)·D], its queries and keys are rotated in place, too;
    rotary: cos and sin, float32 [N, D/2]; norms: weights [D] of the norms of queries and keys, if
    the model has them; pages: int32 [N], -1 to write nothing; offsets: int32 [N], place in the
    page; pool: [pages, 2, kv_heads, page_tokens, D] of one layer; query: [N, heads, D], is filled.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = pool.shape[2]
    cos, sin = rotary
    query_norm, key_norm = norms if norms is not None else (cos, cos)
    grid = (tokens, triton.cdiv(heads + 2 * kv_heads, ROPE_HEADS))
    _rotate_and_append[grid](
        qkv, cos, sin, query_norm, key_norm, pages, offsets, pool, query,
        eps,
        pool.stride(0), pool.stride(1), pool.stride(2),
        HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2), BLOCK_HEADS=ROPE_HEADS,
        NORMED=norms is not None,
        num_warps=4,
    )  # fmt: skip


def copy_words(source: Tensor, target: Tensor) -> None:
    """int64 [n] each, contiguous, on the device or in pinned memory."""
    count = source.numel()
    _copy_words[(triton.cdiv(count, COPY_BLOCK),)](source, target, count, BLOCK=COPY_BLOCK)


# One kernel for all counts: Triton would compile one for 1 and one for multiples of 16, and load
# them when they are first met, which may wait for an assisted iteration.
@triton.jit(do_not_specialize=["count"])
def _copy_words(source, target, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + index, tl.load(source + index, mask=index < count), mask=index < count)


@triton.jit
def _rotate_and_append(
    qkv, cos, sin, query_norm, key_norm, pages, offsets, pool, query,
    eps,
    page_stride, part_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_HEADS of the heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    place = tl.arange(0, BLOCK_HALF)
    inside = (head[:, None] < HEADS + 2 * KV_HEADS) & (place[None, :] < HALF)
    source = token * (HEADS + 2 * KV_HEADS) * 2 * HALF + head[:, None] * 2 * HALF + place[None, :]
    raw_first = tl.load(qkv + source, mask=inside, other=0.0)
    raw_second = tl.load(qkv + source + HALF, mask=inside, other=0.0)
    first = raw_first.to(tl.float32)
    second = raw_second.to(tl.float32)
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = head >= HEADS + KV_HEADS
    if NORMED:
        square = tl.sum(first * first + second * second, axis=1) / (2 * HALF)
        scale = tl.rsqrt(square + eps)[:, None]
        at = place[None, :] + tl.zeros([BLOCK_HEADS, 1], tl.int32)
        within = place[None, :] < HALF
        q_first = tl.load(query_norm + at, mask=within & is_query[:, None], other=0.0)
        q_second = tl.load(query_norm + at + HALF, mask=within & is_query[:, None], other=0.0)
        k_first = tl.load(key_norm + at, mask=within & is_key[:, None], other=0.0)
        k_second = tl.load(key_norm + at + HALF, mask=within & is_key[:, None], other=0.0)
        first = (first * scale) * (q_first + k_first).to(tl.float32)
        second = (second * scale) * (q_second + k_second).to(tl.float32)
    c = tl.load(cos + token * HALF + place, mask=place < HALF, other=0.0)[None, :]
    s = tl.load(sin + token * HALF + place, mask=place < HALF, other=0.0)[None, :]
    turned_first = tl.where(is_value[:, None], raw_first, (first * c - second * s).to(tl.bfloat16))
    turned_second = tl.where(
        is_value[:, None], raw_second, (second * c + first * s).to(tl.bfloat16)
    )
    target = token * HEADS * 2 * HALF + head[:, None] * 2 * HALF + place[None, :]
    tl.store(query + target, turned_first, mask=inside & is_query[:, None])
    tl.store(query + target + HALF, turned_second, mask=inside & is_query[:, None])
    rotated = inside & (is_query | is_key)[:, None]
    tl.store(qkv + source, turned_first, mask=rotated)
    tl.store(qkv + source + HALF, turned_second, mask=rotated)
    page = tl.load(pages + token).to(tl.int64)
    offset = tl.load(offsets + token).to(tl.int64)
    kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS).to(tl.int64)
    slot = (
        page * page_stride
        + tl.where(is_value, part_stride, 0)
        + kv_head * head_stride
        + offset * 2 * HALF
    )
    stored = inside & (head >= HEADS)[:, None] & (page >= 0)
    tl.store(pool + slot[:, None] + place[None, :], turned_first, mask=stored)
    tl.store(pool + slot[:, None] + place[None, :] + HALF, turned_second, mask=stored)


def draw(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    tokens: Tensor,
    places: Tensor | None = None,
) -> None:
    """One token a row, as `gpu.sampler.sample` draws it without filters and banned ids.

    logits: bfloat16 or float32 [R, V]; temperatures: float64 [R], 0 for the argmax; seeds and
    positions: int64 [R]; tokens: int64, gets each row's, in the rows' order or at its place of
    `places`, int64 [R].
    """
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, DRAW_BLOCK)
    best = torch.empty((rows, blocks), dtype=torch.float64, device=logits.device)
    index = torch.empty((rows, blocks), dtype=torch.int64, device=logits.device)
    _draw_block[(rows, blocks)](
        logits, temperatures, seeds, positions, best, index, vocab, logits.stride(0),
        BLOCK=DRAW_BLOCK, num_warps=8,
    )  # fmt: skip
    _draw_best[(rows,)](
        best, index, tokens, tokens if places is None else places, blocks,
        BLOCK=triton.next_power_of_2(blocks), PLACED=places is not None, num_warps=1,
    )  # fmt: skip


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _draw_block(
    logits, temperatures, seeds, positions, best, index, vocab, stride, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf"))
    value = value.to(tl.float32)
    value = tl.where(value == value, value, float("-inf")).to(tl.float64)
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        golden: tl.constexpr = 0x9E3779B97F4A7C15
        seed = tl.load(seeds + row).to(tl.uint64)
        position = tl.load(positions + row).to(tl.uint64)
        key = _mix(seed + (position + 1) * golden)
        hashed = _mix(key + (ids + 1).to(tl.uint64) * golden)
        uniform = ((hashed >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16
        value = value / temperature - tl.log(-tl.log(uniform))
    top, at = tl.max(value, axis=0, return_indices=True)
    tl.store(best + row * tl.num_programs(1) + block, top)
    tl.store(index + row * tl.num_programs(1) + block, (block * BLOCK + at).to(tl.int64))


@triton.jit
def _draw_best(
    best, index, tokens, places, blocks, BLOCK: tl.constexpr, PLACED: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    value = tl.load(best + row * blocks + block, mask=block < blocks, other=float("-inf"))
    _, at = tl.max(value, axis=0, return_indices=True)
    place = tl.load(places + row) if PLACED else row
    tl.store(tokens + place, tl.load(index + row * blocks + at))
