"""Every message between frontend, GPU engine, CPU engine and supervisor.

Control only: ids, tokens, page numbers. KV bytes and activations go through shared memory.
An `Envelope` says who sent a message and which incarnation of the CPU engine it speaks of; what
speaks of a dead one is dropped by the receiver. Messages between two processes arrive in order.

    who -> whom               messages
    frontend -> GPU           Submit
    frontend -> both          Abort
    either engine -> frontend Tokens, Failed, EngineReady, EngineStats
    GPU -> frontend           Lost
    GPU -> CPU                Reserve, Cancel, Handoff, Recall, Loaded, Usable, GpuLoad, GatedRun
    CPU -> GPU                Grant, Deny, Release, KeepRow, Return, HostReport
    engine <-> engine         Gone
    supervisor -> GPU         PeerUp, PeerDown (answered with PeerDrained), HostGone
    supervisor -> both        Shutdown
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from dualpace.core.logprobs import TokenLogprobs
from dualpace.core.request import FinishReason, RequestState

FRONTEND: Final = "frontend"
GPU: Final = "gpu"
CPU: Final = "cpu"
EngineName = Literal["gpu", "cpu"]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


# -- frontend to engines -------------------------------------------------------------------------


class Submit(Message, frozen=True):
    """A request enters the GPU engine's waiting queue at its arrival place.

    A resubmission after a crash carries the tokens already streamed as `output`.
    """

    state: RequestState


class Abort(Message, frozen=True):
    """The client has left, or a stop string ended the text: free everything."""

    request_id: str


# -- engines to frontend -------------------------------------------------------------------------


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """Token `index` (0 = first output token) of a request.

    A finish carries its reason; its count is `index + 1`. `logprobs` come where the request asked.
    `attended`: in a gated step the GPU engine's, for which the CPU engine did the attention.
    """

    request_id: str
    epoch: int
    index: int
    token_id: int
    finish: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    attended: bool = False


def token_event(state: RequestState, index: int, *, attended: bool = False) -> TokenEvent:
    """What there is to tell of output token `index`; the last one tells of the end, if it is."""
    return TokenEvent(
        state.id,
        state.epoch,
        index,
        state.output[index],
        state.finish_reason if index + 1 == len(state.output) else None,
        state.logprobs[index] if state.logprobs else None,
        attended,
    )


class Tokens(Message, frozen=True):
    """All tokens of one step."""

    events: list[TokenEvent]


class Failed(Message, frozen=True):
    """An engine gave a request up; its pages are free again."""

    request_id: str
    epoch: int
    reason: str


class Lost(Message, frozen=True):
    """Requests that were the dead CPU engine's, with the epoch at which to resubmit each."""

    requests: list[tuple[str, int]]


class EngineReady(Message, frozen=True):
    """The engine answers from now on. Capacities are tokens of KV, 0 where it holds none.

    longest: tokens of the longest request that there is room for, where that is not `kv_tokens`.
    """

    pid: int
    kv_tokens: int
    page_tokens: int
    longest: int | None = None


class EngineStats(Message, frozen=True):
    """Counters for /metrics, at most a few times a second."""

    steps: int
    rows: int
    waiting: int
    pages_total: int
    pages_free: int
    moves: dict[str, int] = {}


# -- GPU engine to CPU engine --------------------------------------------------------------------


class Reserve(Message, frozen=True):
    """May this request have host pages for `tokens` positions? Answered at once: Grant or Deny.

    Each question has an epoch of its own. The sender uses nothing that it had of an earlier one.
    """

    request_id: str
    epoch: int
    tokens: int


class Cancel(Message, frozen=True):
    """A grant is not needed, and nothing writes to its pages any more."""

    request_id: str
    epoch: int


class Handoff(Message, frozen=True):
    """The request is the CPU engine's from here on. Its KV lies complete in the granted pages."""

    state: RequestState


class Recall(Message, frozen=True):
    """Give the request back if its KV fits `room` tokens. Answered at once: Release or KeepRow.

    May be sent again; with room for none it only asks whether the request is there.
    """

    request_id: str
    epoch: int
    room: int


class Loaded(Message, frozen=True):
    """The released request's KV has been copied: its host pages are free."""

    request_id: str
    epoch: int


class Usable(Message, frozen=True):
    """The GPU can copy from and to the first `pages` host pages: grant no others. It only grows."""

    pages: int


class GpuLoad(Message, frozen=True):
    """How many tokens one more second of the GPU would yield, and the share of its time that goes
    into prompts. Sent when it has changed by a tenth."""

    token_rate: float
    prefill_share: float


class GatedRow(msgspec.Struct, frozen=True, array_like=True):
    """A host row of a gated step: its token and that token's position, and its host pages."""

    request_id: str
    token: int
    position: int
    pages: list[int]


class GatedRun(Message, frozen=True):
    """Attend, through the mailbox, for these rows of the GPU engine's step `number`, which waits.

    halves: of the halves that have host rows, a slot each. An earlier run that has not begun is not
    waited for any more. There is no answer but in the mailbox.
    """

    number: int
    halves: list[list[GatedRow]]


# -- CPU engine to GPU engine --------------------------------------------------------------------


class Grant(Message, frozen=True):
    """Host pages for a Reserve, in order of position. Repeated now and then while they are kept for
    the GPU engine, which answers with Cancel if it has no use for them."""

    request_id: str
    epoch: int
    pages: list[int]


class Deny(Message, frozen=True):
    """No host pages now."""

    request_id: str
    epoch: int


class Release(Message, frozen=True):
    """Answer to Recall: the committed state (epoch + 1) and the pages that hold its KV. Repeated
    like a Grant, and answered with Loaded."""

    state: RequestState
    pages: list[int]


class KeepRow(Message, frozen=True):
    """Answer to Recall: it stays here, having outgrown the room with `tokens` tokens.

    0 tokens: it is not here. Either an earlier message has told why, or it is lost.
    """

    request_id: str
    epoch: int
    tokens: int


class Return(Message, frozen=True):
    """The host has no page left for this request: recompute it (epoch + 1) at its arrival place."""

    state: RequestState


class HostReport(Message, frozen=True):
    """After each CPU iteration, and now and then: what the GPU scheduler may count on.

    `number` grows from report to report. `lengths`: committed tokens of the oldest rows, in arrival
    order.
    """

    number: int
    pages_free: int
    rows: int
    lengths: dict[str, int]


# -- both ways between the engines ---------------------------------------------------------------


class Gone(Message, frozen=True):
    """The request has ended, here or everywhere: end it, and free what you keep for me of it.

    Sent once nothing here touches the receiver's pages of the request any more. It speaks of epochs
    up to `last_epoch`; a request that is lost comes back at a later one, so this may come late,
    twice, or from both sides, and do no harm.
    """

    request_id: str
    last_epoch: int


# -- supervisor ----------------------------------------------------------------------------------


class PeerUp(Message, frozen=True):
    """A CPU engine of this generation listens at `address`, with that many free host pages."""

    generation: int
    address: str
    pages: int


class PeerDown(Message, frozen=True):
    """The CPU engine of this generation is dead and reaped."""

    generation: int


class HostGone(Message, frozen=True):
    """Nobody counts on another CPU engine: no request shall wait for host pages until a PeerUp."""


class PeerDrained(Message, frozen=True):
    """GPU engine to supervisor: no step or copy touches the dead generation's pages any more."""

    generation: int


class Shutdown(Message, frozen=True):
    """Finish the step that runs, then exit."""


AnyMessage = (
    Submit | Abort | Tokens | Failed | Lost | EngineReady | EngineStats
    | Reserve | Cancel | Handoff | Recall | Loaded | Usable | GpuLoad | GatedRun
    | Grant | Deny | Release | KeepRow | Return | HostReport
    | Gone | PeerUp | PeerDown | HostGone | PeerDrained | Shutdown
)  # fmt: skip


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A message with its sender and the CPU engine's generation it speaks of."""

    sender: str
    generation: int
    body: AnyMessage
