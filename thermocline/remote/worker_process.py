"""A worker as a process of its own: its options, start and end. Knows no request."""

from __future__ import annotations

import gc
import signal
import socket
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from thermocline.errors import ConfigError, RemoteError, ThermoclineError
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.cpu_topology import checked_threads
from thermocline.remote.address import TcpAddress, UnixAddress, parse_listen
from thermocline.remote.frame_socket import FrameSocket
from thermocline.remote.holdings import HeldModel
from thermocline.remote.wire import Kind, encode_text
from thermocline.remote.worker import (
    end_with_parent,
    open_listener,
    serve_connection,
    serve_listener,
)
from thermocline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

MIN_SECRET_BYTES: Final = 16
_MAX_SECRET_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What the command line says. parent: a connected socket, and the process that started this one."""

    model: str
    listen: str | None
    secret_file: str | None
    any_host: bool
    threads: int | None
    isa: str
    parent: tuple[int, int] | None
    hot_device: str = "none"
    """One of `DEVICES`; "auto" is a GPU where it can be used."""
    device_memory_bytes: int | None = None


def read_secret(path: str) -> bytes:
    """Return a shared secret without the line's end. Raises ConfigError."""
    try:
        with Path(path).open("rb") as file:
            secret = file.read(_MAX_SECRET_BYTES).strip()
    except OSError as error:
        raise ConfigError(f"the secret in {path} can not be read ({error}): check it") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"the secret in {path} has {len(secret)} bytes: use at least {MIN_SECRET_BYTES}"
        )
    return secret


def run_worker(options: WorkerOptions, say: Callable[[str], object]) -> None:
    """Serve until the parent has gone, or until SIGTERM or SIGHUP. For the main thread. Raises ConfigError or ModelError."""
    if options.parent is not None:
        _serve_parent(options, *options.parent)
        return
    if options.listen is None:
        raise ConfigError("a worker needs an address: --listen unix:PATH or tcp:HOST:PORT")
    address = parse_listen(options.listen)
    secret = None if options.secret_file is None else read_secret(options.secret_file)
    _require_safe(address, secret, any_host=options.any_host)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end_quietly)
    with _open(options) as model, open_listener(address) as listener:
        _open_device(options, model, say)
        if isinstance(address, TcpAddress):
            address = TcpAddress(address.host, listener.getsockname()[1])
        try:
            say(f"{_describe(model)}; listens on {address}")
            with _signals_as_bytes() as (signals, wake):
                threading.Thread(
                    target=_serve, args=(listener, model, secret, wake), daemon=True
                ).start()
                while signals.recv(1):  # its handler, if it has one, ends this thread here
                    pass
        finally:
            if isinstance(address, UnixAddress):
                Path(address.path).unlink(missing_ok=True)


@contextmanager
def _signals_as_bytes() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield a socket that a byte reaches for each signal, and the end that sends it.

    A thread that waits in a call of its own is not woken by a signal that the kernel gives to another
    thread, or that comes just before the call: its handler would wait for the next connection.
    """
    signals, wake = socket.socketpair()
    with signals, wake:
        wake.setblocking(False)
        before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        try:
            yield signals, wake
        finally:
            signal.set_wakeup_fd(before)


def _serve(
    listener: socket.socket, model: HeldModel, secret: bytes | None, wake: socket.socket
) -> None:
    try:
        serve_listener(listener, model, secret)
    finally:
        wake.shutdown(socket.SHUT_WR)


def _end_quietly(number: int, frame: FrameType | None) -> None:
    """End the main thread, which removes the socket; connections end with the process."""
    raise SystemExit(0)


def _serve_parent(options: WorkerOptions, fd: int, parent: int) -> None:
    end_with_parent(parent)
    sock = socket.socket(fileno=fd)
    try:
        model = _open(options)
    except ThermoclineError as error:
        frames = FrameSocket(sock, {})
        frames.queue(Kind.REFUSED, 0, encode_text(str(error)))
        with suppress(RemoteError):
            frames.flush()
        frames.close()
        return
    with model:
        gc.freeze()  # what was loaded is never garbage: collections need not look at it
        serve_connection(sock, model)


def _open(options: WorkerOptions) -> HeldModel:
    return HeldModel(options.model, NativeKernels(options.isa, options.threads))


def _open_device(options: WorkerOptions, model: HeldModel, say: Callable[[str], object]) -> None:
    """Let the worker's device compute, as the options say; with "auto" say why it does not."""
    if options.hot_device == "none":
        return
    # Parents start workers of their own without one, which begin sooner.
    from thermocline.remote.device_experts import WorkerDeviceWish, open_wished_device

    threads = checked_threads(options.threads)
    memory_bytes = options.device_memory_bytes
    wish = WorkerDeviceWish(options.hot_device, memory_bytes, model.catalog, model.kernels, threads)
    device = open_wished_device(wish, say)
    if device is not None:
        model.use_device(device)


def _describe(model: HeldModel) -> str:
    spec = model.spec
    device = "" if model.device is None else f" and {model.device.name}"
    return (
        f"{spec.name}: {model.num_experts} experts, {format_bytes(model.total_bytes)}, on "
        f"{model.kernels.name}{device}"
    )


def _require_safe(
    address: UnixAddress | TcpAddress, secret: bytes | None, *, any_host: bool
) -> None:
    if isinstance(address, UnixAddress):
        return
    if secret is None:
        raise ConfigError("a worker on tcp needs --secret-file: who knows it may use the worker")
    if not address.is_loopback and not any_host:
        raise ConfigError(
            f"{address} can be reached by other machines, and what is sent is not encrypted: use "
            "127.0.0.1, or --any-host on a network that you trust"
        )
