"""The stateless sampler, vectorised over rows.

The noise for (seed, position, token id) is a counter-based hash (gpu/noise.py), and a token is
drawn by Gumbel-max over the filtered logits: the same logits give the same token on either engine
and in any batch. The C++ engine implements the same definition.

    l_i: logits after biases, bans and penalties (gpu/logit_edits.py)
    s_i = l_i / T in double; w_i = exp(s_i - max s)
    keep: w_i >= min_p; s_i >= the k-th largest s; the shortest prefix by (s descending, id
    ascending) whose w adds up to top_p of what the first two rules kept, at least one token
    token = argmax of s_i + noise_i over the kept, lowest id on a tie

NaN logits count as -inf. T = 0 is the argmax, lowest id on a tie, and so is a row whose largest s
is not finite. Logprobs are of the logits before any of this.

Nothing here waits for the device: what is known on the host is uploaded at once, and every size is
the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualpace.core.history import TokenCounts
from dualpace.core.logprobs import asking_rows
from dualpace.core.sampling import DecodeParams
from dualpace.gpu.logit_edits import edit_arrays, edit_logits
from dualpace.gpu.noise import gumbel_noise, noise_keys
from dualpace.gpu.upload import upload

# Rows are drawn in slices of about this many logits, since the double arithmetic needs several
# arrays of the slice's size.
SLICE_LOGITS = 2**23


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Who draws: `position` is that of the token being drawn, `history` is there for penalties."""

    params: DecodeParams
    position: int
    banned_ids: Sequence[int] = ()
    history: TokenCounts | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens: int64 [R]; logprobs: float64 [L, 2 + 2 n] as `core.logprobs.unpack_logprobs` reads it
    for the rows that asked, or None. Both on the device."""

    tokens: Tensor
    logprobs: Tensor | None


def sample(logits: Tensor, rows: Sequence[SampleRow], pending: Tensor | None = None) -> Sampled:
    """Draw one token a row.

    logits: float32 [R, V], overwritten; pending: int64 [R] on the same device, the token of each
    row that was drawn after its history was written down, or -1 where there is none.
    """
    vocab, device = logits.shape[1], logits.device
    params = [row.params for row in rows]
    asked = asking_rows(param.logprobs for param in params)
    top_k = [p.top_k if p.top_k < vocab else 0 for p in params]
    groups = _group(params, top_k)
    there = upload(
        {
            "keys": noise_keys([p.seed for p in params], [row.position for row in rows]),
            "rules": np.array(
                [(p.temperature, p.top_p, p.min_p) for p in params], np.float64
            ).reshape(-1, 3),
            "top_k": np.array(top_k, np.int64),
            "asked": np.array([row for row, _ in asked], np.int64),
            **{draw.__name__: np.array(members, np.int64) for draw, members in groups.items()},
            **edit_arrays(rows),
        },
        device,
    )
    logits.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    raw = logits[there["asked"]] if asked else None
    edit_logits(logits, there, pending)
    top, tokens = logits.max(dim=-1)
    # Not where it is greedy (x / 0), nothing is left to choose from, or one is beyond all others.
    by_lot = (top.double() / there["rules"][:, 0]).isfinite()
    for draw, members in groups.items():
        for part in _slices(len(members), vocab):
            where = there[draw.__name__][part]
            temperature, top_p, min_p = there["rules"][where, :, None].unbind(1)
            rules = _Rules(
                keys=there["keys"][where],
                temperature=temperature,
                top_p=top_p,
                min_p=min_p if any(params[row].min_p > 0.0 for row in members[part]) else None,
                top_k=there["top_k"][where, None],
                most_k=max(top_k[row] for row in members[part]),
            )
            drawn = draw(logits[where], rules)
            tokens[where] = torch.where(by_lot[where], drawn, tokens[where])
    if raw is None:
        return Sampled(tokens, None)
    width = min(max(count for _, count in asked), vocab)
    return Sampled(tokens, _logprobs(raw, tokens[there["asked"]], width))


@dataclass(frozen=True, slots=True)
class _Rules:
    """Of the rows that are drawn together; [n, 1] but for the keys, [n]."""

    keys: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor | None  # None where no row has one
    top_k: Tensor  # 0 = all
    most_k: int  # the largest of them


_Draw = Callable[[Tensor, _Rules], Tensor]


def _group(params: Sequence[DecodeParams], top_k: Sequence[int]) -> dict[_Draw, list[int]]:
    """Which rows are drawn how. Greedy ones are not."""
    groups: dict[_Draw, list[int]] = {}
    for row, each in enumerate(params):
        if each.temperature > 0.0:
            if each.top_p < 1.0:
                draw = _draw_sorted
            elif each.min_p > 0.0 or top_k[row] > 0:
                draw = _draw_above_threshold
            else:
                draw = _draw_from_all
            groups.setdefault(draw, []).append(row)
    return groups


def _slices(count: int, vocab: int) -> Iterator[slice]:
    step = max(1, SLICE_LOGITS // vocab)
    return (slice(begin, begin + step) for begin in range(0, count, step))


# Each takes logits [n, V] and returns tokens [n].


def _draw_from_all(logits: Tensor, rules: _Rules) -> Tensor:
    return _argmax_with_noise(logits.double().div_(rules.temperature), rules)


def _draw_above_threshold(logits: Tensor, rules: _Rules) -> Tensor:
    """min_p and top_k."""
    scaled = logits.double().div_(rules.temperature)
    if rules.min_p is not None:
        weights = torch.exp(scaled - scaled.amax(dim=-1, keepdim=True))
        scaled.masked_fill_(weights < rules.min_p, -torch.inf)
    if rules.most_k:
        kth = _kth(logits.topk(rules.most_k, dim=-1).values, rules)
        scaled.masked_fill_(logits < kth, -torch.inf)
    return _argmax_with_noise(scaled, rules)


def _draw_sorted(logits: Tensor, rules: _Rules) -> Tensor:
    """All filters: in descending order each of them keeps a prefix."""
    # A stable sort leaves equal values in the order of their ids.
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    scaled = values.double().div_(rules.temperature)
    weights = torch.exp(scaled - scaled[:, :1])
    if rules.min_p is not None:
        weights.masked_fill_(weights < rules.min_p, 0.0)
    if rules.most_k:
        weights.masked_fill_(values < _kth(values, rules), 0.0)
    # What has no weight comes last, and adds nothing to a sum that is complete by then.
    mass = weights.cumsum(dim=-1)
    scaled[:, 1:].masked_fill_(mass[:, :-1] >= rules.top_p * mass[:, -1:], -torch.inf)
    return ids.gather(1, _argmax_with_noise(scaled, rules, ids)[:, None])[:, 0]


def _kth(descending: Tensor, rules: _Rules) -> Tensor:
    """The k-th largest of each row, [n, 1]; -inf for a row that keeps all."""
    kth = descending.gather(1, (rules.top_k - 1).clamp(min=0))
    return kth.masked_fill(rules.top_k == 0, -torch.inf)


def _argmax_with_noise(scaled: Tensor, rules: _Rules, ids: Tensor | None = None) -> Tensor:
    if ids is None:
        ids = torch.arange(scaled.shape[1], device=scaled.device)
    return gumbel_noise(rules.keys, ids).add_(scaled).argmax(dim=-1)


# -- logprobs ------------------------------------------------------------------------------------


def _logprobs(raw: Tensor, tokens: Tensor, width: int) -> Tensor:
    """raw: float32 [L, V] without NaN; tokens: int64 [L]. Returns float64 [L, 2 + 2 width]."""
    parts = [
        _logprobs_slice(raw[part], tokens[part, None], width)
        for part in _slices(len(raw), raw.shape[1])
    ]
    return torch.cat(parts)


def _logprobs_slice(raw: Tensor, tokens: Tensor, width: int) -> Tensor:
    normalizer = raw.double().logsumexp(dim=-1, keepdim=True)
    its = raw.gather(1, tokens)
    rank = 1 + (raw > its).sum(dim=-1, keepdim=True)
    columns = [its.double() - normalizer, rank.double()]
    if width:
        top_ids = _top_ids(raw, width)
        columns += [top_ids.double(), raw.gather(1, top_ids).double() - normalizer]
    return torch.cat(columns, dim=-1)


def _top_ids(raw: Tensor, count: int) -> Tensor:
    """The ids of the largest logits, the lower id first among equals, which `topk` leaves open."""
    # As integers, floats keep their order once those of the negative ones are turned round.
    # Adding zero makes one zero of the two.
    bits = (raw + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(raw.shape[1], device=raw.device)
    return ((ordered << 32) | (0xFFFFFFFF - ids)).topk(count, dim=-1).indices
