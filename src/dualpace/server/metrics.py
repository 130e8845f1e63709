"""Counters and histograms for Prometheus, in a registry of their own.

Knows engines by name and events by their numbers, and nothing of requests.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from dualpace.core.messages import EngineName, EngineStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
ENGINES: tuple[EngineName, ...] = ("gpu", "cpu")
TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
ITL_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
E2E_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1200.0)


class Metrics:
    """Everything on /metrics. All durations are in seconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._last_stats: dict[EngineName, EngineStats] = {}
        self.prompt_tokens = Counter(
            "dualpace_prompt_tokens", "Prompt tokens accepted", registry=self.registry
        )
        self.resubmitted = Counter(
            "dualpace_resubmitted_requests",
            "Requests resubmitted after the loss of an engine",
            registry=self.registry,
        )
        self._tokens = self._counter("generation_tokens", "Output tokens")
        self._finished = self._counter("requests", "Requests ended", "finish_reason")
        self._ttft = self._histogram("time_to_first_token", "Time to first token", TTFT_BUCKETS)
        self._itl = self._histogram("inter_token_latency", "Time between tokens", ITL_BUCKETS)
        self._e2e = self._histogram("e2e_request_latency", "Arrival to last token", E2E_BUCKETS)
        self._running = self._gauge("requests_running", "Requests that hold KV")
        self._waiting = self._gauge("requests_waiting", "Requests that wait for KV room")
        self._pages_free = self._gauge("kv_pages_free", "Free KV pages")
        self._pages_total = self._gauge("kv_pages_total", "KV pages")
        self._up = self._gauge("engine_up", "1 while the engine answers")
        self._restarts = self._counter("engine_restarts", "Starts of the engine after its first")
        self._hangs = self._counter("engine_hangs", "Times that the engine was killed as it hung")
        self._given_up = self._gauge("engine_given_up", "1 while the server goes on without it")
        self._steps = self._counter("engine_steps", "Iterations of the engine")
        self._moves = self._counter("moves", "Requests moved between tiers", "kind")
        for engine in ENGINES:  # so that a rate has a zero to start from
            for counter in (self._tokens, self._restarts, self._hangs, self._steps):
                counter.labels(engine)
            for gauge in (self._up, self._given_up):
                gauge.labels(engine)

    def first_token(self, engine: EngineName, seconds: float) -> None:
        self._tokens.labels(engine).inc()
        self._ttft.labels(engine).observe(seconds)

    def next_token(self, engine: EngineName, seconds: float) -> None:
        self._tokens.labels(engine).inc()
        self._itl.labels(engine).observe(seconds)

    def finished(self, engine: EngineName, reason: str, seconds: float) -> None:
        """A request ended: `reason` is a finish reason, "abort" or "error"."""
        self._finished.labels(engine, reason).inc()
        self._e2e.labels(engine).observe(seconds)

    def engine_up(self, engine: EngineName, again: bool) -> None:
        """The engine answers; `again` if it did before in this server's life."""
        self._up.labels(engine).set(1)
        self._given_up.labels(engine).set(0)
        self._last_stats.pop(engine, None)  # its counters start from zero
        if again:
            self._restarts.labels(engine).inc()

    def engine_down(self, engine: EngineName) -> None:
        for gauge in (self._up, self._running, self._waiting, self._pages_free):
            gauge.labels(engine).set(0)

    def engine_hung(self, engine: EngineName) -> None:
        self._hangs.labels(engine).inc()

    def engine_given_up(self, engine: EngineName) -> None:
        """The server goes on without it until it answers again."""
        self._given_up.labels(engine).set(1)

    def engine_stats(self, engine: EngineName, stats: EngineStats) -> None:
        self._running.labels(engine).set(stats.rows)
        self._waiting.labels(engine).set(stats.waiting)
        self._pages_free.labels(engine).set(stats.pages_free)
        self._pages_total.labels(engine).set(stats.pages_total)
        last = self._last_stats.get(engine)
        self._steps.labels(engine).inc(max(0, stats.steps - (last.steps if last else 0)))
        for kind, count in stats.moves.items():
            before = last.moves.get(kind, 0) if last else 0
            self._moves.labels(engine, kind).inc(max(0, count - before))
        self._last_stats[engine] = stats

    def render(self) -> bytes:
        """The exposition text, of type `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"dualpace_{name}", help_text, ("engine", *labels), registry=self.registry)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(f"dualpace_{name}", help_text, ("engine",), registry=self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"dualpace_{name}_seconds",
            help_text,
            ("engine",),
            buckets=buckets,
            registry=self.registry,
        )
