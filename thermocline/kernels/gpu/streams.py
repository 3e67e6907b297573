"""Owns a device's streams and events.

On CUDA, compute is queued on one stream and copies on another. On the CPU, which serves for tests, everything is done
when the call returns, and events are done when made. Knows nothing of what is computed.
"""

from __future__ import annotations

import gc
import logging
import threading
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

import torch

from thermocline.errors import DeviceFaultError, EngineClosedError
from thermocline.kernels.gpu import host_results
from thermocline.kernels.gpu.copy_call import CopyCall
from thermocline.kernels.gpu.health import DeviceHealth, WatchedEvent
from thermocline.kernels.gpu.memory import memory_errors
from thermocline.kernels.gpu.requirements import require_gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from typing import Any, Self

    import numpy as np
    from numpy.typing import NDArray

    from thermocline.kernels.gpu.health import DeviceEvent

    DeviceMark = torch.cuda.Event

_LOG: Final = logging.getLogger("thermocline.devices")
_READ_ONLY: Final = 8  # cudaHostRegisterReadOnly
# cudaHostRegisterPortable and cudaHostRegisterMapped: for every context of the process.
_SHARED: Final = 3


class _DoneEvent:
    """The event of a device on which nothing is ever pending."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class DeviceStreams:
    """One device. Opened once; everything that uses the device gets this object.

    Close it (or leave its context) when nothing is computed on it any more.
    """

    def __init__(self, device: torch.device) -> None:
        """device: "cpu", or a CUDA device with its index."""
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._compute = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call] # torch's own
        self._copies = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call] # torch's own
        self._pool = self._new_pool()
        self._kept_graph: Callable[[], None] | None = None
        self._health = DeviceHealth(str(device), self._probe)
        self._pending: SimpleQueue[tuple[DeviceEvent, Future[None]] | None] = SimpleQueue()
        self._waiter: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = False
        self._max_bytes: int | None = None
        self._copy_call = CopyCall.of_driver() if self._is_cuda else CopyCall.of_memory()
        self._results = host_results.HostResults(pinned=self._is_cuda)
        self._locked: list[int] = []  # addresses
        # By address: registered memory must not be freed.
        self._shared: dict[int, NDArray[np.uint8]] = {}

    @classmethod
    def open(cls, kind: str, number: int | None = None) -> Self:
        """Return the streams of a CUDA device ("cuda"), or of its stand-in ("torch-cpu").

        number: which one, modulo how many there are; None for the present one. Raises DeviceMissingError where there is no such device.
        """
        if kind == "torch-cpu":
            return cls(torch.device("cpu"))
        require_gpu()
        present = torch.cuda.current_device()
        index = present if number is None else number % torch.cuda.device_count()
        return cls(torch.device("cuda", index))

    def __repr__(self) -> str:
        return f"DeviceStreams({self.device})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def can_capture(self) -> bool:
        """Whether work can be recorded once and run again as a whole."""
        return self._is_cuda

    def computing(self) -> AbstractContextManager[None]:
        """Let this thread compute on the device: its work is queued on the compute stream.

        Raises DeviceMemoryError where the device has too little memory for it, DeviceFaultError where it does not work
        any more.
        """
        return self._queueing(self._compute)

    def copying(self) -> AbstractContextManager[None]:
        """Let this thread copy to or from the device beside what is computed there.

        Raises as `computing`.
        """
        return self._queueing(self._copies)

    def check(self, *tensors: torch.Tensor) -> None:
        """Assert that tensors lie on this device: the device of initialisation is the one that computes."""
        for tensor in tensors:
            assert tensor.device == self.device, f"{tensor.device} is not {self.device}"

    def record(self, *, copies: bool = False) -> DeviceEvent:
        """Return an event that is done when all compute (or `copies`) queued so far is."""
        stream = self._copies if copies else self._compute
        if stream is None:
            return _DoneEvent()
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch's own
        event.record(stream)
        return WatchedEvent(event, self._health)

    def mark(self, *, copies: bool = False) -> DeviceMark | None:
        """Return a mark behind all compute (or `copies`) queued so far, for `wait`; None where nothing is ever pending."""
        stream = self._copies if copies else self._compute
        return None if stream is None else stream.record_event()

    def wait(self, mark: DeviceMark | None, *, copies: bool = False) -> None:
        """Let compute (or `copies`) queued from now on begin when `mark` is reached. Only queues."""
        stream = self._copies if copies else self._compute
        if stream is not None and mark is not None:
            stream.wait_event(mark)

    def finish(self, *, spin: bool) -> None:
        """Block until everything queued so far is done. spin: busy-wait, for short work."""
        if self._compute is None:
            return
        if spin:
            self._compute.synchronize()
        else:
            self.record().synchronize()

    def when_done(self, event: DeviceEvent) -> Future[None]:
        """Return a future of the event. A thread waits for it, so that no loop polls and no lane is held.

        From any thread; never waits.
        Raises EngineClosedError after `close`.
        """
        done: Future[None] = Future()
        if self._closed:
            raise EngineClosedError(f"{self} is closed: open a new engine")
        if event.query():
            done.set_result(None)
            return done
        with self._starting:
            if self._waiter is None:
                self._waiter = threading.Thread(
                    target=self._wait, name="thermocline device events", daemon=True
                )
                self._waiter.start()
        self._pending.put((event, done))
        return done

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture `work` without running it; return a function that runs it on the same memory.

        `can_capture` says whether this may be called; the caller is `computing`. Raises what `work` raises, and
        torch's errors for what can not be captured.
        """
        assert self._compute is not None, "nothing can be captured on this device"
        try:
            with _without_collection():
                if self._kept_graph is None:
                    # torch takes no pool a second time whose graphs are all gone, so that one always stays.
                    one = torch.zeros(1, device=self.device)
                    self._kept_graph = self._captured(lambda: _zero(one))
                return self._captured(work)
        except BaseException:
            # torch may hold that its pool is still being recorded into.
            self._kept_graph, self._pool = None, self._new_pool()
            raise

    def _new_pool(self) -> Any:  # noqa: ANN401 - torch's own type
        return torch.cuda.graph_pool_handle() if self._is_cuda else None

    def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on asking the driver for memory meanwhile. One pool for all graphs: one runs
        # at a time, and none leaves anything in the pool that is read after it.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            # Ending a broken capture fails, too, and that error would hide why it broke.
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        return graph.replay

    def host_empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return host memory, pinned where the device has memory of its own, to be let go by the thread that computes."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._is_cuda)

    def to_host(self, found: torch.Tensor, *, spin: bool) -> NDArray[Any]:
        """Return a copy of a result when all that was queued is done. spin: see `finish`.

        The array may be let go by any thread.
        """
        if found.nbytes > host_results.MAX_BYTES:
            copy = torch.empty(found.shape, dtype=found.dtype)
            copy.copy_(found)
            return copy.numpy()
        host, array = self._results.take(found.shape, found.dtype)
        host.copy_(found, non_blocking=True)
        self.finish(spin=spin)
        return array

    def queue_copies(self, copies: NDArray[np.int64]) -> None:
        """Queue copies to the device by one call, without the interpreter's lock. The caller is `copying`.

        copies: int64 [n, 3], addresses there and in memory that is locked or pinned, and bytes. Nothing moves until they are done. Raises
        RuntimeError where the driver refuses.
        """
        stream = 0
        if self._copies is not None:
            self._copies.query()  # makes the device's context this thread's
            stream = self._copies.cuda_stream
        self._copy_call(copies, stream)

    def lock(self, address: int, nbytes: int) -> bool:
        """Have the driver keep mapped host memory in place until `close`, so that copies read it directly.

        nbytes: of whole pages, which are only read. Blocks. Returns False where system or driver refuse.
        """
        if not self._is_cuda or not self._copy_call.is_there:
            return False
        with self.copying():
            if self._register(address, nbytes, _READ_ONLY):
                return False
        self._locked.append(address)
        return True

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        """Return the driver's answer to cudaHostRegister, 0 for yes."""
        driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch's own
        error = int(driver.cudaHostRegister(address, nbytes, flags))
        if error:
            # This thread's next launch would fail with the driver's refusal.
            with suppress(RuntimeError):
                torch.zeros(1, device=self.device)
        return error

    def share(self, memory: NDArray[np.uint8]) -> None:
        """Let kernels read and write host memory across the link, until `close`. Once more for the same does nothing.

        Raises DeviceFaultError where the driver refuses.
        """
        address = memory.ctypes.data
        if not self._is_cuda or address in self._shared:
            return
        if error := self._register(address, memory.nbytes, _SHARED):
            raise DeviceFaultError(
                f"{self} can not see {memory.nbytes} bytes of the CPU's memory (cudaHostRegister returned {error}). "
                "Fix: a higher limit of locked memory (ulimit -l), or another driver"
            )
        self._shared[address] = memory

    def upload(self, array: NDArray[np.generic]) -> torch.Tensor:
        """Return a copy of `array` on the device, ready when this returns."""
        return torch.tensor(array, device=self.device)

    def limit(self, max_bytes: int) -> None:
        """Let no more than `max_bytes` of the device be taken, by this process and until `close`."""
        self._max_bytes = max_bytes
        if self._is_cuda:
            _, total = torch.cuda.mem_get_info(self.device)
            share = min(max_bytes / total, 1.0)
            torch.cuda.set_per_process_memory_fraction(share, self.device)

    def free_bytes(self) -> int | None:
        """Return how much memory the device has left; None where it has none of its own and no limit."""
        if not self._is_cuda:
            return self._max_bytes
        free, total = torch.cuda.mem_get_info(self.device)
        kept = torch.cuda.memory_reserved(self.device)
        used = torch.cuda.memory_allocated(self.device)
        left = min(free + kept - used, total)
        return left if self._max_bytes is None else max(min(left, self._max_bytes - used), 0)

    def close(self) -> None:
        """Finish what was queued, compute and copies, and end the waiting thread. More calls do nothing.

        A device that does not work any more is left as it is: nothing runs there.
        """
        if self._closed:
            return
        self._closed = True
        if not self._health.is_dead:
            self._finish_all()
        self._kept_graph = None
        if self._waiter is not None:
            self._pending.put(None)
            self._waiter.join()

    def _finish_all(self) -> None:
        """Block until compute and copies are done, and lift the limit.

        Logs a failure, which nobody could act on at the end.
        """
        try:
            with self._health.watched():
                self.finish(spin=False)
                if self._copies is not None:
                    self._copies.synchronize()
                for address in (*self._locked, *self._shared):
                    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch's own
                    driver.cudaHostUnregister(address)
                if self._is_cuda and self._max_bytes is not None:
                    torch.cuda.set_per_process_memory_fraction(1.0, self.device)
        except (DeviceFaultError, RuntimeError) as error:
            _LOG.warning("closing %s: %s", self, error)

    def _probe(self) -> None:
        if self._compute is not None:
            self._compute.query()

    @contextmanager
    def _queueing(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._health.watched())
            stack.enter_context(memory_errors())
            stack.enter_context(torch.inference_mode())
            if stream is not None:
                stack.enter_context(torch.cuda.device(self.device))
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def _wait(self) -> None:
        while (pending := self._pending.get()) is not None:
            event, done = pending
            if not done.set_running_or_notify_cancel():
                continue
            try:
                event.synchronize()
            except Exception as error:  # noqa: BLE001 - handed to the waiter, whatever it is
                done.set_exception(error)
            else:
                done.set_result(None)


def _zero(tensor: torch.Tensor) -> None:
    tensor.zero_()


@contextmanager
def _without_collection() -> Iterator[None]:
    """Let the collector free nothing meanwhile: what it finds may be a device's, and a capture ends by such a call."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
