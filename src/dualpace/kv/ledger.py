"""The transfer ledger: what is under way on pages that another process owns.

Holds numbers and names; the copies themselves are the executor's.
"""

from __future__ import annotations

from collections import Counter

from dualpace.core.plan import CopyJob, CopyKind


class TransferLedger:
    """Numbers copy jobs and counts, per request, what still touches the other owner's pages.

    A step that reads or writes host pages counts as a use just as a copy does. The peer is told
    that a request is gone only when its count is zero.
    """

    def __init__(self) -> None:
        self._uses: Counter[str] = Counter()
        self._issued = 0

    @property
    def quiet(self) -> bool:
        """True when nothing under way touches the peer's pages."""
        return not self._uses

    def open(
        self, request_id: str, kind: CopyKind, source: list[int], target: list[int]
    ) -> CopyJob:
        """A new job; it counts as a use until `close`."""
        self._issued += 1
        job = CopyJob(self._issued, request_id, kind, source, target)
        self.begin_use(request_id)
        return job

    def close(self, job: CopyJob) -> None:
        """The copy has completed or failed."""
        self.end_use(job.request_id)

    def begin_use(self, request_id: str) -> None:
        self._uses[request_id] += 1

    def end_use(self, request_id: str) -> None:
        self._uses[request_id] -= 1
        if self._uses[request_id] == 0:
            del self._uses[request_id]

    def in_use(self, request_id: str) -> bool:
        """True while a step or copy touches the peer's pages of this request."""
        return request_id in self._uses

    def check_integrity(self) -> None:
        """Raise if a count fell below zero."""
        if any(count < 1 for count in self._uses.values()):
            raise AssertionError(f"transfer uses fell below zero: {dict(self._uses)}")
