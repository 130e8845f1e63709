"""Tokenizers of GGUF files and directories, against transformers' AutoTokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dualpace.core.errors import ModelError, RequestError
from dualpace.models.registry import ModelSource, resolve, resolve_tokenizer
from dualpace.models.tokenizer import Tokenizer, load_tokenizer

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(resolve("smollm2"))


def save_words(folder: Path, template: str | None = None) -> None:
    words = FastTokenizer(WordLevel({"hello": 0, "<eos>": 1}, unk_token="<eos>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def test_the_bytes_of_tokens_add_up_to_the_text(smollm2: Tokenizer) -> None:
    text = "Hello, wörld 12345\n\t  <|im_end|> 你好 🙂 \x7f\u00a0"
    ids = smollm2.encode(text)
    assert b"".join(map(smollm2.token_bytes, ids)) == text.encode()
    assert smollm2.token_bytes(10**6) == b""


def test_gguf_tokenizer_equals_transformers(smollm2: Tokenizer) -> None:
    path = resolve("smollm2").path
    expected = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    text = "Hello, wörld 12345\n  <|im_end|> 你好 🙂"
    assert smollm2.encode(text) == expected.encode(text)
    assert smollm2.apply_chat_template(MESSAGES) == list(
        expected.apply_chat_template(MESSAGES, add_generation_prompt=True).input_ids
    )


def test_decoding_gives_the_text_back(smollm2: Tokenizer) -> None:
    text = "  It 's 12345 wörld , 你好 🙂\n"
    ids = smollm2.encode(text)
    assert smollm2.decode(ids) == text
    assert smollm2.decode([*ids, 2]) == text
    assert smollm2.decode([*ids, 2], skip_special_tokens=False) == text + "<|im_end|>"
    assert smollm2.decode(smollm2.encode("🙂")[:1]).endswith("\ufffd")


def test_a_directory_tokenizer_without_template_refuses_chat(tmp_path: Path) -> None:
    save_words(tmp_path)
    tokenizer = load_tokenizer(resolve_tokenizer(str(tmp_path)))
    assert tokenizer.encode("hello") == [0]
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{{ messages[0].parts[0].text }}"]
)
def test_a_template_that_refuses_the_messages_is_the_clients_error(
    template: str, tmp_path: Path
) -> None:
    save_words(tmp_path, template)
    tokenizer = load_tokenizer(ModelSource(tmp_path, "hf"))
    with pytest.raises(RequestError, match="refuses these messages") as refused:
        tokenizer.apply_chat_template(MESSAGES)
    assert refused.value.param == "messages"


def test_a_missing_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ModelError, match=r"no tokenizer: .* --skip-tokenizer-init"):
        load_tokenizer(resolve(str(tmp_path)))


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_a_broken_one_is_named_with_the_option_for_another(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=f"{tmp_path}: no usable tokenizer .*--tokenizer"):
        load_tokenizer(ModelSource(tmp_path, "hf"))
