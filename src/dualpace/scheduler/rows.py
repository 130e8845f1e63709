"""A request on the GPU engine's books, and the phases of its life there."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from dualpace.core.plan import BatchRow
from dualpace.policy.view import RowView
from dualpace.scheduler.planned_row import PlannedRow


class Phase(enum.Enum):
    """Where a request stands, seen from the GPU engine.

    WAITING -> PREFILL -> DECODE                          on the GPU
    WAITING -> RESERVING -> PREFILL -> LANDING -> REMOTE  straight to the host
    DECODE -> DEMOTING -> STORING -> REMOTE               demotion
    REMOTE -> RECALLING -> LOADING -> DECODE              promotion
    any -> WAITING                                        recompute
    """

    WAITING = "waiting"  # no pages
    RESERVING = "reserving"  # host pages asked for
    PREFILL = "prefill"  # has pages in `tier`, some positions not computed
    DECODE = "decode"  # on the GPU, only its last token not computed
    LANDING = "landing"  # the last of its prompt is being computed, or on its way to host pages
    DEMOTING = "demoting"  # on the GPU, host pages asked for
    STORING = "storing"  # its KV is being copied to the host
    REMOTE = "remote"  # the CPU engine's
    RECALLING = "recalling"  # the CPU engine's, asked back; GPU pages are reserved
    LOADING = "loading"  # its KV is being copied to the GPU

    __hash__ = object.__hash__  # Enum's own takes far longer, and every step sorts rows by phase


# On the way to the host: it has host pages or has asked for some, as has a PREFILL into the host.
HOSTWARD = (Phase.RESERVING, Phase.LANDING, Phase.DEMOTING, Phase.STORING)


@dataclass(eq=False)
class Row(PlannedRow):
    """One request on the GPU engine's books, as it will be once all launched steps have ended.

    table: its GPU pages, in every phase in which it has some or is to get its KV there;
    host_pages: granted or released pages of the CPU engine's pool; host_length: its tokens when
    the CPU engine last told; host_tokens: output tokens it had when the CPU engine, of which it
    has come back, took it over, else None; queued: its view while it is WAITING, since when
    nothing of it has changed.
    """

    phase: Phase = Phase.WAITING
    host_pages: list[int] = field(default_factory=list)
    host_length: int = 0
    host_knows: bool = False
    host_tokens: int | None = None
    queued: RowView = field(init=False)

    @property
    def pages(self) -> list[int]:
        if self.tier == "host":
            return self.host_pages
        return self.table.pages if self.table is not None else []

    def view(self) -> RowView:
        state = self.state
        tokens = self.host_length if self.phase is Phase.REMOTE else self.num_tokens
        return RowView(state.id, state.arrival, tokens, self.computed, len(self.pages), self.tier)

    def launched(self, step: int, part: BatchRow) -> None:
        super().launched(step, part)
        if part.sample and self.phase is Phase.PREFILL:
            self.phase = Phase.LANDING if self.tier == "host" else Phase.DECODE

    def stay(self) -> None:
        """It was to move to the host, and goes on here: what pages it was granted are not its."""
        self.phase = Phase.DECODE
        self.host_pages = []

    def rewind(self, part: BatchRow) -> None:
        super().rewind(part)
        in_prompt = self.computed < self.state.num_tokens - 1
        if self.phase is Phase.LANDING or (self.phase is Phase.DECODE and in_prompt):
            self.phase = Phase.PREFILL
