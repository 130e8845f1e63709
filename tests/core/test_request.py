"""What a request's state tells of itself."""

from __future__ import annotations

import itertools

from dualpace.core.request import RequestState
from dualpace.core.sampling import DecodeParams


def test_any_part_of_prompt_and_output_can_be_had() -> None:
    for prompt, output in itertools.product(range(1, 5), range(4)):
        known = list(range(prompt + output))
        state = RequestState("r", 0, 0, known[:prompt], known[prompt:], DecodeParams())
        for start, end in itertools.combinations(range(len(known) + 1), 2):
            assert state.tokens_at(start, end) == known[start:end]
