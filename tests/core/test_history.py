from __future__ import annotations

import random
from collections import Counter

from dualpace.core.history import TokenHistory
from dualpace.core.request import RequestState
from dualpace.core.sampling import DecodeParams


def test_counts_are_those_of_the_whole_request_at_every_length() -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(40) for _ in range(30)]
    output = [rng.randrange(20, 60) for _ in range(50)]
    state = RequestState("r", 0, 0, prompt, [], DecodeParams(repetition_penalty=1.1))
    history = TokenHistory()
    snapshots = []
    for length in [0, 0, 1, 2, 7, 30, 50]:
        state.output = output[:length]
        snapshots.append((length, history.of(state)))
    for length, got in snapshots:  # an older one has not changed since
        assert got is not None
        made = Counter(output[:length])
        expected = {token_id: made[token_id] for token_id in {*prompt, *made}}
        assert len(got.ids) == len(expected)
        assert dict(zip(got.ids, got.counts, strict=True)) == expected


def test_nothing_is_counted_for_a_request_without_penalties() -> None:
    state = RequestState("r", 0, 0, [1], [2], DecodeParams(temperature=1.0, top_p=0.9))
    assert TokenHistory().of(state) is None
