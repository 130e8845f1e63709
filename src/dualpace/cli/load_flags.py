"""The options that say which load is replayed, or which loads: one for each rate of a sweep.

Chooses; `dualpace.bench.load` makes the requests.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dualpace.bench.load import (
    AZURE_CONV_2023,
    LoadRequest,
    arrive_as_traced,
    arrive_at_once,
    arrive_poisson,
    clip_lengths,
    read_azure_csv,
    scale_lengths,
)
from dualpace.core.errors import ConfigError

MAX_SCALE = 1000.0
MAX_REQUESTS = 10_000_000  # each is a record in memory
MAX_SPAN_S = 1e9  # thirty years: beyond that a clock in float64 no longer tells milliseconds well


class Arrival(StrEnum):
    """When requests are sent."""

    inf = "inf"
    poisson = "poisson"
    trace = "trace"


@dataclass(frozen=True)
class Load:
    """Requests, one line that describes them, where their lengths are from, and their rate.

    `request_rate` is in requests per second, None where none was asked for.
    """

    requests: list[LoadRequest]
    text: str
    source: str
    request_rate: float | None

    def clipped(self, max_model_len: int) -> Load:
        """The load with its requests cut to so many tokens of prompt and output."""
        requests, count = clip_lengths(self.requests, max_model_len)
        note = f", {count} clipped to {max_model_len} tokens" if count else ""
        return dataclasses.replace(self, requests=requests, text=self.text + note)


@dataclass(frozen=True)
class LoadFlags:
    """What is asked of the server."""

    trace: Annotated[
        Path | None,
        typer.Option(
            help="Lengths and arrivals of an Azure LLM inference trace (CSV, published at "
            "github.com/Azure/AzurePublicDataset), from its first row."
        ),
    ] = None
    skip_longer: Annotated[
        int | None,
        typer.Option(min=2, help="Leave out rows of the trace with more tokens than that."),
    ] = None
    synthetic: Annotated[
        bool,
        typer.Option("--synthetic", help="Log-normal lengths fitted to Azure-conv 2023 (default)."),
    ] = False
    num_requests: Annotated[
        int, typer.Option(min=1, max=MAX_REQUESTS, help="Requests to send.")
    ] = 200
    request_rate: Annotated[float, typer.Option(help="Mean requests per second.")] = math.inf
    rates: Annotated[
        str,
        typer.Option(
            help="A sweep: the same requests at several rates, such as 2,4,8,inf. "
            "(default: at --request-rate only)"
        ),
    ] = ""
    arrival: Annotated[
        Arrival | None,
        typer.Option(
            help="inf: all at once; poisson: at --request-rate; trace: the trace's own, compressed "
            "to --request-rate. (default: poisson if there is a rate, else inf)"
        ),
    ] = None
    scale: Annotated[float, typer.Option(help="Multiply all lengths, for small models.")] = 1.0
    seed: Annotated[int, typer.Option(min=0, help="Of lengths, arrivals and prompts.")] = 0

    def build(self) -> list[Load]:
        """A load for each rate. Raises `ConfigError` naming the flag that cannot work."""
        if not self.rates:
            return [self._build()]
        if math.isfinite(self.request_rate):
            raise ConfigError("--rates and --request-rate exclude each other")
        try:
            rates = [float(rate) for rate in self.rates.split(",")]
        except ValueError:
            raise ConfigError(f"--rates is numbers with commas, got {self.rates!r}") from None
        if not all(rate > 0.0 for rate in rates):
            raise ConfigError(f"--rates must be positive numbers or inf, got {self.rates!r}")
        return [dataclasses.replace(self, request_rate=rate)._build() for rate in rates]

    def _build(self) -> Load:
        if self.trace and self.synthetic:
            raise ConfigError("--trace and --synthetic exclude each other")
        if self.skip_longer is not None and not self.trace:
            raise ConfigError("--skip-longer needs --trace FILE")
        if not 0.0 < self.scale <= MAX_SCALE:
            raise ConfigError(
                f"--scale must be a positive number up to {MAX_SCALE:g}, got {self.scale}"
            )
        if not self.request_rate > 0.0:
            raise ConfigError(
                f"--request-rate must be a positive number or inf, got {self.request_rate}"
            )
        if self.trace:
            rows = read_azure_csv(self.trace, self.num_requests, self.skip_longer)
            load = scale_lengths(rows, self.scale)
            source = self.trace.name
            if self.skip_longer is not None:
                source += f" up to {self.skip_longer} tokens"
        else:
            lengths = AZURE_CONV_2023.scaled(self.scale)
            load = lengths.generate(self.num_requests, self.seed)
            source = "log-normal lengths of Azure-conv 2023"
        load, timing = self._arrive(load)
        last = max(request.arrival_s for request in load)
        if not last <= MAX_SPAN_S:
            raise ConfigError(
                f"the last request would be sent after {last:.3g} s: "
                "raise --request-rate or --rates"
            )
        source += "" if self.scale == 1.0 else f" × {self.scale:g}"
        rate = self.request_rate if math.isfinite(self.request_rate) else None
        return Load(load, f"{len(load)} requests, {source}, {timing}", source, rate)

    def _arrive(self, load: list[LoadRequest]) -> tuple[list[LoadRequest], str]:
        rate = self.request_rate
        arrival = self.arrival or (Arrival.inf if math.isinf(rate) else Arrival.poisson)
        if arrival is Arrival.inf:
            if math.isfinite(rate):
                raise ConfigError(
                    "--arrival inf sends all at once: leave --request-rate or --rates out"
                )
            return arrive_at_once(load), "all at once"
        if arrival is Arrival.poisson:
            if math.isinf(rate):
                raise ConfigError("--arrival poisson needs a finite --request-rate, or --rates")
            return arrive_poisson(load, rate, self.seed), f"Poisson at {rate:g}/s"
        if not self.trace:
            raise ConfigError("--arrival trace needs --trace FILE")
        timing = "trace arrivals" + ("" if math.isinf(rate) else f" at {rate:g}/s")
        return arrive_as_traced(load, rate), timing
