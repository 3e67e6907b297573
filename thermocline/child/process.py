"""A child process that answers one request at a time, and is killed when it is late.

Owns the process, its pipes and the deadline. It knows nothing of what the frames mean.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

_MAIN = Path(__file__).with_name("main.py")
_HEADER_BYTES = 4
_START_S = 20.0  # starting takes 0.1 s; a loaded machine may need far longer
_WAIT_PER_CPU_S = 10  # a loaded machine may give the child a tenth of a processor
_PING = b'{"op": "ping"}'


class ChildError(Exception):
    """The child was late, ended, or answered nonsense; it is gone now. The text says which."""


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """What one request may use.

    `deadline_s` is processor time, `memory_bytes` the child's address space, `max_chars` the length of the
    answer's text, `max_request_bytes` the size of one request.
    """

    deadline_s: float = 2.0
    memory_bytes: int = 256 << 20
    max_chars: int = 8 << 20
    max_request_bytes: int = 8 << 20

    @property
    def max_answer_bytes(self) -> int:
        """An answer frame's limit: four bytes, or an escape of six, for every character."""
        return 6 * self.max_chars + 4096


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill and reap; nothing of the child is left."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


class ChildProcess:
    """Runs a program (see `main.py`); starts it when needed. Not thread-safe: the caller locks."""

    def __init__(self, program: Path, limits: ChildLimits) -> None:
        """program: a file that is run by its path, and imports nothing of this package."""
        self._program = program
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., ChildProcess] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child, None while there is none."""
        return None if self._process is None else self._process.pid

    def _start(self) -> None:
        """Start a child. It ends with us: at the end of its stdin, or by its own alarm."""
        settings = {
            "program": str(self._program),
            "sys_path": [entry for entry in sys.path if entry],
            "memory_bytes": self._limits.memory_bytes,
            "max_chars": self._limits.max_chars,
            "deadline_s": self._limits.deadline_s,
        }
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(_MAIN), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)

    def exchange(self, request: bytes) -> bytes:
        """Send one request and return the answer. Raises ChildError; then the child is gone."""
        try:
            if self._process is None:
                self._start()
                self._exchange(_PING, _START_S)
            return self._exchange(request, _WAIT_PER_CPU_S * self._limits.deadline_s)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill the child, if there is one, and leave no zombie."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _exchange(self, request: bytes, deadline_s: float) -> bytes:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin.fileno(), process.stdout.fileno()
        unsent = memoryview(len(request).to_bytes(_HEADER_BYTES, "big") + request)
        answer = bytearray()
        end = time.monotonic() + deadline_s
        with selectors.DefaultSelector() as ready:
            ready.register(stdin, selectors.EVENT_WRITE)
            ready.register(stdout, selectors.EVENT_READ)
            while not self._is_whole(answer):
                left = end - time.monotonic()
                if left <= 0:
                    raise ChildError(f"it took longer than {deadline_s:g} s")
                for key, _ in ready.select(left):
                    if key.fd == stdout:
                        answer += self._read(process)
                        continue
                    unsent = unsent[self._write(process, unsent) :]
                    if not unsent:
                        ready.unregister(stdin)
        return bytes(answer[_HEADER_BYTES:])

    def _is_whole(self, answer: bytearray) -> bool:
        if len(answer) < _HEADER_BYTES:
            return False
        length = int.from_bytes(answer[:_HEADER_BYTES], "big")
        if length > self._limits.max_answer_bytes:
            raise ChildError("its output is too long")
        return len(answer) >= _HEADER_BYTES + length

    def _read(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        chunk = os.read(process.stdout.fileno(), 1 << 20)
        if not chunk:
            raise self._ended(process)
        return chunk

    def _write(self, process: subprocess.Popen[bytes], data: memoryview) -> int:
        assert process.stdin is not None
        try:
            return os.write(process.stdin.fileno(), data)
        except BlockingIOError:
            return 0
        except BrokenPipeError as error:
            raise self._ended(process) from error

    def _ended(self, process: subprocess.Popen[bytes]) -> ChildError:
        """Return why the child ended by itself; it is reaped."""
        process.kill()
        if process.wait() == -signal.SIGPROF:
            return ChildError(f"it took longer than {self._limits.deadline_s:g} s")
        return ChildError("its process ended, most likely out of memory")
