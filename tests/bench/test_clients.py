"""Several client processes against a fake server: as if they were one."""

from __future__ import annotations

import asyncio
import multiprocessing
import os

import pytest

from dualpace.bench.clients import ClientError, Clients, default_clients
from dualpace.bench.load import LoadRequest, draw_prompts
from dualpace.bench.metrics import summarize
from dualpace.bench.record import RequestRecord
from dualpace.bench.replay import Progress

LOAD = [LoadRequest(5 + index, 4 + index % 7, 0.02 * index) for index in range(31)]
ENDLESS = [LoadRequest(5, 10**6)] * 4


def run(url: str, count: int, load: list[LoadRequest] = LOAD, **how: object) -> list[RequestRecord]:
    async def replay() -> list[RequestRecord]:
        clients = Clients(count, url, "fake")
        return await clients(load, draw_prompts(load, 1000, seed=0), **how)  # type: ignore[arg-type]

    return asyncio.run(replay())


def test_records_are_merged_in_the_loads_order(server_url: str) -> None:
    seen: list[Progress] = []
    records = run(server_url, 3, on_progress=seen.append)
    assert [record.request for record in records] == LOAD
    assert [record.output_tokens for record in records] == [r.output_tokens for r in LOAD]
    assert [record.prompt_tokens for record in records] == [r.prompt_tokens for r in LOAD]
    summary = summarize(records)
    assert summary.failed == 0
    assert all(record.sent_s >= record.request.arrival_s for record in records)
    assert seen[-1] == Progress(31, 31, 0, summary.output_tokens)


def test_the_concurrency_limit_is_divided_and_kept(server_url: str) -> None:
    load = [LoadRequest(5, 40)] * 12
    records = run(server_url, 2, load, max_concurrency=3)
    assert len(records) == 12
    moments = [record.sent_s for record in records]
    together = [sum(r.sent_s <= moment < r.end_s for r in records) for moment in moments]
    assert max(together) == 3
    halves = [records[part::2] for part in range(2)]
    for half, limit in zip(halves, (2, 1), strict=True):
        assert max(sum(r.sent_s <= each.sent_s < r.end_s for r in half) for each in half) == limit


@pytest.mark.parametrize("by", ["time", "event"])
def test_all_clients_end_together_and_keep_what_they_have(server_url: str, by: str) -> None:
    async def replay() -> list[RequestRecord]:
        stop = asyncio.Event()

        def on_progress(progress: Progress) -> None:
            if by == "event" and progress.sent == len(ENDLESS) and progress.tokens:
                stop.set()

        return await Clients(2, server_url, "fake")(
            ENDLESS,
            draw_prompts(ENDLESS, 1000, 0),
            seconds=1.0 if by == "time" else None,
            stop=stop,
            on_progress=on_progress,
        )

    records = asyncio.run(replay())
    assert [record.cut for record in records] == [True] * 4
    assert sum(record.output_tokens for record in records) > 0
    assert not multiprocessing.active_children()


def test_a_client_that_dies_ends_the_replay_with_a_reason(server_url: str) -> None:
    killed: list[int | None] = []

    def kill_one(progress: Progress) -> None:
        if not killed:
            victim = multiprocessing.active_children()[0]
            killed.append(victim.pid)
            victim.kill()

    with pytest.raises(ClientError, match="exit code -9"):
        run(server_url, 2, ENDLESS, on_progress=kill_one)
    assert not multiprocessing.active_children()


def test_a_signal_to_all_processes_is_the_parents_alone(server_url: str) -> None:
    """As `timeout` and service managers send it."""

    async def replay() -> list[RequestRecord]:
        stop = asyncio.Event()

        def on_progress(progress: Progress) -> None:
            if progress.tokens and not stop.is_set():
                for process in multiprocessing.active_children():
                    process.terminate()
                stop.set()

        return await Clients(2, server_url, "fake")(
            ENDLESS, draw_prompts(ENDLESS, 1000, 0), stop=stop, on_progress=on_progress
        )

    assert sum(record.output_tokens for record in asyncio.run(replay())) > 0


def test_no_more_clients_work_than_the_limit_or_the_load_allows(server_url: str) -> None:
    async def worked(requests: int, max_concurrency: int | None) -> int:
        load = [LoadRequest(5, 4)] * requests
        clients = Clients(3, server_url, "fake")
        await clients(load, draw_prompts(load, 1000, seed=0), max_concurrency=max_concurrency)
        return clients.worked

    assert asyncio.run(worked(6, 2)) == 2
    assert asyncio.run(worked(1, None)) == 1


def test_processes_are_as_many_as_tokens_and_cores_ask_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    at_once = [LoadRequest(100, 1000)] * 300
    slowly = [LoadRequest(100, 1000, float(index)) for index in range(300)]
    quickly = [LoadRequest(100, 1000, index / 10) for index in range(300)]
    assert default_clients(at_once) == 8
    assert default_clients(slowly) == 1
    assert default_clients(quickly) == 4
    assert default_clients(at_once[:3]) == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert default_clients(at_once) == 1
