"""From exceptions to what an HTTP client reads: a status, and an error object of OpenAI's shape.

RequestError   400, naming the field          NotReadyError   503, worth a retry
HTTPException  its own status                 EngineError     500
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from dualpace.core.errors import EngineError, RequestError

CLIENT_GONE = 499  # nobody reads this status; nginx's number for it
_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
}


class NotReadyError(EngineError):
    """The engines do not answer yet, or no longer."""


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an error. What nobody foresaw shows no detail to the client."""
    message, param = str(error), None
    match error:
        case UnknownModelError():
            status, kind, code = 404, "invalid_request_error", "model_not_found"
            param = error.param
        case RequestError():
            status, kind, code = 400, "invalid_request_error", "invalid_value"
            param = error.param
        case NotReadyError():
            status, kind, code = 503, "service_unavailable", "not_ready"
        case EngineError():
            status, kind, code = 500, "server_error", "engine_error"
        case HTTPException():
            status, kind = error.status_code, "invalid_request_error"
            code, message = _CODES.get(status, "http_error"), str(error.detail)
        case _:
            status, kind, code = 500, "server_error", "internal_error"
            message = "internal error"
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def respond_with_error(request: Request, error: Exception) -> Response:
    """FastAPI exception handler for all of the above."""
    status, body = describe(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if status == 503:
        headers["Retry-After"] = "1"
    return JSONResponse(body, status_code=status, headers=headers)


async def ignore_gone_client(request: Request, error: Exception) -> Response:
    """FastAPI exception handler for a client that left while its request was being read."""
    return Response(status_code=CLIENT_GONE)


def error_event(error: Exception) -> bytes:
    """The error as the last server-sent event of a stream."""
    return f"data: {json.dumps(describe(error)[1])}\n\n".encode()
