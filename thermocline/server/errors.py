"""From exceptions to HTTP: one table of status and type, and OpenAI's error body. Knows no route."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiohttp import web

from thermocline.errors import (
    BusyError,
    ConfigError,
    EngineClosedError,
    ModelError,
    PromptTooLongError,
    RequestError,
    ThermoclineError,
)

_LOG: Final = logging.getLogger("thermocline.server")

# Long enough for a few tokens of the requests ahead, short enough not to leave places empty.
_RETRY_AFTER_S: Final = "2"


class LoadingError(ThermoclineError):
    """The model is still being opened; try again soon."""


class ModelNotFoundError(RequestError):
    """The request names a model that is not served here."""


class NotSupportedError(RequestError):
    """A known field of the interface that this version can not serve."""


class MediaTypeError(RequestError):
    """The body is not declared as JSON."""


class BodyTimeoutError(RequestError):
    """The body did not arrive in time."""


class TraceStateError(RequestError):
    """The recording is not in a state for this."""


class NoTraceError(RequestError):
    """There is no timeline to show."""


class HostRefusedError(RequestError):
    """The request was meant for another host."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """How one kind of error looks from outside."""

    status: int
    type: str
    code: str | int | None = None
    retry_after_s: str | None = None


# The first row that fits decides, so subclasses come before their bases.
_TABLE: Final[tuple[tuple[type[BaseException], _Answer], ...]] = (
    (LoadingError, _Answer(503, "unavailable_error", 503, _RETRY_AFTER_S)),
    (ModelNotFoundError, _Answer(404, "not_found_error", "model_not_found")),
    (NotSupportedError, _Answer(501, "not_supported_error", "not_supported")),
    (MediaTypeError, _Answer(415, "invalid_request_error", "unsupported_media_type")),
    (BodyTimeoutError, _Answer(408, "timeout")),
    (TraceStateError, _Answer(409, "invalid_request_error", "trace_state")),
    (NoTraceError, _Answer(404, "not_found_error", "no_trace")),
    (HostRefusedError, _Answer(403, "invalid_request_error", "host_not_allowed")),
    (PromptTooLongError, _Answer(400, "invalid_request_error", "context_length_exceeded")),
    (RequestError, _Answer(400, "invalid_request_error")),
    (ConfigError, _Answer(400, "invalid_request_error")),
    (BusyError, _Answer(429, "rate_limit_error", "queue_full", _RETRY_AFTER_S)),
    (EngineClosedError, _Answer(503, "unavailable_error")),
    (ModelError, _Answer(503, "unavailable_error")),
    (MemoryError, _Answer(503, "unavailable_error")),
    (web.HTTPNotFound, _Answer(404, "not_found_error")),
    (web.HTTPMethodNotAllowed, _Answer(405, "invalid_request_error")),
    (web.HTTPRequestEntityTooLarge, _Answer(413, "invalid_request_error")),
    (web.RequestPayloadError, _Answer(400, "invalid_request_error")),
    (web.HTTPClientError, _Answer(400, "invalid_request_error")),
)
_OTHER: Final = _Answer(500, "server_error")


def error_body(error: BaseException) -> dict[str, Any]:
    """Return OpenAI's error object for `error`; an unexpected one is logged and tells nothing."""
    answer = _look_up(error)
    fields: dict[str, Any] = {
        "message": _message(error),
        "type": answer.type,
        "param": error.param if isinstance(error, RequestError) else None,
        "code": answer.code,
    }
    if isinstance(error, PromptTooLongError):
        fields["n_prompt_tokens"] = error.num_prompt_tokens
        fields["n_ctx"] = error.max_context_tokens
    return {"error": fields}


def error_response(error: BaseException) -> web.Response:
    """Return the whole answer to a request that failed with `error`."""
    answer = _look_up(error)
    response = web.Response(
        status=answer.status,
        body=msgspec.json.encode(error_body(error)),
        content_type="application/json",
    )
    if answer.retry_after_s is not None:
        response.headers["Retry-After"] = answer.retry_after_s
    if isinstance(error, web.HTTPMethodNotAllowed):
        response.headers["Allow"] = error.headers["Allow"]
    return response


def _look_up(error: BaseException) -> _Answer:
    return next((answer for kind, answer in _TABLE if isinstance(error, kind)), _OTHER)


def _message(error: BaseException) -> str:
    match error:
        case ThermoclineError():
            return str(error)
        case web.HTTPNotFound():
            return "there is nothing at this path: the interface is under /v1"
        case web.HTTPMethodNotAllowed():
            return f"this path does not take {error.method}: use {error.headers['Allow']}"
        case web.HTTPRequestEntityTooLarge():
            return "the body is too large: send less text"
        case web.RequestPayloadError():
            return "the body breaks HTTP's framing: send it again"
        case web.HTTPException():
            return error.reason
        case MemoryError():
            return (
                "the memory is not enough for this request: send a shorter one, or try again later"
            )
        case _:
            _LOG.error("a request failed by a bug", exc_info=error)
            return "the server failed at this request; its log says why"
