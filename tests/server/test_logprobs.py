"""Logprobs as the official openai client reads them, streamed and not, from two engines' tokens."""

from __future__ import annotations

import json

import pytest

from dualpace.core.messages import Envelope, Lost, TokenEvent
from dualpace.server.logprobs import TextOffsets

pytestmark = pytest.mark.anyio

TEXT = " héllo 你好 🙂 dog"
HELLO = [{"role": "user", "content": "the"}]


@pytest.fixture
def ids(served):
    """Ids that the engines will say, the end of the sequence among them."""
    served.script = served.say(TEXT)
    return [*served.tokenizer.encode(TEXT), served.tokenizer.eos]


async def test_completions_list_tokens_logprobs_likeliest_and_offsets(client, ids, byte_level):
    answer = await client.completions.create(
        model="small", prompt="a", max_tokens=90, logprobs=3, temperature=0
    )
    (choice,) = answer.choices
    got = choice.logprobs
    assert len(got.tokens) == answer.usage.completion_tokens == len(ids)
    assert got.token_logprobs == [-index / 4 for index in range(len(ids))]
    likeliest = {_name(byte_level, token_id): -0.125 * token_id for token_id in range(3)}
    for index, (token_id, top) in enumerate(zip(ids, got.top_logprobs, strict=True)):
        assert next(iter(top.items())) == (_name(byte_level, token_id), -index / 4)
        assert top == {**likeliest, _name(byte_level, token_id): -index / 4}
    whole = [i for i, name in enumerate(got.tokens[:-1]) if not name.startswith("bytes:")]
    assert 5 < len(whole) < len(ids) - 5  # the vocabulary has only bytes for some characters
    for index in whole:
        start = got.text_offset[index]
        assert choice.text[start : start + len(got.tokens[index])] == got.tokens[index]
    assert got.text_offset[-1] == len(choice.text)
    assert got.tokens[-1] == "<|eos|>"


def _name(tokenizer, token_id):
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


async def test_a_completion_stream_has_the_same_logprobs_piece_by_piece(client, ids):
    options = {"model": "small", "prompt": "a", "max_tokens": 90, "logprobs": 2, "n": 2}
    plain = await client.completions.create(**options)
    pieces = {0: [], 1: []}
    async for chunk in await client.completions.create(**options, stream=True):
        (choice,) = chunk.choices
        assert len(choice.logprobs.tokens) == 1
        pieces[choice.index].append(choice.logprobs)
    for index, parts in pieces.items():
        want = plain.choices[index].logprobs
        assert len(want.tokens) == len(ids)
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [item for part in parts for item in getattr(part, field)] == getattr(want, field)


async def test_chat_lists_tokens_with_their_exact_bytes_and_the_likeliest(client, ids, byte_level):
    options = {"model": "small", "messages": HELLO, "logprobs": True, "top_logprobs": 4}
    answer = await client.chat.completions.create(**options)
    (choice,) = answer.choices
    content = choice.logprobs.content
    assert choice.logprobs.refusal is None
    assert bytes(b for item in content[:-1] for b in item.bytes).decode() == TEXT
    assert content[0].token == bytes(content[0].bytes).decode()
    assert [item.logprob for item in content] == [-index / 4 for index in range(len(ids))]
    for item in content:
        assert [bytes(top.bytes) for top in item.top_logprobs] == [
            byte_level.token_bytes(token_id) for token_id in range(4)
        ]
        assert [top.logprob for top in item.top_logprobs] == [0.0, -0.125, -0.25, -0.375]
    streamed = []
    async for chunk in await client.chat.completions.create(**options, stream=True):
        streamed += chunk.choices[0].logprobs.content
    assert [item.model_dump() for item in streamed] == [item.model_dump() for item in content]


async def test_none_are_sent_or_shown_unless_asked_for(http, served, ids):
    for path, body in [
        ("completions", {"prompt": "a"}),
        ("completions", {"prompt": "a", "logprobs": None}),
        ("chat/completions", {"messages": HELLO}),
        ("chat/completions", {"messages": HELLO, "logprobs": False, "top_logprobs": 0}),
    ]:
        answer = (await http.post(f"/v1/{path}", json=body)).json()
        assert answer["choices"][0]["logprobs"] is None
    assert {state.params.logprobs for state in served.submits} == {None}
    for path, body in [
        ("completions", {"prompt": "a", "logprobs": 0}),
        ("chat/completions", {"messages": HELLO, "logprobs": True}),
    ]:
        answer = (await http.post(f"/v1/{path}", json=body)).json()
        assert answer["choices"][0]["logprobs"] is not None
    assert [state.params.logprobs for state in served.submits[-2:]] == [0, 0]


async def test_tokens_of_a_dead_engine_keep_their_logprobs_and_are_not_told_twice(client, served):
    ids = served.tokenizer.encode(TEXT)

    def script(state):
        def event(index, finish=None):
            its = served.logprobs(index, state.params.logprobs)
            return TokenEvent(state.id, state.epoch, index, ids[index], finish, its)

        if state.epoch == 0:
            yield served.tokens("gpu", event(0), event(1))
            yield served.tokens("cpu", event(3))
            yield served.tokens("gpu", event(1))
            yield Envelope("gpu", 1, Lost([(state.id, 2)]))
        else:
            assert len(state.logprobs) == len(state.output) == 2
            for index in range(1, len(ids)):
                yield served.tokens(
                    "gpu", event(index, "length" if ids[index + 1 :] == [] else None)
                )

    served.script = script
    answer = await client.completions.create(model="small", prompt="a", max_tokens=90, logprobs=1)
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].logprobs.token_logprobs == [-i / 4 for i in range(len(ids))]


async def test_minus_infinity_is_a_number_in_the_answer(http, served):
    def script(state):
        its = served.logprobs(0, 1)
        its = type(its)(-float("inf"), 9, its.top_ids, [float("nan")])
        yield served.tokens("gpu", TokenEvent(state.id, 0, 0, 5, "length", its))

    served.script = script
    raw = (await http.post("/v1/completions", json={"prompt": "a", "logprobs": 1})).content
    got = json.loads(raw, parse_constant=pytest.fail)["choices"][0]["logprobs"]
    assert got["token_logprobs"] == [-9999.0]
    assert sorted(got["top_logprobs"][0].values()) == [-9999.0, -9999.0]


async def test_penalties_and_biases_reach_the_engines(client, served):
    options = {
        "presence_penalty": -2,
        "frequency_penalty": 1.5,
        "logit_bias": {"5": 100, "7": -1.5},
    }
    await client.completions.create(
        model="small", prompt="a", **options, extra_body={"repetition_penalty": 1.1}
    )
    await client.chat.completions.create(model="small", messages=HELLO, **options)
    first, second = (state.params for state in served.submits)
    assert (first.presence_penalty, first.frequency_penalty) == (-2.0, 1.5)
    assert (first.repetition_penalty, second.repetition_penalty) == (1.1, 1.0)
    assert first.logit_bias == second.logit_bias == ((5, 100.0), (7, -1.5))


def test_a_sentencepiece_vocabulary_has_spaces_and_bytes(sentencepiece):
    ids = sentencepiece.encode("the dog 你")
    assert b"".join(map(sentencepiece.token_bytes, ids)) == " the dog 你".encode()
    assert sentencepiece.token_bytes(sentencepiece.eos) == b"<|eos|>"
    assert sentencepiece.token_bytes(10**6) == b""


def test_a_token_in_mid_character_is_at_that_characters_place():
    offsets = TextOffsets()
    pieces = [b"a\xf0", b"\x9f\x99", b"\x82", b" b", b"\xff", b"c"]
    assert [offsets.push(piece) for piece in pieces] == [0, 1, 1, 2, 4, 5]
