"""The worker's side: accepts connections, one thread each, and answers requests in order.

Owns listener and connections. Ends with its parent if one started it. Knows experts only by `HeldModel`.
"""

from __future__ import annotations

import ctypes
import hmac
import os
import secrets
import signal
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from thermocline.errors import (
    ConfigError,
    RemoteError,
    WireError,
    WorkerFailedError,
    WorkerRefusedError,
)
from thermocline.remote.address import TcpAddress, UnixAddress
from thermocline.remote.frame_socket import FrameSocket
from thermocline.remote.handshake import (
    NO_PROOF,
    NONCE_BYTES,
    WORKER_FIRST,
    Challenge,
    Welcome,
    client_proof,
    decode_hello,
    encode_challenge,
    encode_welcome,
    split_hello,
    worker_proof,
)
from thermocline.remote.requests import (
    HEAD_BYTES,
    INLINE,
    decode_request_head,
    outputs_head,
    read_request,
    write_values,
)
from thermocline.remote.shared_slots import SharedSlots
from thermocline.remote.wire import Kind, encode_text

if TYPE_CHECKING:
    from thermocline.remote.handshake import Hello
    from thermocline.remote.holdings import Held, HeldModel
    from thermocline.remote.requests import RequestHead
    from thermocline.remote.wire import Frame

HANDSHAKE_S: Final = 10.0
IDLE_S: Final = 60.0
"""A connection that is silent for so long is closed; clients ping more often."""

_CREDITS: Final = 4
_MAX_CONNECTIONS: Final = 16
_SMALL_PAIRS: Final = 16
_SEND_S: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1


class _Session:
    """One connection, from the first challenge to its end. Closes it."""

    def __init__(self, sock: socket.socket, model: HeldModel, secret: bytes | None) -> None:
        self._frames = FrameSocket(sock, WORKER_FIRST, takes_fd=sock.family == socket.AF_UNIX)
        self._model = model
        self._secret = secret
        self._slots: SharedSlots | None = None
        self._waiting: deque[tuple[int, RequestHead, memoryview]] = deque()

    def run(self) -> None:
        """Serve until the client disconnects or breaks the protocol."""
        try:
            hello, held = self._shake_hands()
            try:
                self._serve(hello, held)
            finally:
                self._model.release(held)
        except (WireError, WorkerRefusedError) as error:
            with suppress(RemoteError):
                self._send(Kind.REFUSED, 0, encode_text(str(error)))
        except RemoteError:
            return  # disconnected, or too slow
        finally:
            self._frames.close()
            if self._slots is not None:
                self._slots.close()

    def _shake_hands(self) -> tuple[Hello, Held]:
        end_s = time.monotonic() + HANDSHAKE_S
        nonce = secrets.token_bytes(NONCE_BYTES)
        challenge = Challenge(nonce, self._secret is not None)
        self._send(Kind.CHALLENGE, 0, encode_challenge(challenge))
        frame = self._frames.receive_until(end_s)
        fd = self._frames.take_fd()
        try:
            hello, own_proof = self._check(frame.body, nonce)
            if (fd is not None) != bool(hello.num_slots):
                raise WireError("shared memory was announced and did not come, or the other way")
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise
        credits = _CREDITS
        if fd is not None:
            self._slots = SharedSlots.attach(fd, hello.num_slots, hello.slot_bytes)
            credits = min(credits, hello.num_slots)
        kinds = hello.shape.worker_kinds(is_shared=fd is not None)
        self._frames.expect(kinds)
        held = self._model.hold(hello)
        kernels = self._model.describe_kernels(held)
        welcome = Welcome(own_proof, credits, held.num_experts, held.nbytes, kernels)
        try:
            self._send(Kind.WELCOME, 0, encode_welcome(welcome))
        except BaseException:
            self._model.release(held)
            raise
        return hello, held

    def _check(self, body: memoryview, nonce: bytes) -> tuple[Hello, bytes]:
        """Return the hello of a client that knows the secret, and the worker's own proof."""
        proof, signed = split_hello(body)
        if self._secret is None:
            return decode_hello(signed), NO_PROOF
        if not hmac.compare_digest(proof, client_proof(self._secret, nonce, signed)):
            raise WorkerRefusedError("the secret is another: give both sides the same one")
        hello = decode_hello(signed)
        return hello, worker_proof(self._secret, hello.nonce, nonce)

    def _serve(self, hello: Hello, held: Held) -> None:
        while True:
            frame = (
                self._frames.receive()
                if self._waiting
                else self._frames.receive_until(time.monotonic() + IDLE_S)
            )
            if frame is not None and not self._take(frame, hello):
                continue
            request, head, body = self._waiting.popleft()
            self._answer(request, head, body, hello, held)

    def _take(self, frame: Frame, hello: Hello) -> bool:
        """Queue or cancel a request; return whether one is so small that it is answered before looking for more."""
        match frame.kind:
            case Kind.COMPUTE:
                if len(self._waiting) >= _CREDITS:
                    raise WireError("more requests came than there are credits")
                head = decode_request_head(frame.body, hello.shape, len(hello.held))
                self._waiting.append((frame.request, head, frame.body[HEAD_BYTES:]))
                return len(self._waiting) == 1 and head.num_pairs <= _SMALL_PAIRS
            case Kind.CANCEL:
                known = [entry for entry in self._waiting if entry[0] == frame.request]
                for entry in known:  # a request that is being computed is answered
                    self._waiting.remove(entry)
                    self._send(Kind.FAILED, frame.request, encode_text("cancelled"))
            case _:
                self._send(Kind.PONG, frame.request)
        return False

    def _answer(
        self, number: int, head: RequestHead, body: memoryview, hello: Hello, held: Held
    ) -> None:
        shape = hello.shape
        memory = body if self._slots is None else self._slots.read(head.slot, number)
        if self._slots is None and head.slot != INLINE:
            raise WireError("a request is in a slot, and there is no shared memory")
        request = read_request(memory, head, shape, len(held.layers[head.layer]))
        begin_ns = time.perf_counter_ns()
        try:
            values = self._model.compute(held, request)
        except (WorkerFailedError, MemoryError, OSError) as error:
            self._send(Kind.FAILED, number, encode_text(str(error)))
            return
        fixed = outputs_head(head.num_pairs, head.slot, begin_ns, time.perf_counter_ns())
        num_bytes = shape.outputs_bytes(head.num_pairs)
        if self._slots is not None:
            write_values(self._slots.begin(head.slot, number, num_bytes), values, shape)
            self._send(Kind.OUTPUTS, number, fixed)
        else:
            answer = memoryview(bytearray(num_bytes))
            write_values(answer, values, shape)
            self._send(Kind.OUTPUTS, number, fixed, answer)

    def _send(self, kind: Kind, request: int, *parts: bytes | memoryview) -> None:
        self._frames.queue(kind, request, *parts)
        self._frames.flush_until(time.monotonic() + _SEND_S)


def serve_connection(sock: socket.socket, model: HeldModel, secret: bytes | None = None) -> None:
    """Serve one connected socket until its end, and close it. Blocks; raises nothing for what a peer does."""
    _Session(sock, model, secret).run()


def serve_listener(listener: socket.socket, model: HeldModel, secret: bytes | None) -> None:
    """Serve every client on a thread until the listener is shut down and all have disconnected. Blocks."""
    places = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    def serve(sock: socket.socket) -> None:
        try:
            serve_connection(sock, model, secret)
        finally:
            places.release()

    serving: list[threading.Thread] = []
    while True:
        places.acquire()
        try:
            sock, _ = listener.accept()
        except OSError:
            break
        if sock.family == socket.AF_UNIX and not _is_own_user(sock):
            sock.close()
            places.release()
            continue
        peer = threading.Thread(target=serve, args=(sock,), daemon=True, name="thermocline peer")
        serving = [*(thread for thread in serving if thread.is_alive()), peer]
        peer.start()
    for thread in serving:
        thread.join()


def open_listener(address: UnixAddress | TcpAddress) -> socket.socket:
    """Return a listening socket; a Unix one is for this user alone. Raises ConfigError."""
    try:
        match address:
            case UnixAddress(path):
                return _listen_for_user(path)
            case TcpAddress(host, port):
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"{address} can not be listened on ({error}): choose another") from error


def _listen_for_user(path: str) -> socket.socket:
    _remove_dead_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(path)
        listener.listen(_MAX_CONNECTIONS)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


def end_with_parent(parent: int) -> None:
    """Have this process killed with its parent; exit now if the parent has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _is_own_user(sock: socket.socket) -> bool:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.getuid())


def _remove_dead_socket(path: str) -> None:
    """Remove the socket of an earlier worker unless it still answers."""
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
