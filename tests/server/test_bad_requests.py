"""Whatever a client sends, it gets an error of OpenAI's shape, and the server goes on."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "the"}]


def _says(**fields):
    return {"messages": [{"role": "user", **fields}]}


async def _refused(http, response, status, param):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param
    alive = await http.post(COMPLETIONS, json={"prompt": "the", "max_tokens": 1})
    assert alive.status_code == 200
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 10**30}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 10**18}, "n"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"seed": 2**70}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
        ({"stop_token_ids": [10**25]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options"),
        ({"stream": True, "stream_options": {"bogus": 1}}, "stream_options"),
        ({"model": 5}, "model"),
        ({"logprobs": "3"}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": "3"}, "top_logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"presence_penalty": "high"}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"frequency_penalty": True}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": -1.5}, "repetition_penalty"),
        ({"repetition_penalty": 10**400}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": 10**400}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": {"5": True}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 0 for i in range(301)}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temprature": 0.5}, "temprature"),
        ({"typical_p": 0.9}, "typical_p"),
        ({"x" * 5000: 1}, "x" * 100 + "…"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_fields_of_both_endpoints(http, path, fields, param):
    if path == CHAT and param == "min_tokens":
        fields = {**fields, "max_tokens": 16}
    base = {"prompt": "the"} if path == COMPLETIONS else {"messages": HELLO}
    response = await http.post(path, json={**base, **fields})
    error = await _refused(http, response, 400, param)
    if param in ("prompt_logprobs", "tools", "best_of"):
        assert "not supported" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [[[1]]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": 1.5}, "prompt"),
        ({"prompt": [1, 10**9]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**400]}, "prompt"),
        ({"prompt": [1] * 100}, "prompt"),
        ({"prompt": "a" * 5000}, "prompt"),
        ({"prompt": ["a"] * 5000}, "prompt"),
        ({"prompt": ["a"] * 50, "n": 128}, "n"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "logprobs": 1, "top_logprobs": 1}, "top_logprobs"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "messages": HELLO}, "messages"),
    ],
)
async def test_prompts(http, body, param):
    await _refused(http, await http.post(COMPLETIONS, json=body), 400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages"),
        (_says(), "messages"),
        (_says(content=None), "messages"),
        (_says(content=5), "messages"),
        (_says(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages"),
        (_says(content=[{"type": "text"}]), "messages"),
        (_says(content="a" * 500), "messages"),
        (_says(content="a", tool_calls=[{"id": "1"}]), "messages"),
        ({"messages": HELLO, "logprobs": 1}, "logprobs"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"messages": HELLO, "logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": HELLO, "prompt": "a"}, "prompt"),
    ],
)
async def test_messages(http, body, param):
    await _refused(http, await http.post(CHAT, json=body), 400, param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"prompt"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 20_000 + b"]" * 20_000,
        b'{"prompt": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
        b'{"prompt": "a",}',
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_bodies_that_are_no_request(http, path, body):
    response = await http.post(path, content=body, headers={"Content-Type": "application/json"})
    await _refused(http, response, 400, None)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"]
)
async def test_numbers_that_are_none(http, field, number):
    body = f'{{"prompt": "a", "{field}": {number}}}'
    headers = {"Content-Type": "application/json"}
    await _refused(http, await http.post(COMPLETIONS, content=body, headers=headers), 400, field)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "json"])
async def test_other_content_types(http, kind):
    body = json.dumps({"prompt": "a"})
    response = await http.post(COMPLETIONS, content=body, headers={"Content-Type": kind})
    await _refused(http, response, 400, None)


@pytest.mark.parametrize(
    ("method", "path", "status", "param"),
    [
        ("GET", "/", 404, None),
        ("POST", "/v1/nothing", 404, None),
        ("POST", "/v1/completions/", 404, None),
        ("GET", "/v1/models/other", 404, "model"),
        ("GET", COMPLETIONS, 405, None),
        ("DELETE", "/v1/models", 405, None),
    ],
)
async def test_other_routes(http, method, path, status, param):
    await _refused(http, await http.request(method, path), status, param)


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO})]
)
async def test_an_unknown_model(http, path, body):
    body["model"] = "gpt-9"
    error = await _refused(http, await http.post(path, json=body), 404, "model")
    assert error["code"] == "model_not_found"


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit(http, chunked):
    async def pieces():
        for _ in range(30):
            yield b" " * 10_000

    body = pieces() if chunked else b" " * 300_000
    headers = {"Content-Type": "application/json"}
    await _refused(http, await http.post(COMPLETIONS, content=body, headers=headers), 413, None)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": [[1], [1] * 10]}), (CHAT, {"messages": HELLO})]
)
async def test_more_output_than_there_is_room_for(http, served, path, body, name):
    size = 10 if path == COMPLETIONS else len(served.tokenizer.encode("user:the\n"))
    room = 100 - size
    error = await _refused(http, await http.post(path, json={**body, name: room + 1}), 400, name)
    assert f"{name}={room + 1} is too large" in error["message"]
    assert f"length is 100 tokens, and the prompt has {size}, " in error["message"]
    served.sent.clear()
    assert (await http.post(path, json={**body, name: room})).status_code == 200
    assert served.submits[-1].params.max_tokens == room


async def test_more_output_than_any_pool_holds(http, served):
    served.ready(gpu=10, cpu=30)
    body = {"prompt": [1] * 20}
    response = await http.post(COMPLETIONS, json={**body, "max_tokens": 11})
    error = await _refused(http, response, 400, "max_tokens")
    assert "KV pool holds 30 tokens" in error["message"]
    served.sent.clear()
    # Who names no number gets as many as there is room for.
    assert (await http.post(COMPLETIONS, json=body)).status_code == 200
    assert [state.params.max_tokens for state in served.submits] == [10]


async def test_more_output_than_there_is_room_for_while_an_engine_is_down(http, served):
    served.ready(gpu=10, cpu=30)
    served.frontend.host_gone()
    response = await http.post(COMPLETIONS, json={"prompt": [1] * 5, "max_tokens": 20})
    error = await _refused(http, response, 400, "max_tokens")
    assert "KV pool holds 10 tokens of a request, cpu is down" in error["message"]


async def test_a_prompt_larger_than_any_pool(http, served):
    served.ready(gpu=10, cpu=20)
    response = await http.post(COMPLETIONS, json={"prompt": [1] * 20})
    error = await _refused(http, response, 400, "prompt")
    assert "21" in error["message"]
    assert "gpu 10, cpu 20" in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": ["the", "a" * 12_801]}, "prompt"),
        (CHAT, _says(content="a" * 12_801), "messages"),
    ],
)
async def test_text_that_no_tokens_could_make_short_enough_is_not_tokenized(
    http, path, fields, param
):
    error = await _refused(http, await http.post(path, json=fields), 400, param)
    assert "12801 characters" in error["message"]
