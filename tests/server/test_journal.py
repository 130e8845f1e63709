from __future__ import annotations

import pytest

from dualpace.core.logprobs import TokenLogprobs
from dualpace.core.messages import Submit, TokenEvent
from dualpace.core.request import RequestState
from dualpace.core.sampling import DecodeParams
from dualpace.server.journal import Journal

EOS = 7


def _journal(max_tokens=9, min_tokens=0):
    journal = Journal()
    params = DecodeParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_ids=(EOS,))
    journal.open(RequestState("r", 3, 0, [1, 2], [], params))
    return journal, journal.get("r")


def _release_all(entry):
    released = []
    while (item := entry.release()) is not None:
        released.append(item[:3])
        if item.finish is not None:
            break
    return released


def test_tokens_leave_in_order_and_once_however_they_came():
    _, entry = _journal()
    for index, token, engine in [(2, 12, "cpu"), (1, 11, "gpu"), (2, 12, "gpu")]:
        entry.receive(TokenEvent("r", 0, index, token), engine)
        assert _release_all(entry) == []
    entry.receive(TokenEvent("r", 0, 0, 10), "gpu")
    assert _release_all(entry) == [(10, "gpu", None), (11, "gpu", None), (12, "cpu", None)]
    entry.receive(TokenEvent("r", 0, 1, 11), "cpu")
    assert _release_all(entry) == []
    assert entry.state.output == [10, 11, 12]


def test_logprobs_leave_with_their_token_and_once_whoever_tells_them_again():
    journal, entry = _journal()
    first, second, third = (TokenLogprobs(-float(i), i, [i], [0.0]) for i in (1, 2, 3))
    entry.receive(TokenEvent("r", 0, 1, 11, None, second), "cpu")
    entry.receive(TokenEvent("r", 0, 0, 10, None, first), "gpu")
    entry.receive(TokenEvent("r", 0, 1, 11, None, second), "gpu")
    assert [entry.release().logprobs for _ in range(2)] == [first, second]
    again = journal.resubmit("r", 4).state
    assert (again.output, again.logprobs) == ([10, 11], [first, second])
    again.append(55, third)  # an engine in this process grows its own lists
    for index, token, its in [(1, 11, second), (2, 12, third)]:
        entry.receive(TokenEvent("r", 4, index, token, None, its), "gpu")
    assert entry.release().logprobs == third
    assert entry.release() is None
    assert (entry.state.output, entry.state.logprobs) == ([10, 11, 12], [first, second, third])


def test_a_finish_waits_for_the_tokens_before_it():
    _, entry = _journal()
    entry.receive(TokenEvent("r", 0, 1, EOS, "stop"), "cpu")
    assert _release_all(entry) == []
    entry.receive(TokenEvent("r", 0, 0, 10), "gpu")
    assert _release_all(entry) == [(10, "gpu", None), (EOS, "cpu", "stop")]


def test_a_finish_that_comes_with_a_doubled_token_still_ends_the_request():
    _, entry = _journal()
    entry.receive(TokenEvent("r", 0, 0, 10), "gpu")
    assert _release_all(entry) == [(10, "gpu", None)]
    entry.receive(TokenEvent("r", 0, 0, 10, "length"), "cpu")
    assert _release_all(entry) == [(None, "gpu", "length")]


def test_tokens_beyond_the_finish_are_not_released():
    _, entry = _journal()
    entry.receive(TokenEvent("r", 0, 1, 99), "cpu")
    entry.receive(TokenEvent("r", 0, 0, EOS, "stop"), "gpu")
    assert _release_all(entry) == [(EOS, "gpu", "stop")]


def test_a_resubmission_carries_what_was_released_and_refuses_what_is_older():
    journal, entry = _journal()
    entry.receive(TokenEvent("r", 0, 0, 10), "gpu")
    entry.receive(TokenEvent("r", 0, 2, 12, "stop"), "cpu")
    _release_all(entry)
    again = journal.resubmit("r", 4)
    assert isinstance(again, Submit)
    assert (again.state.prompt, again.state.output) == ([1, 2], [10])
    assert (again.state.arrival, again.state.epoch) == (3, 4)
    again.state.output.append(55)  # an engine in this process grows its own list
    entry.receive(TokenEvent("r", 3, 1, 66), "cpu")
    assert _release_all(entry) == []
    entry.receive(TokenEvent("r", 4, 1, 11), "gpu")
    assert _release_all(entry) == [(11, "gpu", None)]
    assert journal.resubmit("r", 3) is None


@pytest.mark.parametrize(
    ("tokens", "options", "reason"),
    [
        ([10, 11], {"max_tokens": 2}, "length"),
        ([10, EOS], {}, "stop"),
        ([10, EOS], {"min_tokens": 2}, None),
    ],
)
def test_a_request_that_its_tokens_already_end_is_not_resubmitted(tokens, options, reason):
    journal, entry = _journal(**options)
    for index, token in enumerate(tokens):
        entry.receive(TokenEvent("r", 0, index, token), "cpu")
    _release_all(entry)
    again = journal.resubmit("r", 1)
    assert again == reason or (reason is None and isinstance(again, Submit))


def test_an_unknown_request_is_not_resubmitted():
    journal, _ = _journal()
    journal.close("r")
    assert journal.resubmit("r", 1) is None
    assert len(journal) == 0
