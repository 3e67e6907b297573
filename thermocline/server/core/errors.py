"""Maps exceptions to HTTP: one table of status and type, and OpenAI's error body. Knows no route.

Other interfaces make their bodies from `describe` and `message_of`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from thermocline.errors import (
    BusyError,
    ConfigError,
    DeviceFaultError,
    EngineClosedError,
    HubError,
    HubUnreachableError,
    ModelChangedError,
    ModelError,
    PromptTooLongError,
    ReaderTooSlowError,
    RequestError,
    ThermoclineError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_LOG: Final = logging.getLogger("thermocline.server")

# Running requests generate some tokens meanwhile, and free places do not stay empty for long.
_RETRY_AFTER_S: Final = "2"


class LoadingError(ThermoclineError):
    """The model is still being opened; try again soon.

    step: the present step of opening, the number num_done of num_steps, counted from 0.
    """

    def __init__(self, step: str = "", num_done: int = 0, num_steps: int = 0) -> None:
        self.progress = {"step": step, "num_done": num_done, "num_steps": num_steps}
        super().__init__("Loading model")


class NotLoadedError(ThermoclineError):
    """The model is not in memory: there is no room for it now, or it could not be opened."""


class NoModelLoadedError(NotLoadedError):
    """No model is in memory; a request that names one loads it."""


class NotAllowedError(RequestError):
    """What the server was not started for."""


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


class OriginRefusedError(RequestError):
    """A web page of another origin sent the request."""


class KeyRefusedError(RequestError):
    """The request has no API key, or a wrong one."""


class HeaderTooLargeError(RequestError):
    """A line of the request's header is too long."""


class DrainingError(ThermoclineError):
    """The server is shutting down and takes no new work."""


class AnswerTimeoutError(ThermoclineError):
    """The answer took longer than --request-timeout."""


class QueueFullError(BusyError):
    """BusyError with the time after which the client should try again."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """Status, type and code of one kind of error."""

    status: int
    type: str
    code: str | int | None = None
    retry_after_s: str | None = None


# The first row that fits decides, so subclasses come before their bases.
_TABLE: Final[tuple[tuple[type[BaseException], ErrorAnswer], ...]] = (
    (LoadingError, ErrorAnswer(503, "unavailable_error", 503, _RETRY_AFTER_S)),
    (NotLoadedError, ErrorAnswer(503, "unavailable_error", "model_not_loaded", _RETRY_AFTER_S)),
    (DrainingError, ErrorAnswer(503, "unavailable_error", 503, _RETRY_AFTER_S)),
    (AnswerTimeoutError, ErrorAnswer(504, "timeout")),
    (ReaderTooSlowError, ErrorAnswer(408, "timeout", "reader_too_slow")),
    (ModelNotFoundError, ErrorAnswer(404, "not_found_error", "model_not_found")),
    (NotAllowedError, ErrorAnswer(403, "invalid_request_error", "not_allowed")),
    (NotSupportedError, ErrorAnswer(501, "not_supported_error", "not_supported")),
    (MediaTypeError, ErrorAnswer(415, "invalid_request_error", "unsupported_media_type")),
    (BodyTimeoutError, ErrorAnswer(408, "timeout")),
    (TraceStateError, ErrorAnswer(409, "invalid_request_error", "trace_state")),
    (NoTraceError, ErrorAnswer(404, "not_found_error", "no_trace")),
    (HostRefusedError, ErrorAnswer(403, "invalid_request_error", "host_not_allowed")),
    (OriginRefusedError, ErrorAnswer(403, "invalid_request_error", "origin_not_allowed")),
    (KeyRefusedError, ErrorAnswer(401, "authentication_error", "invalid_api_key")),
    (HeaderTooLargeError, ErrorAnswer(431, "invalid_request_error")),
    (PromptTooLongError, ErrorAnswer(400, "invalid_request_error", "context_length_exceeded")),
    (RequestError, ErrorAnswer(400, "invalid_request_error")),
    (ConfigError, ErrorAnswer(400, "invalid_request_error")),
    (BusyError, ErrorAnswer(429, "rate_limit_error", "queue_full", _RETRY_AFTER_S)),
    (EngineClosedError, ErrorAnswer(503, "unavailable_error")),
    (DeviceFaultError, ErrorAnswer(503, "unavailable_error")),
    (ModelChangedError, ErrorAnswer(503, "unavailable_error", "model_changed", _RETRY_AFTER_S)),
    (ModelError, ErrorAnswer(503, "unavailable_error")),
    (HubUnreachableError, ErrorAnswer(502, "unavailable_error", "hub_unreachable")),
    (HubError, ErrorAnswer(404, "not_found_error", "no_such_model")),
    (MemoryError, ErrorAnswer(503, "unavailable_error")),
    (web.HTTPNotFound, ErrorAnswer(404, "not_found_error")),
    (web.HTTPMethodNotAllowed, ErrorAnswer(405, "invalid_request_error")),
    (web.HTTPRequestEntityTooLarge, ErrorAnswer(413, "invalid_request_error")),
    (web.RequestPayloadError, ErrorAnswer(400, "invalid_request_error")),
    (web.HTTPClientError, ErrorAnswer(400, "invalid_request_error")),
)
_OTHER: Final = ErrorAnswer(500, "server_error")


def error_body(error: BaseException) -> dict[str, Any]:
    """Return OpenAI's error object for `error`; an unexpected one is logged, and its text is not sent."""
    answer = describe(error)
    fields: dict[str, Any] = {
        "message": message_of(error),
        "type": answer.type,
        "param": error.param if isinstance(error, RequestError) else None,
        "code": answer.code,
    }
    if isinstance(error, LoadingError):
        fields["progress"] = error.progress
    if isinstance(error, PromptTooLongError):
        fields["n_prompt_tokens"] = error.num_prompt_tokens
        fields["n_ctx"] = error.max_context_tokens
    return {"error": fields}


def error_response(
    error: BaseException, body: Callable[[BaseException], object] = error_body
) -> web.Response:
    """Return the response to a request that failed with `error`; body: returns the interface's error body."""
    answer = describe(error)
    response = web.Response(
        status=answer.status,
        body=msgspec.json.encode(body(error)),
        content_type="application/json",
    )
    if answer.retry_after_s is not None:
        response.headers["Retry-After"] = answer.retry_after_s
    if isinstance(error, web.HTTPMethodNotAllowed):
        response.headers["Allow"] = error.headers["Allow"]
    return response


def describe(error: BaseException) -> ErrorAnswer:
    """Return status, type and code of the answer to `error`."""
    answer = next((answer for kind, answer in _TABLE if isinstance(error, kind)), _OTHER)
    if isinstance(error, QueueFullError):
        return replace(answer, retry_after_s=str(error.retry_after_s))
    return answer


def message_of(error: BaseException) -> str:
    """Return the message for the client; an unexpected error is logged, and its text is not sent."""
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
