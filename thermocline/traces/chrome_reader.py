"""Reads a trace file back: checks it, and makes typed events of it. Knows no analysis.

Reads what `chrome.write_chrome` writes, gzipped or not.
"""

from __future__ import annotations

import gzip
import zlib
from collections import defaultdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec

from thermocline.errors import ConfigError
from thermocline.traces.chrome import PH_BY_PHASE
from thermocline.traces.events import (
    AsyncSpanEvent,
    CounterEvent,
    Event,
    ExpertUse,
    FlowEvent,
    FlowPhase,
    InstantEvent,
    SpanEvent,
    Trace,
)
from thermocline.traces.lanes import Name, Track

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

MAX_TRACE_BYTES: Final = 512 << 20
# What a double keeps to the nanosecond; no trace lasts for months.
_MAX_US: Final = 2**53 / 1000
_Integer: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Value: TypeAlias = _Integer | float | str
_PHASE_BY_PH: Final[Mapping[str, FlowPhase]] = {ph: phase for phase, ph in PH_BY_PHASE.items()}


class _FileEvent(msgspec.Struct):
    """One entry of `traceEvents`; which fields matter depends on `ph`."""

    ph: str
    name: str = ""
    pid: int = 0
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, _Value] | None = None
    id: int | str = 0
    id2: dict[str, str] | None = None


class _File(msgspec.Struct):
    traceEvents: list[_FileEvent]  # noqa: N815 - the format's own spelling
    originNs: _Integer = 0  # noqa: N815 - spelled like its neighbours
    otherData: dict[str, Any] = {}  # noqa: N815 - msgspec copies the default


def read_chrome(path: str | os.PathLike[str], *, max_bytes: int = MAX_TRACE_BYTES) -> Trace:
    """Return the events of a file that `write_chrome` wrote (gzipped or not, whatever its name).

    Raises ConfigError if it can not be read, holds more than `max_bytes` of JSON, or is not such a
    trace.
    """
    source = Path(path)
    try:
        parsed = msgspec.json.decode(_read_bytes(source, max_bytes), type=_File)
        events = tuple(_parse(parsed))
        expert_use = _expert_use(parsed.otherData.pop("expertUse", None))
        metadata = msgspec.convert(parsed.otherData, dict[str, _Value])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, _MalformedError) as error:
        raise ConfigError(
            f"{source} is not a trace that thermocline wrote: {error}. Name a file made with --trace"
        ) from error
    return Trace(events, metadata, expert_use)


class _MalformedError(Exception):
    """The JSON is well formed, but its events are not ours."""


def _read_bytes(source: Path, max_bytes: int) -> bytes:
    """Return the file's JSON, unpacked, or raise ConfigError."""
    try:
        with source.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            stream: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=file) if is_packed else file
            content = stream.read(max_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(
            f"can not read the trace {source}: {error}. Name a complete file made with --trace"
        ) from error
    if len(content) > max_bytes:
        raise ConfigError(
            f"the trace {source} holds more than {max_bytes} bytes of JSON: record a shorter run"
        )
    return content


def _parse(file: _File) -> Iterator[Event]:
    """Yield the events of a parsed file; an asynchronous span comes where it ends."""
    tracks = _tracks_by_tid(file.traceEvents)
    open_spans: defaultdict[tuple[str, str], list[_FileEvent]] = defaultdict(list)
    for raw in file.traceEvents:
        if max(abs(raw.ts), abs(raw.dur)) > _MAX_US:
            raise _MalformedError(f"{raw.ph} {raw.name!r} lies months away from the start")
        match raw.ph:
            case "M":
                continue
            case "b":
                open_spans[_async_key(raw)].append(raw)
            case "e":
                begins = open_spans[_async_key(raw)]
                if not begins:
                    raise _MalformedError(f"an asynchronous {raw.name!r} ends but never began")
                yield _async_span(begins.pop(), raw, file.originNs)
            case _:
                yield _event(raw, tracks, file.originNs)
    for (name, _), begins in open_spans.items():
        if begins:
            raise _MalformedError(f"an asynchronous {name!r} begins but never ends")


def _expert_use(raw: object) -> ExpertUse | None:
    """Return the checked tables of expert use, None where the file has none."""
    if raw is None:
        return None
    use = msgspec.convert(raw, ExpertUse)
    num_experts = {len(row) for row in use.counts}
    limit = max(num_experts, default=0)
    if len(num_experts) > 1 or len(use.hot) != len(use.counts):
        raise _MalformedError("the tables of expert use do not fit each other")
    if not all(0 <= expert < limit for row in use.hot for expert in row):
        raise _MalformedError("a hot expert is not in the table of expert use")
    return use


def _tracks_by_tid(raws: list[_FileEvent]) -> dict[int, Track]:
    """Return the track of each thread from the thread names."""
    tracks: dict[int, Track] = {}
    for raw in raws:
        if raw.ph == "M" and raw.name == "thread_name":
            try:
                tracks[raw.tid] = Track.from_label(str((raw.args or {}).get("name")))
            except ValueError as error:
                raise _MalformedError(f"thread {raw.tid} is no lane: {error}") from error
    return tracks


def _event(raw: _FileEvent, tracks: Mapping[int, Track], origin_ns: int) -> Event:
    """Return the event of an X, i, C, s, t or f entry."""
    at_ns = _at_ns(raw, origin_ns)
    if raw.ph == "C":
        value = (raw.args or {}).get("value")
        if not isinstance(value, int | float):
            raise _MalformedError(f"counter {raw.name!r} has the value {value!r}")
        return CounterEvent(track=raw.name, value=value, at_ns=at_ns)
    if raw.tid not in tracks:
        raise _MalformedError(f"{raw.ph} {raw.name!r} is on thread {raw.tid}, which has no name")
    track = tracks[raw.tid]
    if raw.ph in _PHASE_BY_PH:
        if not isinstance(raw.id, int):
            raise _MalformedError(f"a flow has the id {raw.id!r}, not a number")
        return FlowEvent(raw.id, track.lane, at_ns, _PHASE_BY_PH[raw.ph], track.number)
    if raw.ph == "i":
        return InstantEvent(track.lane, _name(raw), at_ns, raw.args)
    if raw.ph != "X":
        raise _MalformedError(f"phase {raw.ph!r} is not one that is written here")
    if raw.dur < 0:
        raise _MalformedError(f"span {raw.name!r} lasts {raw.dur} us")
    end_ns = at_ns + round(raw.dur * 1000)
    return SpanEvent(track.lane, _name(raw), at_ns, end_ns, raw.args, track.number)


def _async_span(begin: _FileEvent, end: _FileEvent, origin_ns: int) -> AsyncSpanEvent:
    start_ns, end_ns = _at_ns(begin, origin_ns), _at_ns(end, origin_ns)
    if end_ns < start_ns:
        raise _MalformedError(f"an asynchronous {begin.name!r} ends before it begins")
    span_id = int(_async_key(begin)[1], 16)
    return AsyncSpanEvent(_name(begin), span_id, start_ns, end_ns, begin.args)


def _async_key(raw: _FileEvent) -> tuple[str, str]:
    """Return what pairs a begin with its end: the name and the process-local id."""
    local = (raw.id2 or {}).get("local", "")
    try:
        int(local, 16)
    except ValueError as error:
        raise _MalformedError(f"an asynchronous {raw.name!r} has no local id") from error
    return raw.name, local


def _name(raw: _FileEvent) -> Name:
    try:
        return Name(raw.name)
    except ValueError as error:
        raise _MalformedError(f"{raw.name!r} is not a name of this version") from error


def _at_ns(raw: _FileEvent, origin_ns: int) -> int:
    return origin_ns + round(raw.ts * 1000)
