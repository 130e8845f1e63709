"""`bench offline`: engines on a checkpoint that is a shape only, and the in-process client."""

from __future__ import annotations

import asyncio
import csv
import gc
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dualpace.bench.load import LoadRequest
from dualpace.bench.metrics import summarize, tokens_by_engine
from dualpace.bench.record import Chunk
from dualpace.bench.replay import Progress
from dualpace.cli import replays
from dualpace.cli.bench import bench_app
from dualpace.cli.bench_offline import replay_in_process
from dualpace.core.messages import (
    Abort,
    EngineReady,
    Envelope,
    Failed,
    Message,
    Submit,
    TokenEvent,
    Tokens,
)
from dualpace.server.checks import Limits
from dualpace.server.frontend import Frontend
from dualpace.server.tokenizer import NoTokenizer


@pytest.fixture
def shape(tmp_path: Path) -> str:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 120,
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def bench(shape: str, *options: str) -> Any:
    return CliRunner().invoke(
        bench_app,
        [
            "offline", "--model", shape, "--load-format", "dummy", "--cpu-cores", "1",
            "--gpu-kv-tokens", "128", "--host-kv-size", "8MiB", *options,
        ],
    )  # fmt: skip


def test_both_engines_are_measured_without_http_or_a_tokenizer(shape: str, tmp_path: Path) -> None:
    report, rows = tmp_path / "r.json", tmp_path / "r.csv"
    # Without seats the first tokens are the one engine's and all others the other's.
    result = bench(
        shape, "--num-requests", "12", "--scale", "0.03", "--num-warmups", "3",
        "--served-model-name", "tiny", "--json", str(report), "--csv", str(rows),
        "--gpu-kv-tokens", "0",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    last = json.loads(result.stdout.splitlines()[-1])
    assert last == json.loads(report.read_text())
    assert (last["model"], last["requests"], last["succeeded"]) == ("tiny", 12, 12)
    assert (last["offline"], last["detokenized"], last["policy"]) == (True, False, "dualpace")
    assert last["wrong_length"] == last["unfinished"] == 0
    assert set(last["tokens_by_engine"]) == {"gpu", "cpu"}
    assert sum(last["tokens_by_engine"].values()) == last["output_tokens"]
    assert last["load"].endswith(f"dualpace, KV room 0 + {last['host_kv_tokens']}")
    with rows.open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 12
    assert all(line["output_tokens"] == line["requested_tokens"] for line in lines)
    assert "TTFT" in result.stdout


def test_a_sweep_keeps_the_engines_and_gives_a_report_for_each_rate(shape: str) -> None:
    result = bench(shape, "--num-requests", "6", "--scale", "0.03", "--rates", "40,inf")
    assert result.exit_code == 0, result.output
    sweep = json.loads(result.stdout.splitlines()[-1])["sweep"]
    assert [each["request_rate"] for each in sweep] == [40.0, None]
    assert [each["succeeded"] for each in sweep] == [6, 6]
    assert sweep[0]["output_tokens"] == sweep[1]["output_tokens"]
    assert {each["label"] for each in sweep} == {"dualpace"}


def test_ctrl_c_ends_with_what_was_measured(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def impatient(*_: object) -> Iterator[object]:
        yield lambda progress: progress.finished and os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(replays, "progress_bar", impatient)
    result = bench(shape, "--scale", "0.3", "--num-requests", "40", "--max-concurrency", "4")
    assert result.exit_code == 130, result.output
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["succeeded"] >= 1
    assert 1 <= last["unfinished"] <= 4
    window = last["window"]
    assert window["output_tokens"] == last["output_tokens"] + last["unfinished_tokens"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "best"], "--policy must be one of"),
        (["--policy", "gated"], "--policy gated needs a profile"),
        (["--policy", "gated", "--gpu-kv-tokens", "0"], "--gpu-kv-tokens is less than a page"),
        (["--policy", "gated", "--cpu-route", "local"], "--cpu-route auto"),
        (["--warmup-seconds", "3"], "--warmup-seconds needs --duration"),
        (["--trace", "none.csv"], "cannot read the trace none.csv"),
        (["--json", "no/such/folder/r.json"], "is not a folder"),
        (["--model", "no-such-model"], "no such model"),
    ],
)
def test_options_that_cannot_work_are_explained_before_anything_starts(
    shape: str, options: list[str], message: str
) -> None:
    result = bench(shape, *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


class Engine:
    """Answers in turn with tokens of both engines, a failure, and silence."""

    def __init__(self) -> None:
        self.frontend = Frontend(NoTokenizer(), Limits(100, 50, (2,)), self.send)
        for sender in ("gpu", "cpu"):
            self.frontend.on_envelope(Envelope(sender, 0, EngineReady(1, 100, 16)))
        self.submitted: list[Submit] = []
        self.aborted: set[str] = set()

    def send(self, to: str, message: Message) -> None:
        if isinstance(message, Abort):
            self.aborted.add(message.request_id)
        if isinstance(message, Submit):
            self.submitted.append(message)
            asyncio.get_running_loop().call_soon(self.answer, message, len(self.submitted) % 3)

    def answer(self, message: Submit, manner: int) -> None:
        state, count = message.state, message.state.params.max_tokens
        for index in range(count if manner == 1 else 1):
            finish = "length" if index + 1 == count else None
            event = TokenEvent(state.id, 0, index, 2, finish)
            self.frontend.on_envelope(Envelope("cpu" if index else "gpu", 0, Tokens([event])))
        if manner == 2:
            self.frontend.on_envelope(Envelope("gpu", 0, Failed(state.id, 0, "no room")))


def test_the_client_keeps_apart_what_was_answered_what_failed_and_what_was_cut() -> None:
    async def run() -> None:
        engine = Engine()
        load = [LoadRequest(4, 6)] * 3
        prompts = [[7, 8, 9, 10]] * 3
        records = await replay_in_process(engine.frontend, load, prompts, seconds=0.2)
        assert [record.error for record in records] == [None, "no room", None]
        assert [record.cut for record in records] == [False, False, True]
        assert [record.output_tokens for record in records] == [6, 1, 1]
        assert tokens_by_engine(records[:1]) == {"cpu": 5, "gpu": 1}
        assert records[0].finish_reason == "length"
        # An end-of-sequence id is a token like any other here, and the last request was let go of.
        assert summarize(records).wrong_length == 0
        assert engine.aborted == {engine.submitted[2].state.id}
        for submit in engine.submitted:
            assert submit.state.params.min_tokens == submit.state.params.max_tokens == 6
            assert submit.state.params.stop_ids == ()

    asyncio.run(run())


def test_what_was_prepared_is_kept_from_the_garbage_collector_while_it_goes_on() -> None:
    """It takes a second to look at thousands of prompts, in which nothing else runs."""
    looked_at: list[bool] = []

    async def run() -> None:
        engine = Engine()
        prompts = [[7, 8, 9, 10]]

        def progress(_: Progress) -> None:
            looked_at.append(any(each is prompts[0] for each in gc.get_objects()))

        load = [LoadRequest(4, 6)]
        await replay_in_process(engine.frontend, load, prompts, on_progress=progress)
        assert any(each is prompts[0] for each in gc.get_objects())

    asyncio.run(run())
    assert looked_at
    assert not any(looked_at)
    assert not gc.is_tracked(Chunk(0.0, 1, "cpu"))
