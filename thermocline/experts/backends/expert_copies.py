"""Copies experts from the mapped file to a GPU's slots, on a thread of its own and a copy stream.

They go through a ring of pinned buffers, or straight from the file's pages where the driver has locked those. Knows no
slot's owner and no policy.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from thermocline.experts.backends.locked_pages import LockedPages
from thermocline.models.device_sizes import slot_starts
from thermocline.traces.lanes import Lane, Name

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from thermocline.kernels.gpu.health import DeviceEvent
    from thermocline.kernels.gpu.streams import DeviceStreams
    from thermocline.kernels.weight import ByteArray, ExpertStack, WeightStack
    from thermocline.messages import ExpertKey, LayerIndex
    from thermocline.traces.recorder import Recorder
    from thermocline.workers.lane import LaneThread

# Copies in flight: one buffer is filled while the link moves another.
_NUM_BUFFERS: Final = 4


@dataclass(slots=True)
class _Buffer:
    """Pinned memory for one expert, and the event behind the last copy from it."""

    memory: torch.Tensor
    copied: DeviceEvent | None = None


@dataclass(frozen=True, slots=True)
class SlotPart:
    """One matrix, or bias, of an expert: where it begins in a slot, and the stack that it is copied from."""

    start: int
    stack: WeightStack

    @property
    def nbytes(self) -> int:
        """Of the matrix."""
        return int(self.stack.raw[0].nbytes)


class ExpertCopies:
    """Copies experts from the mapped file to slots, in order, several in flight."""

    def __init__(
        self, streams: DeviceStreams, lane: LaneThread, slot_bytes: int, recorder: Recorder
    ) -> None:
        """slot_bytes: of the largest expert."""
        self._streams, self._lane, self._recorder = streams, lane, recorder
        self._buffers = deque(
            _Buffer(streams.host_empty(slot_bytes, dtype=torch.uint8)) for _ in range(_NUM_BUFFERS)
        )
        self._drawing = threading.Lock()
        self._shown_ns = 0  # until when the trace shows copies
        self._pages: LockedPages | None = None
        self._until_locked_bytes = 0

    def lock_after(self, layers: Mapping[LayerIndex, ExpertStack]) -> None:
        """Lock the pages of these layers' experts when as many bytes were copied for chunks as they have.

        To lock a page that is not in memory takes as long as to copy it once through a buffer.
        """
        self._pages = LockedPages(self._streams.lock, layers)
        self._until_locked_bytes = self._pages.nbytes

    def lock(self, layers: Mapping[LayerIndex, ExpertStack]) -> None:
        """Lock the pages of these layers' experts now. Blocks: for some seconds per 100 GB that are in memory already."""
        self._pages = LockedPages(self._streams.lock, layers)
        self._lane.submit_background(self._pages.lock_all()).result()

    def begin(
        self, key: ExpertKey, parts: tuple[SlotPart, ...], slot: torch.Tensor, *, urgent: bool
    ) -> Future[None]:
        """Copy the expert's matrices to `slot`, uint8 [bytes]; the future ends with the copy."""
        done: Future[None] = Future()

        def move() -> DeviceEvent:
            start_ns = self._recorder.now_ns()
            event = self._move(key, parts, slot)
            nbytes = sum(part.nbytes for part in parts)
            done.add_done_callback(partial(self._draw, key, start_ns, nbytes))
            return event

        moved = self._lane.submit_background(_once(move), urgent=urgent)
        moved.add_done_callback(partial(self._pass_on, done))
        if urgent and self._until_locked_bytes > 0:
            self._count(sum(part.nbytes for part in parts))
        return done

    def _count(self, nbytes: int) -> None:
        """Count bytes that a chunk waits for, and begin to lock pages at the threshold."""
        assert self._pages is not None, "without pages to lock nothing is counted"
        with self._drawing:
            before, self._until_locked_bytes = (
                self._until_locked_bytes,
                self._until_locked_bytes - nbytes,
            )
        if before > 0 >= before - nbytes:
            self._lane.submit_background(self._pages.lock_all())

    def _move(self, key: ExpertKey, parts: tuple[SlotPart, ...], slot: torch.Tensor) -> DeviceEvent:
        """Queue a copy, on the lane's thread, which may wait for the disk."""
        if self._pages is not None and key.layer in self._pages.layers:
            with self._streams.copying():
                for part in parts:
                    source = _host_tensor(part.stack.raw[key.expert])
                    target = slot[part.start : part.start + part.nbytes]
                    target.copy_(source, non_blocking=True)
                return self._streams.record(copies=True)
        return self._move_by_buffer(key, parts, slot)

    def _move_by_buffer(
        self, key: ExpertKey, parts: tuple[SlotPart, ...], slot: torch.Tensor
    ) -> DeviceEvent:
        buffer = self._buffers.popleft()
        self._buffers.append(buffer)
        if buffer.copied is not None:
            buffer.copied.synchronize()
        filled = buffer.memory.numpy()
        end = 0
        for part in parts:
            end = part.start + part.nbytes
            np.copyto(filled[part.start : end], part.stack.raw[key.expert].reshape(-1))
        with self._streams.copying():
            slot[:end].copy_(buffer.memory[:end], non_blocking=True)
            buffer.copied = self._streams.record(copies=True)
        return buffer.copied

    def _pass_on(self, done: Future[None], moved: Future[DeviceEvent]) -> None:
        try:
            arrived = self._streams.when_done(moved.result())
        except Exception as error:  # noqa: BLE001 - handed to the waiter, whatever it is
            done.set_exception(error)
            return
        arrived.add_done_callback(partial(_follow, done))

    def _draw(self, key: ExpertKey, start_ns: int, nbytes: int, done: Future[None]) -> None:
        if not self._recorder.enabled or done.exception() is not None:
            return
        args = {"layer": key.layer, "expert": key.expert, "bytes": nbytes}
        with self._drawing:
            start_ns, end_ns = max(start_ns, self._shown_ns), self._recorder.now_ns()
            self._shown_ns = end_ns
        self._recorder.span(Lane.GPU_H2D, Name.LOAD, start_ns, end_ns, args)


def slot_bytes(stack: ExpertStack) -> int:
    """Return what an expert takes in a slot."""
    last = slot_parts(stack)[-1]
    return last.start + last.nbytes


def slot_parts(stack: ExpertStack) -> tuple[SlotPart, ...]:
    """Return where the matrices and biases of an expert lie in a slot."""
    stacks = stack.parts
    starts = slot_starts([int(each.raw[0].nbytes) for each in stacks])
    return tuple(map(SlotPart, starts, stacks))


def _once(job: Callable[[], DeviceEvent]) -> Generator[None, None, DeviceEvent]:
    """Return a lane's work that is done in one turn."""
    yield from ()
    return job()


def _follow(done: Future[None], arrived: Future[None]) -> None:
    error = arrived.exception()
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _host_tensor(matrix: ByteArray) -> torch.Tensor:
    """Return a matrix's bytes as a tensor. They are only read: torch knows no read-only memory."""
    assert matrix.flags.c_contiguous, "the rows of a matrix lie one behind the other"
    memory = (ctypes.c_uint8 * matrix.nbytes).from_address(matrix.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.uint8)
