"""Replay against a fake server: what is recorded, and what becomes of failures."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dualpace.bench.client import ServedModel, ServerError, ask_models, replay
from dualpace.bench.load import LoadRequest, draw_prompts
from dualpace.bench.metrics import summarize, tokens_by_engine
from dualpace.bench.record import RequestRecord
from dualpace.bench.replay import Progress

LOAD = [LoadRequest(5 + index, 4 + index % 7) for index in range(30)]


def run(
    url: str,
    model: str,
    load: list[LoadRequest] = LOAD,
    max_concurrency: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> list[RequestRecord]:
    prompts = draw_prompts(load, 1000, seed=0)
    return asyncio.run(
        replay(url, model, load, prompts, max_concurrency=max_concurrency, on_progress=on_progress)
    )


@contextmanager
def answering(
    part: bytes, times: int = 1, status: int = 200, content_type: str = "text/plain"
) -> Iterator[str]:
    """A server that answers anything with `part`, so many times."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.end_headers()
            with suppress(OSError):
                for _ in range(times):
                    self.wfile.write(part)

        do_POST = do_GET  # noqa: N815  # the names are BaseHTTPRequestHandler's

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def run_against(part: bytes, times: int = 1) -> list[RequestRecord]:
    with answering(part, times) as url:
        return run(url, "any", [LoadRequest(3, 9)])


def test_every_token_is_recorded_with_its_time_and_engine(server_url: str) -> None:
    records = run(server_url, "fake")
    assert [record.error for record in records] == [None] * len(LOAD)
    assert [record.request for record in records] == LOAD
    assert [record.output_tokens for record in records] == [r.output_tokens for r in LOAD]
    assert [record.prompt_tokens for record in records] == [r.prompt_tokens for r in LOAD]
    for record in records:
        assert record.chunks[2].tokens == min(2, record.request.output_tokens - 2)
        assert record.chunks[0].engine == "gpu"
        assert len({chunk.engine for chunk in record.chunks[1:]}) == 1
        times = [record.sent_s, *(chunk.time_s for chunk in record.chunks), record.end_s]
        assert times == sorted(times)
        assert record.finish_reason == "length"
        assert not record.estimated
    assert set(tokens_by_engine(records)) == {"gpu", "cpu"}


def test_what_was_prepared_is_kept_from_the_garbage_collector_while_it_goes_on(
    server_url: str,
) -> None:
    prompts = draw_prompts(LOAD, 1000, seed=0)
    looked_at: list[bool] = []

    def progress(_: Progress) -> None:
        looked_at.append(any(each is prompts[0] for each in gc.get_objects()))

    asyncio.run(replay(server_url, "fake", LOAD, prompts, on_progress=progress))
    assert looked_at
    assert not any(looked_at)
    assert any(each is prompts[0] for each in gc.get_objects())


def test_totals_hold_on_a_server_that_tells_usage_only_at_the_end(server_url: str) -> None:
    records = run(server_url, "plain")
    assert [record.output_tokens for record in records] == [r.output_tokens for r in LOAD]
    assert all(record.estimated for record in records)  # every fourth token came in no chunk
    assert all(len(r.chunks) < r.output_tokens for r in records)
    assert set(tokens_by_engine(records)) == {"unreported"}


@pytest.mark.parametrize(
    ("model", "message", "tokens"),
    [
        ("full", "HTTP 503: no room", 0),
        ("error-event", "error in the stream: engine failed", 4),
        ("cut", "closed connection", 4),
        ("endless", "the stream ended before the answer did", 4),
    ],
)
def test_a_failure_is_recorded_with_its_reason_and_what_came_before(
    server_url: str, model: str, message: str, tokens: int
) -> None:
    records = run(server_url, model, [LoadRequest(3, 9)] * 3)
    for record in records:
        assert message in str(record.error)
        assert record.output_tokens == tokens


@pytest.mark.parametrize(
    "chunk",
    [
        b"{nope",
        b"[1]",
        b"null",
        b"[" * 100_000,
        b'{"choices": 7}',
        b'{"choices": [{"text": "\xff"}]}',
        b'{"usage": {"completion_tokens": -5}}',
        b'{"usage": {"completion_tokens": "many"}}',
        b'{"usage": {"completion_tokens": Infinity}}',
        b'{"usage": {"completion_tokens": 99999999999999999999}}',
        b'{"usage": {"completion_tokens": 1, "prompt_tokens": -1}}',
    ],
)
def test_another_protocol_fails_the_request_and_shows_what_came(chunk: bytes) -> None:
    records = run_against(b"data: " + chunk + b"\n\n")
    assert "malformed chunk" in str(records[0].error)
    assert records[0].output_tokens == 0


@pytest.mark.parametrize("error", [b'{"message": 5}', b"7", b'"boom"'])
def test_an_error_in_any_form_is_told(error: bytes) -> None:
    assert "error in the stream" in str(
        run_against(b'data: {"error": ' + error + b"}\n\n")[0].error
    )


def test_an_error_is_one_line_whatever_its_body_claims_to_be() -> None:
    with answering(b"Bad\r\n  gateway \xff", 1, 502, "text/html; charset=base64") as url:
        assert run(url, "any", [LoadRequest(3, 9)])[0].error == "HTTP 502: Bad gateway \ufffd"
        with pytest.raises(ServerError, match="HTTP 502: Bad gateway"):
            ask_models(url)


def test_a_usage_of_nothing_until_the_end_hides_no_first_token() -> None:
    chunk = b'data: {"choices": [{"text": "a"}], "usage": {"completion_tokens": 0}}\n\n'
    end = b'data: {"choices": [], "usage": {"completion_tokens": 6}}\n\ndata: [DONE]\n\n'
    [record] = run_against(chunk * 3 + end)
    assert [each.tokens for each in record.chunks] == [2, 2, 2]
    assert record.estimated


def test_a_line_without_an_end_is_not_collected_for_ever() -> None:
    assert "longer than" in str(run_against(b"x" * 2**20, times=40)[0].error)


def test_an_engine_of_another_type_is_as_if_none_were_named() -> None:
    chunk = b'{"choices": [{"text": "a", "finish_reason": "length"}], "engine": {"a": [1]}}'
    records = run_against(b"data: " + chunk + b"\n\n")
    assert records[0].error is None
    assert summarize(records).tokens_by_engine == {"unreported": 1}


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (b'{"data": [{"id": "m", "max_model_len": "x"}]}', "list of models"),
        (b'{"data": [{"id": 7}]}', "list of models"),
        (b'{"data": [1, null]}', "list of models"),
        (b"[" * 100_000, "list of models"),
        (b'{"data": [{"id": "m", "max_model_len": -5}]}', "max_model_len is -5"),
    ],
)
def test_a_list_of_models_that_is_none_is_refused(models: bytes, message: str) -> None:
    with answering(models) as url, pytest.raises(ServerError, match=message):
        ask_models(url)


def test_a_failing_request_stops_no_other(server_url: str) -> None:
    summary = summarize(run(server_url, "flaky"))
    assert (summary.succeeded, summary.failures) == (20, {"HTTP 503: no room": 10})


def test_a_server_that_dies_in_mid_stream_fails_every_request(
    start_server: Callable[[], str],
) -> None:
    # Longer than what a stream gets out before it takes the server down.
    records = run(start_server(), "fatal", [LoadRequest(5, 9)] * 30)
    assert all(record.error for record in records)
    assert max(record.output_tokens for record in records) <= 4


def test_requests_leave_at_their_arrival_times(server_url: str) -> None:
    load = [LoadRequest(3, 2, arrival) for arrival in (0.3, 0.0, 0.15)]
    records = run(server_url, "fake", load)
    assert all(record.sent_s >= record.request.arrival_s for record in records)
    assert sorted(range(3), key=lambda index: records[index].sent_s) == [1, 2, 0]


def test_a_concurrency_limit_is_kept_and_shows_as_send_lag(server_url: str) -> None:
    records = run(server_url, "fake", LOAD[:6], max_concurrency=2)
    moments = sorted(record.sent_s for record in records)
    for moment in moments:
        assert sum(r.sent_s <= moment < r.end_s for r in records) <= 2
    lag = summarize(records).send_lag_s.max
    assert lag is not None
    assert lag >= min(record.end_s for record in records)


def test_progress_ends_at_the_totals(server_url: str) -> None:
    seen: list[Progress] = []
    run(server_url, "flaky", LOAD[:9], on_progress=seen.append)
    tokens = seen[-1].tokens
    assert seen[-1] == Progress(sent=9, finished=9, failed=3, tokens=tokens)
    assert tokens > 0
    assert [p.finished for p in seen] == sorted(p.finished for p in seen)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_base_url_may_name_v1(server_url: str, suffix: str) -> None:
    assert ask_models(server_url + suffix) == [ServedModel("fake", 512)]


@pytest.mark.parametrize("path", ["", "no-scheme"])
def test_an_unreachable_server_is_named_with_a_way_out(dead_url: str, path: str) -> None:
    with pytest.raises(ServerError, match=r"no server answers at .*--base-url"):
        ask_models(path or dead_url)


def test_an_unreachable_server_fails_requests_and_not_the_replay(dead_url: str) -> None:
    assert summarize(run(dead_url, "fake", LOAD[:3])).failed == 3
