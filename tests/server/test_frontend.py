from __future__ import annotations

import pytest

from dualpace import SamplingParams
from dualpace.core.errors import CapacityError, EngineError, RequestError
from dualpace.core.messages import EngineReady, EngineStats, Failed, Lost, TokenEvent
from dualpace.server.errors import NotReadyError

pytestmark = pytest.mark.anyio


async def _collect(frontend, prompt, **options):
    return [d async for d in frontend.generate(prompt, SamplingParams(**options))]


def _text(deltas):
    return "".join(delta.text for delta in deltas)


async def test_each_token_is_one_delta_that_names_its_engine(engines, byte_level):
    engines.ready()
    deltas = await _collect(engines.frontend, byte_level.encode("the"), max_tokens=50)
    assert _text(deltas) == " lazy dog"
    assert [d.token_ids for d in deltas][-1] == (byte_level.eos,)
    assert {d.engine for d in deltas[::2]} == {"gpu"}
    assert {d.engine for d in deltas[1::2]} == {"cpu"}
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["stop"]
    assert len(engines.frontend.journal) == 0
    assert engines.aborts == []


async def test_a_token_that_the_cpu_attended_for_in_a_gated_step_names_the_cpu(engines, byte_level):
    engines.ready()
    engines.script = None
    ids = byte_level.encode(" lazy")
    stream = engines.frontend.submit([byte_level.encode("the")], SamplingParams(max_tokens=2))
    name = engines.submits[0].id
    events = TokenEvent(name, 0, 0, ids[0]), TokenEvent(name, 0, 1, ids[1], "length", attended=True)
    for event in events:
        engines.frontend.on_envelope(engines.tokens("gpu", event))
        (delta,) = await stream.take()
        assert delta.engine == ("cpu" if event.attended else "gpu")


async def test_a_request_of_a_dead_engine_goes_on_where_it_was(engines, byte_level):
    engines.ready()
    engines.script = None
    ids = byte_level.encode(" lazy dog")
    stream = engines.frontend.submit([byte_level.encode("the")], SamplingParams(max_tokens=9))
    (first,) = engines.submits
    name = first.id
    engines.frontend.on_envelope(engines.tokens("gpu", TokenEvent(name, 0, 0, ids[0])))
    engines.frontend.on_envelope(engines.tokens("cpu", TokenEvent(name, 1, 1, ids[1])))
    engines.frontend.on_envelope(engines.tokens("cpu", TokenEvent(name, 1, 3, ids[3])))
    engines.receive("gpu", Lost([(name, 5), ("unknown", 5)]))
    again = engines.submits[-1]
    assert (again.output, again.epoch, again.arrival) == (ids[:2], 5, first.arrival)
    assert again.params == first.params
    stale = TokenEvent(name, 1, 2, 0)
    engines.frontend.on_envelope(engines.tokens("cpu", stale))
    rest = [TokenEvent(name, 5, i, ids[i]) for i in range(2, len(ids))]
    end = TokenEvent(name, 5, len(ids), byte_level.eos, "stop")
    engines.frontend.on_envelope(engines.tokens("gpu", *rest, end))
    deltas = await stream.take()
    assert _text(deltas) == " lazy dog"
    assert [t for d in deltas for t in d.token_ids] == [*ids, byte_level.eos]
    assert await stream.take() == []


async def test_a_failed_request_ends_with_an_error_and_a_stale_failure_does_not_count(engines):
    engines.ready()
    engines.script = None
    stream = engines.frontend.submit([[1, 2]], SamplingParams())
    name = engines.submits[0].id
    engines.receive("gpu", Lost([(name, 2)]))
    engines.receive("cpu", Failed(name, 1, "old"))
    assert not stream.ended
    engines.receive("gpu", Failed(name, 2, "no room"))
    with pytest.raises(EngineError, match="no room"):
        await stream.take()


async def test_a_stop_string_ends_the_request_in_both_engines(engines, byte_level):
    engines.ready()
    engines.script = engines.say(" over the lazy dog", end=False)
    deltas = await _collect(engines.frontend, [1], max_tokens=60, stop=["e laz"])
    assert _text(deltas) == " over th"
    assert deltas[-1].finish_reason == "stop"
    name = engines.submits[0].id
    assert engines.aborts == [("gpu", name), ("cpu", name)]
    assert name not in engines.frontend.journal


async def test_leaving_the_iterator_aborts_every_choice_that_still_runs(engines):
    engines.ready()
    engines.script = engines.say(" lazy", end=False)
    deltas = engines.frontend.generate([1, 2], SamplingParams(n=2, max_tokens=50))
    await anext(deltas)
    await deltas.aclose()
    names = [state.id for state in engines.submits]
    assert len(set(names)) == 2
    assert sorted(engines.aborts) == sorted((to, n) for to in ("cpu", "gpu") for n in names)
    assert len(engines.frontend.journal) == 0


async def test_choices_have_their_own_noise_and_arrival(engines):
    engines.ready()
    await _collect(engines.frontend, [1], n=2, seed=5, max_tokens=3)
    await _collect(engines.frontend, [1], n=1, seed=5, max_tokens=3)
    assert [s.params.seed for s in engines.submits] == [5, 6, 5]
    assert [s.arrival for s in engines.submits] == [0, 1, 2]


@pytest.mark.parametrize(
    ("prompt", "options", "kind", "message", "param"),
    [
        ([], {}, RequestError, "empty", "prompt"),
        ([10**9], {}, RequestError, "1000000000", "prompt"),
        ([-1], {}, RequestError, "-1", "prompt"),
        ([1] * 100, {}, RequestError, "100 tokens", "prompt"),
        ([1] * 50, {}, CapacityError, r"51.*gpu 40, cpu 50", "prompt"),
        ([1], {"stop_token_ids": [2**70]}, RequestError, "vocabulary", "stop_token_ids"),
        ([1], {"logit_bias": {300: 1.0}}, RequestError, "vocabulary", "logit_bias"),
        ([1], {"stop": "x" * 2000}, RequestError, "1024", "stop"),
    ],
)
async def test_a_request_that_cannot_work_is_refused_before_anything_is_sent(
    engines, prompt, options, kind, message, param
):
    engines.ready(gpu=40, cpu=50)
    with pytest.raises(kind, match=message) as caught:
        await _collect(engines.frontend, prompt, **options)
    assert caught.value.param == param
    assert engines.sent == []


async def test_a_pool_that_may_have_to_come_back_to_another_holds_no_longer_requests(engines):
    engines.receive("gpu", EngineReady(1, 40, 4, longest=36))
    engines.receive("cpu", EngineReady(2, 80, 4, longest=0))
    assert engines.frontend.longest == 36
    assert dict(engines.frontend.kv_tokens) == {"gpu": 40, "cpu": 80}
    with pytest.raises(CapacityError, match=r"37.*gpu 36, cpu 0"):
        engines.frontend.submit([[1] * 36], SamplingParams())
    engines.frontend.submit([[1] * 30], SamplingParams())
    assert engines.submits[-1].params.max_tokens == 6


async def test_output_is_limited_to_what_the_model_and_the_largest_pool_hold(engines):
    engines.ready(gpu=10, cpu=40)
    await _collect(engines.frontend, [1] * 30, max_tokens=None)
    engines.ready(gpu=10, cpu=4000)
    await _collect(engines.frontend, [1] * 30, max_tokens=5000)
    assert [s.params.max_tokens for s in engines.submits] == [10, 70]


async def test_requests_are_taken_once_both_engines_were_there_and_until_all_fail(engines):
    frontend = engines.frontend
    engines.receive("gpu", EngineReady(1, 100, 32))
    assert frontend.missing == ["cpu"]
    with pytest.raises(NotReadyError, match="cpu"):
        frontend.submit([[1]], SamplingParams())
    engines.receive("cpu", EngineReady(1, 100, 32))
    engines.script = None
    stream = frontend.submit([[1]], SamplingParams())
    frontend.engine_down("cpu")
    assert frontend.accepting
    assert frontend.missing == ["cpu"]
    frontend.fail_all("the GPU engine died")
    with pytest.raises(EngineError, match="GPU engine died"):
        await stream.take()
    with pytest.raises(NotReadyError):
        frontend.submit([[1]], SamplingParams())
    assert frontend.missing == ["gpu", "cpu"]
    engines.ready()
    engines.script = engines.say()
    assert _text(await _collect(frontend, [1])) == " lazy dog"


async def test_without_a_host_to_count_on_its_pool_holds_nothing(engines):
    engines.ready(gpu=40, cpu=60)
    frontend = engines.frontend
    frontend.engine_down("cpu")
    engines.script = None
    frontend.submit([[1] * 50], SamplingParams())  # waits until the host is back
    frontend.host_gone()
    assert frontend.accepting
    assert (frontend.missing, frontend.given_up) == ([], ["cpu"])
    with pytest.raises(CapacityError, match=r"51.*gpu 40, cpu is down"):
        frontend.submit([[1] * 50], SamplingParams())
    frontend.submit([[1] * 30], SamplingParams())
    assert engines.submits[-1].params.max_tokens == 10
    sample = frontend.metrics.registry.get_sample_value
    assert sample("dualpace_engine_given_up", {"engine": "cpu"}) == 1
    engines.receive("cpu", EngineReady(3, 60, 32))
    assert frontend.given_up == []
    frontend.submit([[1] * 50], SamplingParams())
    assert sample("dualpace_engine_given_up", {"engine": "cpu"}) == 0


async def test_metrics_tell_the_engines_apart(engines):
    engines.ready()
    await _collect(engines.frontend, [1], max_tokens=4)
    engines.receive("cpu", EngineStats(7, 3, 1, 100, 60, {"promotion": 2}))
    engines.receive("cpu", EngineStats(9, 2, 0, 100, 70, {"promotion": 5}))
    engines.frontend.engine_down("cpu")
    engines.receive("cpu", EngineReady(3, 10, 32))
    engines.receive("cpu", EngineStats(4, 2, 0, 100, 70, {"promotion": 1}))
    sample = engines.frontend.metrics.registry.get_sample_value
    cpu = {"engine": "cpu"}
    assert sample("dualpace_generation_tokens_total", cpu) == 2
    assert sample("dualpace_time_to_first_token_seconds_count", {"engine": "gpu"}) == 1
    assert sample("dualpace_inter_token_latency_seconds_count", cpu) == 2
    assert sample("dualpace_requests_total", {**cpu, "finish_reason": "length"}) == 1
    assert sample("dualpace_kv_pages_free", cpu) == 70
    assert sample("dualpace_engine_steps_total", cpu) == 13
    assert sample("dualpace_moves_total", {**cpu, "kind": "promotion"}) == 6
    assert sample("dualpace_engine_restarts_total", cpu) == 1
    assert sample("dualpace_engine_up", cpu) == 1


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 2.5),
        ("seed", 1.5),
        ("top_k", True),
        ("stop", [5]),
        ("stop_token_ids", [1.5]),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: "1"}),
        ("logprobs", True),
        ("repetition_penalty", "1"),
        ("prompt", [1.0, 2.0]),
        ("prompt", [True]),
    ],
)
async def test_a_value_of_the_wrong_type_never_reaches_an_engine(engines, param, value):
    engines.ready()
    params = SamplingParams()
    prompt = value if param == "prompt" else [1, 2]
    if param != "prompt":
        setattr(params, param, value)
    with pytest.raises(RequestError) as caught:
        engines.frontend.submit([prompt], params)
    assert caught.value.param == param
    assert engines.sent == []
    assert len(engines.frontend.journal) == 0
