"""The API as the official openai client and a plain HTTP client see it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dualpace.core.errors import RequestError
from dualpace.core.messages import Envelope, Failed, Lost, TokenEvent
from dualpace.core.sampling import SamplingParams
from dualpace.server.api import create_app
from dualpace.server.serving import Service

pytestmark = pytest.mark.anyio


async def _chunks(stream):
    return [chunk async for chunk in stream]


async def test_a_completion_has_text_reason_and_usage_by_engine(client, byte_level):
    answer = await client.completions.create(model="small", prompt="the fox", max_tokens=40)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == " lazy dog"
    assert answer.choices[0].finish_reason == "stop"
    made = len(byte_level.encode(" lazy dog")) + 1
    assert answer.usage.prompt_tokens == len(byte_level.encode("the fox"))
    assert answer.usage.completion_tokens == made
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + made
    by_engine = answer.usage.completion_tokens_by_engine
    assert by_engine == {"gpu": made - made // 2, "cpu": made // 2}


async def test_a_completion_stream_has_a_chunk_per_token_naming_its_engine(client):
    plain = await client.completions.create(model="small", prompt="the fox", max_tokens=4)
    chunks = await _chunks(
        await client.completions.create(
            model="small",
            prompt="the fox",
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *tokens, last = chunks
    assert [chunk.engine for chunk in tokens] == ["gpu", "cpu", "gpu", "cpu"]
    assert "".join(chunk.choices[0].text for chunk in tokens) == plain.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in tokens] == [None] * 3 + ["length"]
    assert last.choices == []
    assert last.usage == plain.usage
    assert all(chunk.usage is None for chunk in tokens)
    assert len({chunk.id for chunk in chunks}) == 1


async def test_running_usage_comes_with_every_chunk_on_demand(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await _chunks(
        await client.completions.create(
            model="small", prompt="a", max_tokens=3, stream=True, stream_options=options
        )
    )
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 3]


async def test_a_chat_answer_and_its_stream_say_the_same(client, served, byte_level):
    served.script = served.say(" héllo 你好 🙂 dog")
    messages = [
        {"role": "system", "content": "be quick"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "fox"}],
        },
    ]
    answer = await client.chat.completions.create(model="small", messages=messages)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == " héllo 你好 🙂 dog"
    (state,) = served.submits
    assert state.prompt == byte_level.encode("system:be quick\nuser:the\nfox\n")
    assert state.params.max_tokens == 100 - len(state.prompt)
    chunks = await _chunks(
        await client.chat.completions.create(model="small", messages=messages, stream=True)
    )
    pieces = [chunk.choices[0].delta.content for chunk in chunks]
    assert "".join(pieces) == " héllo 你好 🙂 dog"
    assert not any("\ufffd" in piece for piece in pieces)
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (
        len(chunks) - 1
    )
    assert len(chunks) == answer.usage.completion_tokens
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("fox", ["fox"]),
        (["fox", "dog"], ["fox", "dog"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_prompts_may_be_texts_or_ids_one_or_several(
    client, served, byte_level, prompt, texts
):
    answer = await client.completions.create(model="small", prompt=prompt, n=2, max_tokens=2)
    ids = [byte_level.encode(text) if isinstance(text, str) else text for text in texts]
    assert [state.prompt for state in served.submits] == [p for p in ids for _ in range(2)]
    assert [choice.index for choice in answer.choices] == list(range(2 * len(ids)))
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert answer.usage.completion_tokens == 2 * 2 * len(ids)


async def test_choices_of_a_stream_keep_their_index(client):
    chunks = await _chunks(
        await client.completions.create(model="small", prompt="a", n=2, max_tokens=50, stream=True)
    )
    texts = Counter()
    for chunk in chunks:
        texts[chunk.choices[0].index] = (texts[chunk.choices[0].index] or "") + (
            chunk.choices[0].text
        )
    assert texts == {0: " lazy dog", 1: " lazy dog"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stop": "zy d"}, " la"),
        ({"stop": ["nothing", "dog"]}, " lazy "),
        ({"stop": "zy", "extra_body": {"include_stop_str_in_output": True}}, " lazy"),
        ({"stop": "dog!"}, " lazy dog"),
        ({"extra_body": {"ignore_eos": True, "skip_special_tokens": False}}, " lazy dog<|eos|>"),
        ({"extra_body": {"skip_special_tokens": False}}, " lazy dog"),
    ],
)
async def test_where_the_text_ends(client, served, options, text):
    served.script = _without_end(served) if "ignore" in str(options) else served.say()
    chunks = await _chunks(
        await client.completions.create(
            model="small", prompt="a", max_tokens=50, stream=True, **options
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == text


def _without_end(served):
    """A script for ignore_eos: the end-of-sequence id is a token like others, here the last."""

    def script(state):
        assert served.tokenizer.eos not in state.params.stop_ids
        ids = [*served.tokenizer.encode(" lazy dog"), served.tokenizer.eos]
        for i, token_id in enumerate(ids):
            finish = "length" if i + 1 == len(ids) else None
            yield served.tokens("gpu", TokenEvent(state.id, 0, i, token_id, finish))

    return script


async def test_sampling_options_reach_the_engines(client, served):
    await client.completions.create(
        model="alias/small",
        prompt="a",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=-1,
        presence_penalty=0,
        logit_bias={},
        extra_body={"top_k": 5, "min_p": 0.1, "min_tokens": 2, "stop_token_ids": [9]},
    )
    params = served.submits[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.seed, params.min_tokens, params.max_tokens) == (2**64 - 1, 2, 7)
    assert params.stop_ids == tuple(sorted([9, served.tokenizer.eos]))
    await client.completions.create(model="small", prompt="a")
    assert served.submits[1].params.max_tokens == SamplingParams().max_tokens == 16
    assert served.submits[1].params.temperature == 1.0
    await client.chat.completions.create(
        model="small", messages=[{"role": "user", "content": "a"}], max_completion_tokens=3
    )
    assert served.submits[2].params.max_tokens == 3


async def test_what_clients_send_and_no_answer_depends_on_is_taken(client, served):
    await client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "a"}],
        max_tokens=3,
        user="somebody",
        metadata={"purpose": "test"},
        store=False,
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="y",
        parallel_tool_calls=True,
        extra_body={"request_id": "1", "cache_salt": "z", "junk": None},
    )
    # Load generators send both names to both endpoints.
    await client.completions.create(
        model="small", prompt="a", max_tokens=4, extra_body={"max_completion_tokens": 4}
    )
    assert [state.params.max_tokens for state in served.submits] == [3, 4]


async def test_a_misspelt_option_is_refused_by_name(client, served):
    with pytest.raises(openai.BadRequestError, match="temprature") as caught:
        await client.completions.create(
            model="small", prompt="a", extra_body={"temprature": 0.5, "top_k": 3}
        )
    assert caught.value.param == "temprature"
    assert served.submits == []


async def test_disorder_doubles_stale_tokens_and_a_lost_engine_do_not_show(
    client, served, byte_level
):
    ids = [*byte_level.encode(" héllo 🙂"), byte_level.eos]

    def script(state):
        name = state.id
        if state.epoch == 0:
            yield served.tokens("gpu", TokenEvent(name, 0, 0, ids[0]))
            yield served.tokens("cpu", TokenEvent(name, 1, 2, ids[2]))
            yield served.tokens("gpu", TokenEvent(name, 1, 0, ids[0]))
            yield served.tokens("cpu", TokenEvent(name, 1, 1, ids[1]))
            yield served.tokens("cpu", TokenEvent(name, 1, 2, ids[2]))
            yield Envelope("gpu", 1, Lost([(name, 2)]))
        else:
            assert state.output == ids[:3]
            yield served.tokens("cpu", TokenEvent(name, 1, 3, 0))
            order = [5, 4, 3, *range(6, len(ids)), 3]
            for i in order:
                finish = "stop" if i == len(ids) - 1 else None
                yield served.tokens("gpu", TokenEvent(name, 2, i, ids[i], finish))

    served.script = script
    chunks = await _chunks(
        await client.completions.create(
            model="small",
            prompt="a",
            max_tokens=50,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].text for c in chunks[:-1]) == " héllo 🙂"
    assert chunks[-1].usage.completion_tokens_by_engine == {"gpu": len(ids) - 2, "cpu": 2}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_request(client, served, stream):
    served.script = served.say(" lazy", end=False)
    create = client.completions.create(model="small", prompt="a", max_tokens=90, stream=stream)
    if stream:
        response = await create
        await anext(aiter(response))
        await response.close()
    else:
        task = asyncio.ensure_future(create)
        await served.until(lambda: served.submits)
        task.cancel()
    await served.until(lambda: len(served.aborts) == 2)
    name = served.submits[0].id
    assert set(served.aborts) == {("gpu", name), ("cpu", name)}
    assert len(served.frontend.journal) == 0


async def test_a_failed_engine_is_a_500_or_an_error_event(client, served):
    def script(state):
        yield served.tokens("gpu", TokenEvent(state.id, 0, 0, 5))
        yield Envelope("gpu", 1, Failed(state.id, 0, "the GPU engine broke"))

    served.script = script
    with pytest.raises(openai.InternalServerError, match="GPU engine broke") as caught:
        await client.completions.create(model="small", prompt="a")
    assert caught.value.status_code == 500
    assert caught.value.type == "server_error"
    response = await client.completions.create(model="small", prompt="a", stream=True)
    assert (await anext(aiter(response))).engine == "gpu"
    with pytest.raises(openai.APIError, match="GPU engine broke"):
        await _chunks(response)


async def test_a_server_without_engines_lives_but_is_not_ready(client, http, served):
    assert (await http.get("/ready")).json() == {"ready": True, "missing": []}
    served.script = served.say(" lazy", end=False)
    response = await client.completions.create(
        model="small", prompt="a", max_tokens=90, stream=True
    )
    await anext(aiter(response))
    served.frontend.fail_all("both engines died")
    with pytest.raises(openai.APIError, match="both engines died"):
        await _chunks(response)
    assert (await http.get("/health")).json() == {"status": "ok", "given_up": []}
    ready = await http.get("/ready")
    assert (ready.status_code, ready.json()["missing"]) == (503, ["gpu", "cpu"])
    refused = await http.post("/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "not_ready"
    assert refused.headers["retry-after"] == "1"


async def test_while_the_model_loads_everything_answers_and_says_so(engines):
    service = Service(["m"], engines.frontend.metrics)
    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        health, ready = await http.get("/health"), await http.get("/ready")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert (ready.status_code, ready.json()) == (503, {"ready": False, "missing": ["model"]})
        metrics = await http.get("/metrics")
        assert (metrics.status_code, 'engine_up{engine="gpu"} 0.0' in metrics.text) == (200, True)
        assert (await http.get("/version")).status_code == 200
        hello = [{"role": "user", "content": "a"}]
        for refused in (
            await http.post("/v1/completions", json={"prompt": "a"}),
            await http.post("/v1/chat/completions", json={"messages": hello}),
            await http.get("/v1/models"),
            await http.get("/v1/models/m"),
        ):
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("service_unavailable", "not_ready")
            assert "loading" in error["message"]
        engines.ready()
        service.open(engines.frontend)
        assert (await http.get("/health")).json() == {"status": "ok", "given_up": []}
        assert (await http.get("/ready")).status_code == 200
        answer = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4})
        assert answer.status_code == 200


async def test_a_server_that_goes_on_without_its_host_says_so(client, http, served):
    served.frontend.engine_down("cpu")
    served.frontend.host_gone()
    assert (await http.get("/health")).json() == {"status": "degraded", "given_up": ["cpu"]}
    assert (await http.get("/ready")).status_code == 200
    await client.completions.create(model="small", prompt="a", max_tokens=4)


async def test_models_metrics_and_version(client, http):
    assert [model.id async for model in client.models.list()] == ["small", "alias/small"]
    assert (await client.models.retrieve("alias/small")).max_model_len == 100
    await client.completions.create(model="small", prompt="a", max_tokens=4)
    metrics = await http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.text)
        for sample in family.samples
    }
    assert samples["dualpace_generation_tokens_total", "cpu"] >= 2
    assert samples["dualpace_engine_up", "gpu"] == 1
    assert set((await http.get("/version")).json()) == {"version"}


async def test_text_is_not_split_at_unusual_line_ends(http, served):
    served.script = served.say("a\u2028b\x85c\nd\x00")
    body = {"prompt": "a", "max_tokens": 90, "stream": True}
    raw = (await http.post("/v1/completions", json=body)).content
    *events, done, rest = raw.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    parsed = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert "".join(event["choices"][0]["text"] for event in parsed) == "a\u2028b\x85c\nd\x00"
    assert parsed[0]["choices"][0]["finish_reason"] is None


async def test_a_server_may_have_sampling_defaults_of_its_own(engines):
    engines.ready()
    app = create_app(engines.service("m", default_sampling={"temperature": 0.25, "top_k": 7}))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        await http.post("/v1/completions", json={"prompt": "a"})
        await http.post("/v1/completions", json={"prompt": "a", "temperature": 0, "top_k": -1})
    params = [state.params for state in engines.submits]
    assert [(p.temperature, p.top_k) for p in params] == [(0.25, 7), (0.0, 0)]
    with pytest.raises(RequestError, match="temperature"):
        engines.service("m", default_sampling={"temperature": -1})
