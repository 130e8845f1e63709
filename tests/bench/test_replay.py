"""The replay's clock with a sender that does what the test tells it to."""

from __future__ import annotations

import asyncio
import time

import pytest

from dualpace.bench.load import LoadRequest
from dualpace.bench.metrics import summarize
from dualpace.bench.record import Chunk, RequestRecord
from dualpace.bench.replay import Tally, replay
from dualpace.core.errors import EngineError

LOAD = [LoadRequest(4, 3), LoadRequest(4, 10**6), LoadRequest(4, 3)]


async def speak(index: int, record: RequestRecord, tally: Tally) -> None:
    """A token at once and then one every millisecond."""
    for _ in range(record.request.output_tokens):
        record.chunks.append(Chunk(tally.now(), 1, "gpu"))
        tally.add_tokens(1, tally.now())
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("by", ["time", "event"])
def test_what_is_under_way_at_the_end_is_neither_answered_nor_failed(by: str) -> None:
    async def run() -> list[RequestRecord]:
        if by == "time":
            return await replay(LOAD, speak, seconds=0.1)
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.1, stop.set)
        return await replay(LOAD, speak, stop=stop)

    records = asyncio.run(run())
    assert [record.ok for record in records] == [True, False, True]
    assert records[1].error is None
    assert 0.1 <= records[1].end_s < 5.0
    summary = summarize(records)
    assert (summary.succeeded, summary.failed, summary.unfinished) == (2, 0, 1)
    assert summary.output_tokens == 6
    assert summary.unfinished_tokens == len(records[1].chunks) > 0


def test_what_was_not_sent_by_the_end_has_no_record() -> None:
    load = [LoadRequest(4, 10**6), LoadRequest(5, 3), LoadRequest(6, 3, arrival_s=60.0)]
    records = asyncio.run(replay(load, speak, seconds=0.05, max_concurrency=1))
    assert [record.request for record in records] == load[:1]


def test_a_request_that_fails_is_recorded_and_stops_no_other() -> None:
    async def refuse(index: int, record: RequestRecord, tally: Tally) -> None:
        if index == 1:
            raise EngineError("no room")
        await speak(index, record, tally)

    records = asyncio.run(replay(LOAD, refuse, seconds=60.0))
    assert [record.error for record in records] == [None, "no room", None]
    assert not any(record.cut for record in records)


def test_second_0_may_be_a_moment_that_several_clients_agreed_on() -> None:
    load = [LoadRequest(4, 3, arrival_s) for arrival_s in (0.0, 99.0)]
    long_ago = time.perf_counter() - 100.0
    records = asyncio.run(replay(load, speak, start=long_ago))
    assert all(record.sent_s >= 100.0 for record in records)
    assert asyncio.run(replay(LOAD, speak, start=long_ago, seconds=50.0))[1].cut
