"""`dualpace serve`: the OpenAI-compatible server. Option names are vLLM's where the meaning is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from typing import Annotated, Any

import typer
import uvicorn

from dualpace.cli.errors import explained
from dualpace.cli.logs import level_of, set_up_logging
from dualpace.cli.options import EngineFlags, LogLevel, Model, takes_options
from dualpace.core.config import EngineOptions
from dualpace.core.errors import ConfigError
from dualpace.core.garbage import freeze_heap
from dualpace.models.registry import resolve
from dualpace.models.spec import default_sampling
from dualpace.server.api import create_app
from dualpace.server.metrics import Metrics
from dualpace.server.serving import Service
from dualpace.wiring import Server

logger = logging.getLogger(__name__)
GRACE = 5  # seconds for running requests to finish when the server is told to stop


@takes_options
def serve(
    model: Model,
    engines: EngineFlags,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = 8000,
    log_level: LogLevel = "info",
) -> None:
    """Serve MODEL behind an OpenAI-compatible API."""
    set_up_logging(level_of(log_level))
    with explained():
        asyncio.run(_serve(engines.options(model), host, port))


async def _serve(options: EngineOptions, host: str, port: int) -> None:
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
    with _listen(host, port) as listener:
        # asyncio turns Nagle's algorithm off only on listeners of its own: each token would wait
        # 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        service = Service(
            [options.served_model_name or options.model],
            Metrics(),
            default_sampling=default_sampling(resolve(options.model)),
        )
        config = uvicorn.Config(
            create_app(service), log_config=None, timeout_graceful_shutdown=GRACE + 1
        )
        api = _Api(config)
        serving = asyncio.ensure_future(api.serve(sockets=[listener]))
        address, bound = listener.getsockname()[:2]
        logger.info("listening on http://%s:%d while %s loads", address, bound, options.model)
        try:
            server = await Server.start(options, service.metrics)
        except BaseException:
            api.should_exit = True
            await serving
            raise
        freeze_heap()
        service.open(server.frontend)
        logger.info("serving %s on http://%s:%d", options.model, address, bound)
        ends: set[asyncio.Future[Any]] = {serving, server.supervisor.failed}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            logger.info("stopping: running requests have %d s, one more signal ends them", GRACE)
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


def _listen(host: str, port: int) -> socket.socket:
    """Raises `ConfigError` where that cannot be."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(
            f"cannot listen at --host {host} --port {port}: {error.strerror or error}"
        ) from None


class _Api(uvicorn.Server):
    """uvicorn, but the signals are this command's: engines must be stopped as well."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
