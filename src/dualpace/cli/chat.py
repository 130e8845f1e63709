"""`dualpace chat`: talk to a model in the terminal, without a server."""

from __future__ import annotations

import logging
from typing import Annotated

import typer
from rich.console import Console

from dualpace.cli.errors import explained
from dualpace.cli.logs import set_up_logging
from dualpace.cli.options import CpuCores, GpuKvTokens, HostKvSize, MaxModelLen, Model
from dualpace.core.errors import RequestError
from dualpace.core.sampling import SamplingParams
from dualpace.llm import LLM


def chat(
    model: Model = "smollm2",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 0.95,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    max_model_len: MaxModelLen = None,
    gpu_kv_tokens: GpuKvTokens = None,
    host_kv_size: HostKvSize = "auto",
    cpu_cores: CpuCores = None,
) -> None:
    """Talk to MODEL. An empty line or Ctrl-D ends the conversation."""
    set_up_logging(logging.WARNING)
    with explained():
        params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens)
        with Console(stderr=True).status(f"loading {model}"):
            llm = LLM(
                model,
                max_model_len=max_model_len,
                gpu_kv_tokens=gpu_kv_tokens,
                host_kv_size=host_kv_size,
                cpu_cores=cpu_cores,
            )
        with llm:
            converse(llm, params, system)


def converse(llm: LLM, params: SamplingParams, system: str | None) -> None:
    """Questions from stdin, answers to stdout, until there are no more questions."""
    messages = [{"role": "system", "content": system}] if system else []
    while question := _ask():
        messages.append({"role": "user", "content": question})
        answer = ""
        try:
            for text in llm.stream_chat(messages, params):
                typer.echo(text, nl=False)
                answer += text
        except RequestError as error:
            typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
            messages.pop()
            continue
        typer.echo()
        messages.append({"role": "assistant", "content": answer})


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        typer.echo()
        return ""
