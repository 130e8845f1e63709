"""The stateless sampler, vectorised over rows.

The noise for (seed, position, token id) is a counter-based hash (splitmix64), and a token is drawn
by Gumbel-max over the filtered logits: the same logits give the same token on either engine and in
any batch. The C++ engine implements the same definition.

    s_i = l_i / T in double; w_i = exp(s_i - max s)
    keep: w_i >= min_p; s_i >= the k-th largest s; the shortest prefix by (s descending, id
    ascending) whose w adds up to top_p of what the first two rules kept, at least one token
    token = argmax of s_i - log(-log u_i) over the kept, lowest id on a tie
    u_i = ((mix(key + G (i + 1)) >> 11) + 0.5) 2^-53,  key = mix(seed + G (position + 1))

NaN logits and banned ids count as -inf. T = 0 is the argmax, lowest id on a tie.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dualpace.core.sampling import DecodeParams

# Rows are drawn in slices of about this many logits, since the double arithmetic needs several
# arrays of the slice's size.
SLICE_LOGITS = 2**23


def sample(
    logits: Tensor,
    params: Sequence[DecodeParams],
    positions: Sequence[int],
    banned: Sequence[Sequence[int]],
) -> Tensor:
    """Draw one token a row.

    logits: float32 [R, V], overwritten; positions: absolute position of the token being drawn;
    banned: ids that may not be drawn. Returns int64 [R] on the device of logits.
    """
    logits.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if any(banned):
        rows = [row for row, ids in enumerate(banned) for _ in ids]
        columns = [token_id for ids in banned for token_id in ids]
        logits[_indices(rows, logits.device), _indices(columns, logits.device)] = -torch.inf
    tokens = logits.argmax(dim=-1)
    random_rows = [row for row, param in enumerate(params) if param.temperature > 0.0]
    step = max(1, SLICE_LOGITS // logits.shape[1])
    for begin in range(0, len(random_rows), step):
        rows = random_rows[begin : begin + step]
        where = _indices(rows, logits.device)
        tokens[where] = _draw(
            logits[where], [params[row] for row in rows], [positions[row] for row in rows]
        )
    return tokens


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], ids: Tensor) -> Tensor:
    """Noise of each (seed, position) for token ids int64 [V]: float64 [R, V]."""
    counters = [
        _signed(seed + _GOLDEN * (position + 1))
        for seed, position in zip(seeds, positions, strict=True)
    ]
    keys = _mix(_indices(counters, ids.device))
    hashed = _mix(keys[:, None] + (ids + 1) * _signed(_GOLDEN))
    uniform = (_shift_right(hashed, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def _draw(logits: Tensor, params: Sequence[DecodeParams], positions: Sequence[int]) -> Tensor:
    """logits [R, V] of rows that all have a temperature."""
    vocab = logits.shape[1]
    device = logits.device
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device)
    scaled = logits.double() / temperature[:, None]
    scaled = _filter_top_p(_filter_top_k(_filter_min_p(scaled, params), scaled, params), params)
    ids = torch.arange(vocab, device=device)
    return (scaled + gumbel_noise([p.seed for p in params], positions, ids)).argmax(dim=-1)


def _filter_min_p(scaled: Tensor, params: Sequence[DecodeParams]) -> Tensor:
    rows = [row for row, param in enumerate(params) if param.min_p > 0.0]
    if not rows:
        return scaled
    where = _indices(rows, scaled.device)
    bound = torch.tensor(
        [params[row].min_p for row in rows], dtype=torch.float64, device=scaled.device
    )
    kept = scaled.clone()
    kept[where] = scaled[where].masked_fill(_weights(scaled[where]) < bound[:, None], -torch.inf)
    return kept


def _filter_top_k(kept: Tensor, scaled: Tensor, params: Sequence[DecodeParams]) -> Tensor:
    """The threshold is taken over all of `scaled`, whatever else has been dropped from `kept`."""
    rows = [row for row, param in enumerate(params) if 0 < param.top_k < scaled.shape[1]]
    if not rows:
        return kept
    where = _indices(rows, scaled.device)
    k = _indices([params[row].top_k for row in rows], scaled.device)
    largest = scaled[where].topk(max(params[row].top_k for row in rows), dim=-1).values
    threshold = largest.gather(1, k[:, None] - 1)
    kept = kept.clone()
    kept[where] = kept[where].masked_fill(scaled[where] < threshold, -torch.inf)
    return kept


def _filter_top_p(kept: Tensor, params: Sequence[DecodeParams]) -> Tensor:
    rows = [row for row, param in enumerate(params) if param.top_p < 1.0]
    if not rows:
        return kept
    where = _indices(rows, kept.device)
    share = torch.tensor(
        [params[row].top_p for row in rows], dtype=torch.float64, device=kept.device
    )
    # A stable sort leaves equal values in the order of their ids.
    values, order = kept[where].sort(dim=-1, descending=True, stable=True)
    mass = _weights(values).cumsum(dim=-1)
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=-1)
    inside = before < share[:, None] * mass[:, -1:]
    inside[:, 0] = True
    kept = kept.clone()
    kept[where] = torch.empty_like(values).scatter_(
        1, order, values.masked_fill(~inside, -torch.inf)
    )
    return kept


def _weights(scaled: Tensor) -> Tensor:
    return torch.exp(scaled - scaled.amax(dim=-1, keepdim=True))


# -- splitmix64 on int64 tensors, whose arithmetic wraps like uint64's -----------------------------


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of `value`."""
    return (value + 2**63) % 2**64 - 2**63


_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64 >> copies the sign bit, which the mask takes away."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _indices(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
