from __future__ import annotations

from typing import Any

import pytest

from dualpace.core.errors import RequestError
from dualpace.core.sampling import DecodeParams, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2.01),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", -2.01),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("logit_bias", {5: 100.5}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", dict.fromkeys(range(301), 0.0)),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_engines_are_told_every_rule() -> None:
    params = SamplingParams(
        seed=11,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.3,
        logit_bias={7: -100.0, 3: 2.5},
        logprobs=20,
    )
    assert params.resolve(eos_ids=(2,), room=9) == DecodeParams(
        temperature=1.0,
        seed=11,
        stop_ids=(2,),
        max_tokens=9,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.3,
        logit_bias=((7, -100.0), (3, 2.5)),
        logprobs=20,
    )
