"""What the child runs: it answers one request at a time, within limits that it can not lift.

Run by its path, never imported by the package: it needs the standard library and one more file, the program, so that
it starts fast and owns little. Its `PROGRAM` is a class, which is made with `max_chars`. Its method `answer(request)`
returns a text or raises, and `describe(error)` returns the kind and the message of what it raised.

Frames on stdin and stdout: 4 bytes length, big-endian, then JSON. {"op": "ping"} is answered here, all else by the
program. Answers: {"ok": true, "text"} or {"ok": false, "kind": "limit" or one of the program's, "message"}.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, BinaryIO, Protocol

MAX_MESSAGE = 2000
# The parent's own deadline is as much later. SIGALRM ends the child when a parent that is gone can not.
WAIT_PER_CPU_S = 10


class OutputTooLongError(Exception):
    """The text passed the limit."""


class Answering(Protocol):
    """What a program's `PROGRAM` makes."""

    def answer(self, request: dict[str, Any]) -> str:
        """Return the answer's text, or raise anything."""
        ...

    def describe(self, error: Exception) -> tuple[str, str]:
        """Return the kind and the message of what `answer` raised."""
        ...


def load(path: str, max_chars: int) -> Answering:
    """Make the program in the file `path`."""
    spec = spec_from_file_location("program", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["program"] = module
    spec.loader.exec_module(module)
    program: Answering = module.PROGRAM(max_chars)
    return program


def _answer(program: Answering, request: dict[str, Any], max_chars: int) -> dict[str, Any]:
    try:
        text = "" if request["op"] == "ping" else program.answer(request)
        if len(text) > max_chars:
            raise OutputTooLongError
    except MemoryError:
        kind, message = "limit", "it needs too much memory"
    except RecursionError:
        kind, message = "limit", "it nests too deeply"
    except OutputTooLongError:
        kind, message = "limit", "its output is too long"
    except Exception as error:  # noqa: BLE001 - whatever goes wrong must come back as an answer
        kind, message = program.describe(error)
    else:
        return {"ok": True, "text": text}
    return {"ok": False, "kind": kind, "message": message[:MAX_MESSAGE]}


def _read_frame(stream: BinaryIO) -> bytes:
    header = stream.read(4)
    return stream.read(int.from_bytes(header, "big")) if len(header) == 4 else b""


def _write_frame(answer: dict[str, Any]) -> None:
    raw = json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace")
    sys.stdout.buffer.write(len(raw).to_bytes(4, "big") + raw)
    sys.stdout.buffer.flush()


# Deep input overflows the stack here first: threads that do the same work later must have more (`DEEP_STACK_BYTES`).
_STACK_BYTES = 4 << 20


def _set_limits(memory_bytes: int) -> None:
    """Memory, stack and files; macOS may refuse the first, the deadlines still hold there."""
    for kind, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_STACK, _STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        try:
            resource.setrlimit(kind, (value, value))
        except (ValueError, OSError):
            continue


def serve(program: Answering, max_chars: int, deadline_s: float) -> None:
    """Answer requests until stdin ends. SIGPROF ends the process after `deadline_s` of processor time for one."""
    while raw := _read_frame(sys.stdin.buffer):
        signal.setitimer(signal.ITIMER_PROF, deadline_s)
        signal.setitimer(signal.ITIMER_REAL, WAIT_PER_CPU_S * deadline_s + 1.0)
        try:
            answer = _answer(program, json.loads(raw), max_chars)
        except MemoryError:  # of a request that does not fit
            answer = {"ok": False, "kind": "limit", "message": "it needs too much memory"}
        _write_frame(answer)
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    sys.path[:] = settings["sys_path"]
    os.chdir("/")
    _set_limits(settings["memory_bytes"])
    serve(
        load(settings["program"], settings["max_chars"]),
        settings["max_chars"],
        settings["deadline_s"],
    )
