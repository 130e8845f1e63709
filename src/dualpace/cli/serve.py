"""`dualpace serve`: the OpenAI-compatible server. Option names are vLLM's where the meaning is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import typer
import uvicorn

from dualpace.cli.errors import explained
from dualpace.cli.logs import set_up_logging
from dualpace.core.config import ISAS, EngineOptions
from dualpace.models.registry import resolve
from dualpace.models.spec import default_sampling
from dualpace.server.api import create_app
from dualpace.wiring import Server

logger = logging.getLogger(__name__)
GRACE = 5  # seconds for running requests to finish when the server is told to stop
DEFAULTS = {f.name: f.default for f in msgspec.structs.fields(EngineOptions)}

Model = Annotated[
    str, typer.Argument(help="Alias (smollm2), .gguf file, or Hugging Face checkpoint directory.")
]
GpuKvTokens = Annotated[
    int | None,
    typer.Option(help="KV room on the GPU, in tokens. Default: the memory left; 0 without a GPU."),
]
HostKvSize = Annotated[str, typer.Option(help="KV room on the host, such as 40GiB, or auto.")]
CpuCores = Annotated[
    int | None, typer.Option(help="Cores of the CPU engine. Default: all but a small reserve.")
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest prompt plus output. Default: the model's own limit.")
]


def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name in the API. Default: MODEL as given.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer, if not the model's.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = DEFAULTS["dtype"],
    load_format: Annotated[str, typer.Option(help="auto, or dummy for random weights.")] = DEFAULTS[
        "load_format"
    ],
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[
        int, typer.Option(help="Most requests in one step of an engine.")
    ] = DEFAULTS["max_num_seqs"],
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens in one GPU step. Default: 2048, 256 on the stand-in."),
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of the GPU's memory to use.")
    ] = DEFAULTS["gpu_memory_utilization"],
    gpu_kv_tokens: GpuKvTokens = None,
    host_kv_size: HostKvSize = DEFAULTS["host_kv_size"],
    cpu_cores: CpuCores = None,
    cpu_isa: Annotated[
        str, typer.Option(help=f"Instruction set of the CPU engine: {', '.join(ISAS)}.")
    ] = DEFAULTS["cpu_isa"],
    policy: Annotated[str, typer.Option(help="dualpace or gpu-only.")] = DEFAULTS["policy"],
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = DEFAULTS["device"],
    page_tokens: Annotated[int, typer.Option(help="Tokens in a KV page: 16, 32 or 64.")] = DEFAULTS[
        "page_tokens"
    ],
    seed: Annotated[int, typer.Option(help="Seed of dummy weights.")] = DEFAULTS["seed"],
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve MODEL behind an OpenAI-compatible API."""
    given = dict(locals())
    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise typer.BadParameter(f"{log_level!r} is not a log level", param_hint="--log-level")
    set_up_logging(level)
    names = msgspec.structs.fields(EngineOptions)
    with explained():
        asyncio.run(_serve({f.name: given[f.name] for f in names}, host, port))


async def _serve(fields: dict[str, Any], host: str, port: int) -> None:
    options = EngineOptions(**fields)
    this = asyncio.current_task()
    assert this is not None
    hurry = asyncio.Event()

    def stop() -> None:
        """The first signal cancels; one more cuts the grace short, and nothing else."""
        if this.cancelling():
            hurry.set()
        else:
            this.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    with socket.create_server((host, port)) as listener:
        # asyncio turns Nagle's algorithm off only on listeners of its own: each token would wait
        # 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = await Server.start(options)
        api = _Api(
            uvicorn.Config(
                create_app(
                    server.frontend,
                    [options.served_model_name or options.model],
                    default_sampling=default_sampling(resolve(options.model)),
                ),
                log_config=None,
                timeout_graceful_shutdown=GRACE + 1,
            )
        )
        serving = asyncio.ensure_future(api.serve(sockets=[listener]))
        address, bound = listener.getsockname()[:2]
        logger.info("serving %s on http://%s:%d", options.model, address, bound)
        ends: set[asyncio.Future[Any]] = {serving, server.supervisor.failed}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            logger.info("stopping")
        finally:
            api.should_exit = True
            ends = {serving, asyncio.ensure_future(hurry.wait())}
            await asyncio.wait(ends, timeout=GRACE, return_when=asyncio.FIRST_COMPLETED)
            # Streams that still run end with an error event, not with a cut connection.
            server.frontend.fail_all("the server is shutting down")
            await serving
            await server.close()
        if server.supervisor.failed.done():
            server.supervisor.failed.result()


class _Api(uvicorn.Server):
    """uvicorn, but the signals are this command's: engines must be stopped as well."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
