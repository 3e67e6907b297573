"""Owns the Chrome JSON trace file: writes events to it and reads such a file back. Knows no analysis.

One process, one thread per lane. Times in the file are microseconds after the first event, as
floats that keep whole nanoseconds for 26 days (2**51 ns); the first moment is `originNs` of the file. Used phases: M
(names and order), X (spans), i (instants), C (counters), s t f with bp:"e" (flows) and b e with a
process-local id (asynchronous spans), which is what Perfetto and chrome://tracing both show.
"""

from __future__ import annotations

import gzip
import io
import os
import secrets
import zlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, assert_never

import msgspec

from thermocline.errors import ConfigError
from thermocline.traces.events import (
    AsyncSpanEvent,
    CounterEvent,
    Event,
    FlowEvent,
    FlowPhase,
    InstantEvent,
    SpanEvent,
)
from thermocline.traces.lanes import Lane, Name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

MAX_TRACE_BYTES: Final = 512 << 20
_PID: Final = 1
_PROCESS_NAME: Final = "thermocline"
_TID_BY_LANE: Final = {lane: tid for tid, lane in enumerate(Lane, start=1)}
_PH_BY_PHASE: Final[Mapping[FlowPhase, str]] = {"start": "s", "step": "t", "end": "f"}
_PHASE_BY_PH: Final[Mapping[str, FlowPhase]] = {ph: phase for phase, ph in _PH_BY_PHASE.items()}
# Measured on 200,000 spans: a quarter more bytes than level 9 in a tenth of its time (1 us a span).
_GZIP_LEVEL: Final = 3
_WRITE_BUFFER_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Trace:
    """What a trace file holds: its events in file order, and the metadata it was written with."""

    events: tuple[Event, ...]
    metadata: Mapping[str, str | int | float]


class _FileEvent(msgspec.Struct):
    """One entry of `traceEvents`; which fields matter depends on `ph`."""

    ph: str
    name: str = ""
    pid: int = 0
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] | None = None
    id: int | str = 0
    id2: dict[str, str] | None = None


class _File(msgspec.Struct):
    traceEvents: list[_FileEvent]  # noqa: N815 - the format's own spelling
    originNs: int = 0  # noqa: N815 - spelled like its neighbours
    otherData: dict[str, str | int | float] = {}  # noqa: N815 - msgspec copies the default


def write_chrome(
    path: str | os.PathLike[str],
    events: Sequence[Event],
    *,
    metadata: Mapping[str, str | int | float],
) -> None:
    """Write `events` to `path` as Chrome JSON, gzipped if the name ends in .gz.

    The file appears whole or not at all; one that was there before stays until then. Blocks for
    some microseconds per event. Raises ConfigError if the file can not be written.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        try:
            with partial.open("xb") as file:
                _write_all(file, _lines(events, metadata), compress=target.name.endswith(".gz"))
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"can not write the trace to {target}: {error.strerror or error}. Name a file in a folder "
            "that exists, that you may write to, and that has room"
        ) from error


def read_chrome(path: str | os.PathLike[str], *, max_bytes: int = MAX_TRACE_BYTES) -> Trace:
    """Return the events of a file that `write_chrome` wrote (gzipped or not, whatever its name).

    Raises ConfigError if it can not be read, holds more than `max_bytes` of JSON, or is not such a
    trace.
    """
    source = Path(path)
    try:
        parsed = msgspec.json.decode(_read_bytes(source, max_bytes), type=_File)
        events = tuple(_parse(parsed))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, _MalformedError) as error:
        raise ConfigError(
            f"{source} is not a trace that thermocline wrote: {error}. Name a file made with --trace"
        ) from error
    return Trace(events=events, metadata=parsed.otherData)


class _MalformedError(Exception):
    """The JSON is well formed, but its events are not ours."""


def _write_all(file: IO[bytes], lines: Iterator[bytes], *, compress: bool) -> None:
    """Write `lines` to `file`; neither time nor name goes into the gzip header, so bytes repeat."""
    if not compress:
        file.writelines(lines)
        return
    with (
        gzip.GzipFile(
            filename="", mode="wb", compresslevel=_GZIP_LEVEL, fileobj=file, mtime=0
        ) as packed,
        io.BufferedWriter(packed, _WRITE_BUFFER_BYTES) as buffered,
    ):
        buffered.writelines(lines)


def _lines(events: Sequence[Event], metadata: Mapping[str, str | int | float]) -> Iterator[bytes]:
    """Yield the file line by line: the head, one line per trace event, the tail."""
    encode = msgspec.json.Encoder().encode
    origin_ns = min((_start_ns(event) for event in events), default=0)
    head = {"displayTimeUnit": "ns", "originNs": origin_ns, "otherData": dict(metadata)}
    yield encode(head)[:-1] + b',"traceEvents":[\n'
    separator = b""
    for record in _records(events, origin_ns):
        yield separator + encode(record)
        separator = b",\n"
    yield b"\n]}\n"


def _records(events: Sequence[Event], origin_ns: int) -> Iterator[dict[str, object]]:
    """Yield each trace event of the file as the object that is written."""
    yield from _name_records(events)
    for event in events:
        yield from _event_records(event, origin_ns)


def _name_records(events: Iterable[Event]) -> Iterator[dict[str, object]]:
    """Yield the names of the process and of the lanes that `events` use, in the order of `Lane`."""
    yield {"ph": "M", "name": "process_name", "pid": _PID, "args": {"name": _PROCESS_NAME}}
    used = {_lane(event) for event in events}
    for lane, tid in _TID_BY_LANE.items():
        if lane in used:
            thread = {"ph": "M", "pid": _PID, "tid": tid}
            yield {**thread, "name": "thread_name", "args": {"name": lane}}
            yield {**thread, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _event_records(event: Event, origin_ns: int) -> Iterator[dict[str, object]]:
    """Yield the one or two objects that `event` becomes."""
    record: dict[str, object] = {"ph": "", "name": "", "pid": _PID}
    record["ts"] = (_start_ns(event) - origin_ns) / 1000
    lane = _lane(event)
    if lane is not None:
        record["tid"] = _TID_BY_LANE[lane]
    match event:
        case SpanEvent():
            duration_us = (event.end_ns - event.start_ns) / 1000
            yield record | {"ph": "X", "name": event.name, "dur": duration_us} | _args(event)
        case InstantEvent():
            yield record | {"ph": "i", "name": event.name, "s": "t"} | _args(event)
        case CounterEvent():
            yield record | {"ph": "C", "name": event.track, "args": {"value": event.value}}
        case FlowEvent():
            flow = {"name": Name.CHUNK, "cat": "flow", "id": event.flow_id, "bp": "e"}
            yield record | {"ph": _PH_BY_PHASE[event.phase]} | flow
        case AsyncSpanEvent():
            # The id is local to the process: with a plain id Perfetto files the span under a global
            # track, away from the lanes.
            span = {"name": event.name, "cat": "async", "id2": {"local": f"{event.span_id:#x}"}}
            yield record | {"ph": "b"} | span | _args(event)
            yield record | {"ph": "e", "ts": (event.end_ns - origin_ns) / 1000} | span
        case _:
            assert_never(event)


def _args(event: SpanEvent | InstantEvent | AsyncSpanEvent) -> dict[str, object]:
    return {"args": dict(event.args)} if event.args else {}


def _lane(event: Event) -> Lane | None:
    """Return the lane whose thread shows `event`; counters have tracks of their own."""
    match event:
        case CounterEvent():
            return None
        case AsyncSpanEvent():
            return Lane.REQUESTS
        case _:
            return event.lane


def _start_ns(event: Event) -> int:
    return event.start_ns if isinstance(event, SpanEvent | AsyncSpanEvent) else event.at_ns


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
    lanes = _lanes_by_tid(file.traceEvents)
    open_spans: defaultdict[tuple[str, str], list[_FileEvent]] = defaultdict(list)
    for raw in file.traceEvents:
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
                yield _event(raw, lanes, file.originNs)
    for (name, _), begins in open_spans.items():
        if begins:
            raise _MalformedError(f"an asynchronous {name!r} begins but never ends")


def _lanes_by_tid(raws: list[_FileEvent]) -> dict[int, Lane]:
    """Return the lane of each thread from the thread names."""
    lanes: dict[int, Lane] = {}
    for raw in raws:
        if raw.ph == "M" and raw.name == "thread_name":
            try:
                lanes[raw.tid] = Lane(str((raw.args or {}).get("name")))
            except ValueError as error:
                raise _MalformedError(f"thread {raw.tid} is no lane: {error}") from error
    return lanes


def _event(raw: _FileEvent, lanes: Mapping[int, Lane], origin_ns: int) -> Event:
    """Return the event of an X, i, C, s, t or f entry."""
    at_ns = _at_ns(raw, origin_ns)
    if raw.ph == "C":
        value = (raw.args or {}).get("value")
        if not isinstance(value, int | float):
            raise _MalformedError(f"counter {raw.name!r} has the value {value!r}")
        return CounterEvent(track=raw.name, value=value, at_ns=at_ns)
    if raw.tid not in lanes:
        raise _MalformedError(f"{raw.ph} {raw.name!r} is on thread {raw.tid}, which has no name")
    lane = lanes[raw.tid]
    if raw.ph in _PHASE_BY_PH:
        if not isinstance(raw.id, int):
            raise _MalformedError(f"a flow has the id {raw.id!r}, not a number")
        return FlowEvent(raw.id, lane, at_ns, _PHASE_BY_PH[raw.ph])
    if raw.ph == "i":
        return InstantEvent(lane, _name(raw), at_ns, raw.args)
    if raw.ph != "X":
        raise _MalformedError(f"phase {raw.ph!r} is not one that is written here")
    if raw.dur < 0:
        raise _MalformedError(f"span {raw.name!r} lasts {raw.dur} us")
    return SpanEvent(lane, _name(raw), at_ns, at_ns + round(raw.dur * 1000), raw.args)


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
