"""`dualpace chat`: talk to a model in the terminal, without a server."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from dualpace.cli.logs import set_up_logging
from dualpace.cli.serve import (
    CpuCores,
    GpuKvTokens,
    HostKvSize,
    MaxModelLen,
    Model,
    run_or_explain,
)
from dualpace.core.config import EngineOptions
from dualpace.core.errors import RequestError
from dualpace.core.sampling import SamplingParams
from dualpace.wiring import Server


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
    run_or_explain(
        _chat(
            EngineOptions(
                model=model,
                max_model_len=max_model_len,
                gpu_kv_tokens=gpu_kv_tokens,
                host_kv_size=host_kv_size,
                cpu_cores=cpu_cores,
            ),
            SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens),
            system,
        )
    )


async def _chat(options: EngineOptions, params: SamplingParams, system: str | None) -> None:
    server = await Server.start(options)
    messages = [{"role": "system", "content": system}] if system else []
    try:
        while question := _ask():
            messages.append({"role": "user", "content": question})
            answer = ""
            try:
                prompt = server.frontend.tokenizer.apply_chat_template(messages)
                async for delta in server.frontend.generate(prompt, params):
                    typer.echo(delta.text, nl=False)
                    answer += delta.text
            except RequestError as error:
                typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
                messages.pop()
                continue
            typer.echo()
            messages.append({"role": "assistant", "content": answer})
    finally:
        await server.close()


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
