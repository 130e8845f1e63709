"""The HTTP application: its routes and its error handlers, and nothing of what they do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from dualpace.core.errors import DualPaceError
from dualpace.core.version import __version__
from dualpace.server.chat import create_chat_completion
from dualpace.server.completions import create_completion
from dualpace.server.errors import ignore_gone_client, respond_with_error
from dualpace.server.metrics import CONTENT_TYPE
from dualpace.server.protocol import Model, ModelList
from dualpace.server.serving import Service


def create_app(service: Service) -> FastAPI:
    """The application, to be run on the event loop that the service's frontend lives on. While the
    service has none it answers too: that it is loading."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="DualPace",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,
        redirect_slashes=False,
    )
    for kind in (DualPaceError, HTTPException, Exception):
        app.add_exception_handler(kind, respond_with_error)
    app.add_exception_handler(ClientDisconnect, ignore_gone_client)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await create_completion(service, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await create_chat_completion(service, request)

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[_model(service, name) for name in service.model_names])

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Model:
        return _model(service, service.check_model(name))

    @app.get("/health")
    async def health() -> Response:
        if service.loading:
            return JSONResponse({"status": "loading", "given_up": []}, status_code=503)
        given_up = service.frontend.given_up
        return JSONResponse({"status": "degraded" if given_up else "ok", "given_up": given_up})

    @app.get("/ready")
    async def ready() -> Response:
        missing = ["model"] if service.loading else service.frontend.missing
        return JSONResponse(
            {"ready": not missing, "missing": missing}, status_code=503 if missing else 200
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    return app


def _model(service: Service, name: str) -> Model:
    return Model(
        id=name,
        created=service.started,
        max_model_len=service.frontend.limits.max_model_len,
    )
