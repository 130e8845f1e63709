from __future__ import annotations

import random

import pytest

from dualpace.core.sampling import SamplingParams
from dualpace.server.detokenizer import IncrementalDecoder, OutputText, StopStrings

TEXTS = [
    " the dog",
    "the dog the dog",
    "héllo 你好 🙂🙂 the",
    " 🙂\n\n  dog ",
    "a\u2028b\x00c",
    "क्षत्रिय ភាសាខ្មែរ 한국어",
    "👨\u200d👩\u200d👧 dog",
]


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def _stream(tokenizer, prompt, output, skip=True):
    decoder = IncrementalDecoder(tokenizer, prompt, skip)
    pieces = [decoder.push(token_id) for token_id in output]
    return [*pieces, decoder.flush()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prompt", ["the dog", "", "你"])
def test_pieces_add_up_to_what_decoding_all_at_once_gives(tokenizer, prompt, text):
    ids = tokenizer.encode(prompt + text)
    start = len(tokenizer.encode(prompt))
    whole = tokenizer.decode(ids)
    for cut in {start, len(ids) // 2} if start < len(ids) else {0}:
        before = tokenizer.decode(ids[:cut])
        if before.endswith("\ufffd"):
            continue
        pieces = _stream(tokenizer, ids[:cut], ids[cut:])
        assert "".join(pieces) == whole[len(before) :]
        assert not any("\ufffd" in piece for piece in pieces)


def test_half_a_character_at_the_end_is_left_out(tokenizer):
    ids = tokenizer.encode("dog 🙂")
    assert "".join(_stream(tokenizer, [], ids[:-1])) == "dog "


def test_bytes_that_never_become_a_character_do_not_hold_back_the_text(byte_level):
    bad = byte_level.inner.token_to_id("ÿ")  # the byte 0xFF
    ids = [*byte_level.encode("dog"), *[bad] * 50, *byte_level.encode(" the")]
    decoder = IncrementalDecoder(byte_level, [], True)
    pieces = [decoder.push(token_id) for token_id in ids]
    assert "".join(pieces) == byte_level.decode(ids)
    assert "".join(pieces[:40]).count("\ufffd") > 20


class RawBytes:
    """A vocabulary of byte pairs: the id of a pair is its number, that of one byte itself."""

    def decode(self, ids, skip_special_tokens=True):
        raw = b"".join(i.to_bytes(2 if i > 255 else 1, "big") for i in ids)
        return raw.decode("utf-8", "replace")


def test_characters_whose_halves_share_tokens_are_shown_as_they_complete():
    # Every token ends one character and begins the next, so the text is torn after each of them.
    raw = ("я" * 12).encode()
    tokens = [raw[:1], *(raw[i : i + 2] for i in range(1, len(raw), 2))]
    *pieces, _ = _stream(RawBytes(), [], [int.from_bytes(token, "big") for token in tokens])
    assert "".join(pieces) == "я" * 12
    assert sum(map(bool, pieces)) > 1


@pytest.mark.parametrize(("skip", "expected"), [(True, "the dog"), (False, "the<|eos|> dog")])
def test_special_tokens_are_shown_only_on_demand(byte_level, skip, expected):
    ids = [*byte_level.encode("the"), byte_level.eos, *byte_level.encode(" dog")]
    assert "".join(_stream(byte_level, byte_level.encode("a"), ids, skip)) == expected


def _cut(text, stops, include):
    """The oracle: the text up to the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[:end] if include else text[: end - max(map(len, hits))]
    return text


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_are_found_across_any_pieces(include):
    rng = random.Random(0)
    for _ in range(400):
        text = "".join(rng.choices("ab", k=rng.randrange(1, 14)))
        sizes = [rng.randrange(1, 6) for _ in range(rng.choice([1, 2]))]
        stops = ["".join(rng.choices("ab", k=size)) for size in sizes]
        expected = _cut(text, stops, include)
        checker, shown, rest = StopStrings(stops, include), "", text
        while rest and checker.found is None:
            size = rng.randrange(1, 4)
            shown += checker.push(rest[:size])
            assert expected.startswith(shown)
            rest = rest[size:]
        if checker.found is None:
            shown += checker.flush()
        assert shown == expected, (text, stops)


def test_a_stop_string_within_min_tokens_is_text(byte_level):
    ids = byte_level.encode("dog dog dog")
    output = OutputText(byte_level, [], SamplingParams(stop="dog", min_tokens=len(ids) - 1))
    text = ""
    for token_id in ids:
        assert not output.stopped
        text += output.push(token_id)
    assert output.stopped
    assert text == "dog dog "
