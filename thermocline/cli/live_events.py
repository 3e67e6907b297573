"""A server's live feed as typed events, over plain HTTP from the standard library. Knows no screen."""

from __future__ import annotations

import http.client
from contextlib import closing
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import urlsplit

import msgspec

from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Events come several times a second; a server that is silent for so long is away.
_TIMEOUT_S: Final = 10.0
_MAX_LINE_BYTES: Final = 1 << 20


class Tokens(msgspec.Struct, frozen=True):
    """Tokens since the server's start, and per second; None before there are two readings."""

    prompt_total: int
    output_total: int
    prompt_per_second: float | None
    output_per_second: float | None


class LaneShare(msgspec.Struct, frozen=True):
    """How busy a lane was in the last second, 0 to 1. work: whether it computes or moves bytes."""

    lane: str
    busy: float | None
    work: bool


class Queue(msgspec.Struct, frozen=True):
    """Requests by state."""

    running: int
    waiting: int
    decoding: int


class RequestProgress(msgspec.Struct, frozen=True):
    """One request, in tokens."""

    id: int
    state: str
    prompt_tokens: int
    prompt_computed: int
    output_tokens: int


class CacheBlocks(msgspec.Struct, frozen=True):
    """Blocks of the key-value cache."""

    blocks: int
    cached: int
    held: int
    prefix_hit_share: float | None


class Drafts(msgspec.Struct, frozen=True):
    """Drafted tokens that were verified, and were right; why the latest was not verified."""

    drafted: int
    accepted: int
    why_off: str | None


class ExpertReads(msgspec.Struct, frozen=True):
    """Whether experts were in memory when they were needed. resident: all of them are now, by a sample of pages."""

    needless: int
    hit_share: float | None
    read_bytes: int
    resident: bool = False


class Worker(msgspec.Struct, frozen=True):
    """A process that computes experts, and the speed of its link; 0 while that is unknown."""

    state: str
    link_bytes_per_second: int


class Experts(msgspec.Struct, frozen=True):
    """Hot and cold experts, and the hot ones' share of the choices."""

    hot: int
    cold: int
    hot_share: float
    memory: ExpertReads | None
    workers: tuple[Worker, ...] = ()


class MemoryUse(msgspec.Struct, frozen=True):
    """Bytes."""

    process_bytes: int
    available_bytes: int


class ServerLoad(msgspec.Struct, frozen=True):
    """The present step of opening the model."""

    step: str | None
    done: int
    total: int
    seconds: float


class _Event(msgspec.Struct, frozen=True, tag_field="state"):
    """The fields of every event."""

    model: str
    memory: MemoryUse


class LoadingEvent(_Event, frozen=True, tag="loading"):
    """The model is being opened."""

    load: ServerLoad


class ReadyEvent(_Event, frozen=True, tag="ready"):
    """The model answers."""

    tokens: Tokens
    lanes: tuple[LaneShare, ...]
    queue: Queue
    requests: tuple[RequestProgress, ...]
    kv: CacheBlocks
    drafts: Drafts
    experts: Experts
    tracing: bool


class IdleEvent(_Event, frozen=True, tag="idle"):
    """No model is in memory; `error` says what loads one."""

    error: str


class StoppedEvent(_Event, frozen=True, tag="stopped"):
    """The engine has ended."""

    error: str


class FailedEvent(_Event, frozen=True, tag="failed"):
    """The model could not be opened."""

    error: str


LiveEvent: TypeAlias = IdleEvent | LoadingEvent | ReadyEvent | StoppedEvent | FailedEvent


class ServerAwayError(Exception):
    """The server can not be reached, or has gone; it may come back."""


def read_events(url: str, api_key: str | None) -> Iterator[LiveEvent]:
    """Yield the events of the server at `url` until it ends the stream.

    Raises ServerAwayError when it does not answer (any more), ConfigError when it will not: a wrong
    address or key, or something that is no thermocline server.
    """
    with closing(_connect(url)) as connection:
        headers = {"Accept": "text/event-stream"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        try:
            connection.request("GET", f"{urlsplit(url).path.rstrip('/')}/events", headers=headers)
            with connection.getresponse() as response:
                _check(response, url)
                while line := response.readline(_MAX_LINE_BYTES):
                    if line.startswith(b"data: "):
                        yield msgspec.json.decode(line[len(b"data: ") :], type=LiveEvent)
        except (OSError, http.client.HTTPException) as error:
            raise ServerAwayError(str(error) or type(error).__name__) from error
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"what answers at {url} is no thermocline server of this version ({error}): check --url"
            ) from error


def _connect(url: str) -> http.client.HTTPConnection:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"--url is {url!r} ({error}): give http://HOST:PORT") from error
    if host is None or parts.scheme not in ("http", "https"):
        raise ConfigError(f"--url is {url!r}: give http://HOST:PORT")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(host, port, timeout=_TIMEOUT_S)


def _check(response: http.client.HTTPResponse, url: str) -> None:
    """Raise unless the response is a stream of events."""
    if response.status in (401, 403):
        raise ConfigError(
            f"{url} refused with {response.status}: give its key with --api-key or THERMOCLINE_API_KEY, "
            "and the address as it prints it"
        )
    if response.status in (502, 503, 504):
        raise ServerAwayError(f"it answered {response.status}")
    if response.status != 200 or response.headers.get_content_type() != "text/event-stream":
        raise ConfigError(f"what answers at {url} is no thermocline server: check --url")
