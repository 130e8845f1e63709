"""A server without a tokenizer: token ids in, a count of tokens out, and no text either way."""

from __future__ import annotations

import httpx
import pytest

from dualpace.core.sampling import SamplingParams
from dualpace.server.api import create_app
from dualpace.server.tokenizer import NoTokenizer

pytestmark = pytest.mark.anyio


@pytest.fixture
async def http(engines):
    engines.frontend.tokenizer = NoTokenizer()
    engines.ready()
    transport = httpx.ASGITransport(create_app(engines.service("small")))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http


async def test_token_ids_are_completed_with_tokens_that_have_no_text(http, engines, byte_level):
    body = {"model": "small", "prompt": [5, 6, 7], "max_tokens": 4}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 4
    named = (await http.post("/v1/completions", json={**body, "logprobs": 0})).json()
    tokens = [f"token_id:{token_id}" for token_id in byte_level.encode(" lazy dog")[:4]]
    assert named["choices"][0]["logprobs"]["tokens"] == tokens
    deltas = [d async for d in engines.frontend.generate([5], SamplingParams(max_tokens=4))]
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    assert ids == byte_level.encode(" lazy dog")[:4]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "the fox"}, "prompt"),
        ("completions", {"prompt": [5, 6, 7], "stop": ["dog"]}, "stop"),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "messages"),
    ],
)
async def test_what_needs_text_is_refused_and_names_the_flag(http, engines, path, body, param):
    answer = await http.post(f"/v1/{path}", json={"model": "small", **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert "--skip-tokenizer-init" in error["message"]
    assert engines.submits == []
