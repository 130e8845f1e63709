"""Decode attention's plan, and its kernel against float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dualpace.gpu.decode_attention import CLOSES, OPENS, DecodePlanner, TritonDecode

Int32Array = npt.NDArray[np.int32]


def block_tables(lengths: Int32Array, page_tokens: int) -> tuple[Int32Array, Int32Array]:
    """indptr and indices, pages out of order; no row shares one."""
    indptr = np.concatenate([[0], np.cumsum(-(-lengths // page_tokens))]).astype(np.int32)
    pages = np.random.default_rng(len(lengths)).permutation(int(indptr[-1]) + 3)
    return indptr, pages[: indptr[-1]].astype(np.int32)


@pytest.mark.parametrize(("head_dim", "page_tokens"), [(64, 16), (128, 32), (128, 64), (256, 64)])
def test_every_token_of_every_row_is_in_exactly_one_tile(head_dim: int, page_tokens: int) -> None:
    planner = DecodePlanner.of(head_dim, page_tokens)
    size = planner.tile_tokens
    rng = np.random.default_rng(head_dim + page_tokens)
    lengths = np.concatenate(
        [[1, page_tokens - 1, page_tokens, page_tokens + 1, 0, size, size + 1],
         rng.integers(1, 3000, 40)]
    ).astype(np.int32)  # fmt: skip
    indptr, indices = block_tables(lengths, page_tokens)
    arrays = planner.plan(lengths, indptr, indices)
    tiles = arrays["tiles"]
    assert all(array.dtype == np.int32 for array in arrays.values())
    assert arrays["tile_count"].tolist() == [len(tiles)]
    assert len(tiles) <= planner.max_tiles(len(lengths), len(indices))
    for row, length in enumerate(lengths):
        own = np.flatnonzero(tiles[:, 0] == row)
        first, end = tiles[own[0], 2:4]
        assert own.tolist() == list(range(first, end))
        assert (tiles[own, 2:4] == (first, end)).all()
        counts = tiles[own, 1] & (OPENS - 1)
        assert counts.tolist() == [size] * (len(own) - 1) + [length - size * (len(own) - 1)]
        assert ((tiles[own, 1] & OPENS) != 0).tolist() == [True] + [False] * (len(own) - 1)
        assert ((tiles[own, 1] & CLOSES) != 0).tolist() == [False] * (len(own) - 1) + [True]
        pages = tiles[own, 4:].ravel()
        used = indices[indptr[row] : indptr[row + 1]]
        assert pages[: len(used)].tolist() == used.tolist()


def test_a_plan_of_rows_without_context_names_page_zero() -> None:
    none = np.zeros(3, dtype=np.int32)
    tiles = DecodePlanner.of(128, 32).plan(none, np.zeros(4, np.int32), none[:0])["tiles"]
    assert (tiles[:, 1] == OPENS | CLOSES).all()
    assert (tiles[:, 4:] == 0).all()


def float64_attention(
    query: torch.Tensor, layer: torch.Tensor, lengths: Int32Array,
    indptr: Int32Array, indices: Int32Array,
) -> torch.Tensor:  # fmt: skip
    _, heads, head_dim = query.shape
    kv_heads = layer.shape[2]
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    for row in np.flatnonzero(lengths):
        pages = torch.from_numpy(indices[indptr[row] : indptr[row + 1]].astype(np.int64))
        kv = layer[pages.to(layer.device)].double().permute(1, 2, 0, 3, 4)
        kv = kv.reshape(2, kv_heads, -1, head_dim)[:, :, : lengths[row]]
        keys, values = kv.repeat_interleave(heads // kv_heads, dim=1)
        scores = torch.einsum("hd,htd->ht", query[row].double(), keys) / head_dim**0.5
        out[row] = torch.einsum("ht,htd->hd", scores.softmax(-1), values)
    return out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_tokens"),
    [(32, 8, 128, 32), (64, 8, 128, 16), (8, 8, 64, 64), (6, 2, 64, 32), (32, 2, 256, 32),
     (8, 4, 128, 64)],
)  # fmt: skip
def test_rows_match_float64_whoever_shares_them_and_whatever_lies_past_their_ends(
    heads: int, kv_heads: int, head_dim: int, page_tokens: int
) -> None:
    torch.manual_seed(7)
    device = torch.device("cuda")
    attention = TritonDecode(heads, kv_heads, head_dim, page_tokens, device)
    edges = [1, page_tokens - 1, page_tokens, page_tokens + 1, 0]
    batches = [[1], [6000], edges, [*edges, 4000, *range(60, 1500, 37)], [700] * 48, [3] * 200]
    for lengths in (np.array(batch, dtype=np.int32) for batch in batches):
        indptr, indices = block_tables(lengths, page_tokens)
        pages = len(indices) + 3
        pool = torch.randn(pages, 3, 2, kv_heads, page_tokens, head_dim, device=device).bfloat16()
        layer = pool[:, 1]
        for row in np.flatnonzero(lengths % page_tokens):
            layer[indices[indptr[row + 1] - 1], :, :, lengths[row] % page_tokens :] = torch.nan
        # Great scores in places, so that partial results are of very different weight.
        query = torch.randn(len(lengths), heads, head_dim, device=device).bfloat16() * 3
        out = torch.full_like(query, torch.nan)
        plan = attention.planner.plan(lengths, indptr, indices)
        arrays = {name: torch.from_numpy(array).to(device) for name, array in plan.items()}
        exact = float64_attention(query, layer, lengths, indptr, indices)
        for _ in range(2):  # the second launch finds the counters as the first did
            attention.run(query, layer, out, **arrays)
            error = (out.double() - exact).norm(dim=-1)
            assert (error <= 0.01 * exact.norm(dim=-1)).all()
