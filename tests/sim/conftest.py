"""Simulated servers that something goes wrong in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dualpace.core.errors import EngineError
from dualpace.core.messages import EngineName
from dualpace.core.plan import CopyJob, CopyKind, Executor
from dualpace.sim.world import World


@pytest.fixture
def first_copy_fails() -> Callable[[CopyKind], type[World]]:
    """Servers whose first copy of a kind fails once it has ended."""

    def failing(kind: CopyKind) -> type[World]:
        class FirstCopyFails(World):
            def make_executor(self, name: EngineName, wake: Callable[[], None]) -> Executor:
                executor = super().make_executor(name, wake)
                copy, failed = executor.copy, []

                def with_failure(job: CopyJob) -> Any:
                    ticket: Any = copy(job)
                    if job.kind == kind and not failed:
                        failed.append(job)
                        finish = ticket.finish
                        ticket.finish = lambda outcome: finish(EngineError("the link is down"))
                    return ticket

                executor.copy = with_failure  # type: ignore[method-assign]
                return executor

        return FirstCopyFails

    return failing
