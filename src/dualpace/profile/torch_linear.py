"""What torch takes for a bfloat16 linear layer on the same cores, for comparison.

Torch runs in a process of its own (this module is also that process), which keeps it out of the
one whose kernels are measured, and is asked for one layer at a time, so that the two take turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

WORKING_SET = 2**30
ROUNDS = 3


class TorchLinear:
    """Asks the process. Use as a context manager; call with (n, k, m).

    cores: CPU ids that torch may use, one thread each. seconds: about how long a measurement of
    either kind takes. working_set: bytes of weights, in several copies, so that no cache holds
    them.
    """

    def __init__(
        self, cores: Sequence[int], seconds: float, working_set: int = WORKING_SET
    ) -> None:
        self._seconds = seconds
        self._working_set = working_set
        self._cores = list(cores)

    def __enter__(self) -> TorchLinear:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dualpace.profile.torch_linear", json.dumps(self._cores)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # A Ctrl-C at the terminal reaches this process alone, which then ends the other.
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def __call__(self, n: int, k: int, m: int) -> tuple[float | None, float | None]:
        """Seconds of `F.linear`, and of the layer with weights that torch has reordered for m rows.

        None where torch fails, or has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(
                json.dumps([n, k, m, self._seconds, self._working_set]) + "\n"
            )
            self._process.stdin.flush()
        except BrokenPipeError:
            return None, None
        answer = self._process.stdout.readline()
        eager, prepacked = json.loads(answer) if answer else (None, None)
        return eager, prepacked


def main() -> None:
    """Answer requests from stdin until it closes."""
    cores = json.loads(sys.argv[1])
    os.sched_setaffinity(0, cores)
    import torch  # in this process only, and after its cores are settled

    torch.set_num_threads(len(cores))
    weights: list[torch.Tensor] = []
    with torch.inference_mode():
        for line in sys.stdin:
            n, k, m, seconds, working_set = json.loads(line)
            if not weights or tuple(weights[0].shape) != (n, k):
                weights.clear()
                first = torch.empty(n, k, dtype=torch.bfloat16).uniform_(-0.1, 0.1)
                copies = working_set // (2 * n * k) + 1
                weights.extend(first.clone() for _ in range(copies))
            x = torch.randn(m, k).to(torch.bfloat16)
            answer = [
                _measure(partial(_eager, torch, x, weights), seconds),
                _measure(partial(_prepacked, torch, x, weights), seconds),
            ]
            print(json.dumps(answer), flush=True)


def _eager(torch: Any, x: Any, weights: Sequence[Any]) -> list[Callable[[], Any]]:
    return [partial(torch.nn.functional.linear, x, w) for w in weights]


def _prepacked(torch: Any, x: Any, weights: Sequence[Any]) -> list[Callable[[], Any]]:
    ops = torch.ops.mkldnn
    packed = [ops._reorder_linear_weight(w, len(x)) for w in weights]
    return [partial(ops._linear_pointwise, x, w, None, "none", [], "") for w in packed]


def _measure(make: Callable[[], list[Callable[[], Any]]], seconds: float) -> float | None:
    """Seconds of a call, as the median of rounds through the calls that `make` returns, or None."""
    try:
        calls = make()
        calls[0]()
        means = []
        position = 0
        for _ in range(ROUNDS):
            start = time.perf_counter()
            done = 0
            while done < len(calls) and time.perf_counter() - start < seconds / ROUNDS:
                calls[position % len(calls)]()
                position += 1
                done += 1
            means.append((time.perf_counter() - start) / done)
    except RuntimeError:
        return None
    return statistics.median(means)


if __name__ == "__main__":
    main()
