"""A socket that carries frames: every wait has a deadline, and bodies are sent without a copy.

Owns the socket, unsent frames, and a received descriptor. Knows no frame's meaning.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final

from thermocline.errors import WireError, WorkerLateError, WorkerLostError
from thermocline.kernels.native import load_native
from thermocline.remote.wire import HEADER_BYTES, HEADER_PREFIX, Frame, FrameReader, frame_header

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thermocline.remote.wire import Kind

_MAX_BUFFERS: Final = 64  # of one call; the system takes 1024
_SMALL_BYTES: Final = 1024  # parts of less are put together: one buffer is sent faster than several
_FD_BYTES: Final = array.array("i").itemsize


# After a frame that came within this time, the next one is polled for instead of slept for: waking up takes as long as
# a small request. Where frames are further apart, polling would only take time from compute.
_SOON_S: Final = 50e-6
_SOON_NS: Final = round(_SOON_S * 1e9)


class FrameSocket:
    """Sends and receives frames over a connected stream socket, which it owns.

    Raises WorkerLostError when the peer has gone, WireError when what came breaks the format.
    takes_fd: accept one descriptor beside the bytes, until `take_fd`. comes_soon: poll for the first frame before
    sleeping.
    """

    def __init__(
        self,
        sock: socket.socket,
        expects: Mapping[Kind, int],
        *,
        takes_fd: bool = False,
        comes_soon: bool = False,
    ) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._reader = FrameReader(expects)
        self._unsent: deque[bytes | memoryview] = deque()
        self._takes_fd = takes_fd
        self._comes_soon = comes_soon
        self._receive_frame = load_native().receive_frame
        self._fd: int | None = None
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)
        self.total_sent_bytes = 0
        self.total_received_bytes = 0

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 after `close`."""
        return self._socket.fileno()

    @property
    def is_unix(self) -> bool:
        """Whether descriptors can be passed."""
        return self._socket.family == socket.AF_UNIX

    def expect(self, expects: Mapping[Kind, int]) -> None:
        """Change which kinds may come, and how long each may be."""
        self._reader.expect(expects)

    def queue(self, kind: Kind, request: int, *parts: bytes | memoryview) -> None:
        """Let a frame go out with the next `flush`; its memory must not change until it has gone."""
        length = sum(map(len, parts))
        header = frame_header(kind, request, length)
        if len(parts) == 1 and length <= _SMALL_BYTES:
            self._unsent.append(header + parts[0])
        elif length <= _SMALL_BYTES:
            self._unsent.append(b"".join((header, *parts)))
        else:
            self._unsent.append(header)
            self._unsent.extend(part for part in parts if len(part))

    def flush(self) -> bool:
        """Send what the socket takes now; return whether that was all."""
        unsent = self._unsent
        try:
            while unsent:
                if len(unsent) == 1:
                    sent = self._socket.send(unsent[0])
                    if sent == len(unsent[0]):
                        self.total_sent_bytes += sent
                        unsent.clear()
                        return True
                else:
                    sent = self._socket.sendmsg(list(islice(unsent, _MAX_BUFFERS)))
                self._mark_sent(sent)
        except BlockingIOError:
            return False
        except OSError as error:
            raise _lost(error) from error
        return True

    def flush_until(self, deadline_s: float) -> None:
        """Send everything, by time.monotonic() == deadline_s. Raises WorkerLateError."""
        while not self.flush():
            _wait(self._writable, deadline_s)

    def send_with_fd(self, fd: int, deadline_s: float) -> None:
        """Send everything, and the descriptor beside its first byte. Raises WorkerLateError."""
        first = self._unsent[0]
        try:
            self._mark_sent(socket.send_fds(self._socket, [first], [fd]))
        except OSError as error:
            raise _lost(error) from error
        self.flush_until(deadline_s)

    def receive(self, *, is_ready: bool = False) -> Frame | None:
        """Return the next frame, None while it is not complete. is_ready: there is something to read."""
        while (frame := self._reader.next_frame()) is None:
            # Looking first is cheaper than an exception.
            if not (is_ready or self._readable.poll(0)):
                return None
            is_ready = False
            self._receive_some()
        return frame

    def received(self) -> Frame | None:
        """Return a complete frame that was read along with another, None where there is none."""
        return self._reader.next_frame()

    def receive_soon(self, spin_ns: int, rest_s: float) -> Frame | None:
        """Return the next frame, None where none is complete by then.

        spin_ns: looked for without giving up the processor; rest_s: slept for after that.
        """
        frame = self.received()
        if frame is not None:
            return frame
        found = self._look(spin_ns)
        if found is None and rest_s > 0 and self._readable.poll(rest_s * 1e3):
            found = self._look(0)
        return found if isinstance(found, Frame) else self.received()

    def receive_until(self, deadline_s: float) -> Frame:
        """Return the next frame, complete by time.monotonic() == deadline_s. Raises WorkerLateError."""
        while (frame := self._reader.next_frame()) is None:
            start_s = time.perf_counter()
            found = self._look(_SOON_NS) if self._comes_soon else None
            if found is None:
                _wait(self._readable, deadline_s)
                found = self._look(0)
            self._comes_soon = time.perf_counter() < start_s + _SOON_S
            if isinstance(found, Frame):
                return found
        return frame

    def _look(self, spin_ns: int) -> Frame | int | None:
        """Receive what comes within so many nanoseconds without giving up the processor.

        Returns a frame that came by itself, or how many bytes the reader was given; None where nothing came.
        """
        reader = self._reader
        if self._takes_fd or not reader.is_between_frames:
            return self._receive_some() if self._readable.poll(spin_ns * 1e-6) else None
        found = self._receive_frame(
            self._socket.fileno(), reader.writable(), HEADER_PREFIX, spin_ns
        )
        if isinstance(found, tuple):
            number, request, body = found
            self.total_received_bytes += HEADER_BYTES + len(body)
            return reader.whole(number, request, body)
        num_bytes = int(found)
        if num_bytes == -errno.EAGAIN:
            return None
        if num_bytes < 0:
            raise _lost(OSError(-num_bytes, os.strerror(-num_bytes)))
        if not num_bytes:
            raise _ended()
        self._count(num_bytes)
        return num_bytes

    def _receive_some(self) -> int | None:
        target = self._reader.writable()
        try:
            num_bytes = (
                self._receive_with_fd(target) if self._takes_fd else self._socket.recv_into(target)
            )
        except BlockingIOError:
            return None
        except OSError as error:
            raise _lost(error) from error
        if not num_bytes:
            raise _ended()
        self._count(num_bytes)
        return num_bytes

    def _count(self, num_bytes: int) -> None:
        self.total_received_bytes += num_bytes
        self._reader.wrote(num_bytes)

    def take_fd(self) -> int | None:
        """Return the descriptor that came, if one did, and accept no other."""
        self._takes_fd = False
        fd, self._fd = self._fd, None
        return fd

    def close(self) -> None:
        """Close the socket and what came with it; more calls do nothing."""
        self._socket.close()
        self._unsent.clear()
        fd = self.take_fd()
        if fd is not None:
            os.close(fd)

    def _receive_with_fd(self, target: memoryview) -> int:
        num_bytes, ancillary, flags, _ = self._socket.recvmsg_into(
            [target], socket.CMSG_SPACE(_FD_BYTES), socket.MSG_CMSG_CLOEXEC
        )
        fds = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
        if self._fd is None and len(fds) == 1:
            self._fd = fds.pop()
        for fd in fds:
            os.close(fd)
        if fds or flags & socket.MSG_CTRUNC:
            raise WireError("more came along with a hello than one piece of shared memory")
        return num_bytes

    def _mark_sent(self, num_bytes: int) -> None:
        self.total_sent_bytes += num_bytes
        while self._unsent and num_bytes >= len(self._unsent[0]):
            num_bytes -= len(self._unsent.popleft())
        if num_bytes:
            self._unsent[0] = memoryview(self._unsent[0])[num_bytes:]


def _wait(poller: select.poll, deadline_s: float) -> None:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0 or not poller.poll(left_s * 1e3):
        raise WorkerLateError("the peer was not in time")


def _ended() -> WorkerLostError:
    return WorkerLostError("the peer has closed the connection, or its process ended")


def _lost(error: OSError) -> WorkerLostError:
    return WorkerLostError(f"the connection broke ({error.strerror or error})")
