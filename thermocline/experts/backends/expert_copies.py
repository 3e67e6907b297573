"""Copies experts from the mapped file to a GPU's slots, on a thread of its own and a copy stream.

They go through a ring of pinned buffers, or straight from the file's pages where the driver has locked those, many with
one call. Knows no slot's owner and no policy.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from thermocline.experts.backends.locked_pages import LockedPages
from thermocline.models.device.sizes import slot_starts
from thermocline.traces.lanes import Lane, Name

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Mapping, Sequence

    from thermocline.kernels.gpu.health import DeviceEvent
    from thermocline.kernels.gpu.streams import DeviceStreams
    from thermocline.kernels.weight import ByteArray, ExpertStack, WeightStack
    from thermocline.messages import ExpertKey, LayerIndex
    from thermocline.traces.recorder import Recorder
    from thermocline.workers.lane import LaneThread

# Copies in flight: one buffer is filled while the link moves another.
_NUM_BUFFERS: Final = 4
# Copies from locked pages that are queued, and waited for, together: some 0.3 ms of a fast link.
_GROUP_BYTES: Final = 16 << 20


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


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A copy that waits for its turn. slot: uint8 [bytes]."""

    key: ExpertKey
    parts: tuple[SlotPart, ...]
    slot: torch.Tensor
    done: Future[None]
    start_ns: int

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class _Line:
    """Copies that wait for the lane, first come, first served. is_served: the lane is at it, or will be."""

    def __init__(self) -> None:
        self.waiting: deque[_Asked] = deque()
        self.is_served = False


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
        # Guards what follows, but for the pages.
        self._lock = threading.Lock()
        self._urgent, self._others = _Line(), _Line()
        self._shown_ns = 0  # until when the trace shows copies
        self._until_locked_bytes = 0
        self._pages: LockedPages | None = None

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

    def has_locked(self, layers: Collection[LayerIndex]) -> bool:
        """Whether all pages of these layers' experts are locked. From any thread."""
        return self._pages is not None and self._pages.layers.issuperset(layers)

    def take_span(self, begun_ns: int) -> tuple[int, int]:
        """Return from when to when the trace shows copies that began then and end now: behind all that it shows already."""
        with self._lock:
            start_ns, self._shown_ns = max(begun_ns, self._shown_ns), self._recorder.now_ns()
            return start_ns, self._shown_ns

    def begin(
        self, key: ExpertKey, parts: tuple[SlotPart, ...], slot: torch.Tensor, *, urgent: bool
    ) -> Future[None]:
        """Copy the expert's matrices to `slot`, uint8 [bytes]; the future ends with the copy.

        What is asked for while the lane is busy is queued together. Raises EngineClosedError when the lane is closed.
        """
        asked = _Asked(key, parts, slot, Future(), self._recorder.now_ns())
        line = self._urgent if urgent else self._others
        with self._lock:
            line.waiting.append(asked)
            is_first, line.is_served = not line.is_served, True
        if is_first:
            self._serve(line, urgent=urgent)
        if urgent and self._until_locked_bytes > 0:
            self._count(asked.nbytes)
        return asked.done

    def _serve(self, line: _Line, *, urgent: bool) -> None:
        """Have the lane begin all copies in a line."""
        try:
            served = self._lane.submit_background(self._move_all(line), urgent=urgent)
        except Exception as error:
            self._give_up(line, error)
            raise
        served.add_done_callback(partial(self._stopped, line))

    def _stopped(self, line: _Line, served: Future[None]) -> None:
        if (error := served.exception()) is not None:
            self._give_up(line, error)

    def _give_up(self, line: _Line, error: BaseException) -> None:
        with self._lock:
            given_up, line.is_served = tuple(line.waiting), False
            line.waiting.clear()
        for asked in given_up:
            asked.done.set_exception(error)

    def _count(self, nbytes: int) -> None:
        """Count bytes that a chunk waits for, and begin to lock pages at the threshold."""
        assert self._pages is not None, "without pages to lock nothing is counted"
        with self._lock:
            before, self._until_locked_bytes = (
                self._until_locked_bytes,
                self._until_locked_bytes - nbytes,
            )
        if before > 0 >= before - nbytes:
            self._lane.submit_background(self._pages.lock_all())

    def _move_all(self, line: _Line) -> Generator[None, None, None]:
        """Begin all copies in a line, on the lane's thread; between groups others have their turn."""
        while group := self._next_group(line):
            try:
                arrived = self._streams.when_done(self._move(group))
            except Exception as error:  # noqa: BLE001 - handed to the waiters, whatever it is
                for asked in group:
                    asked.done.set_exception(error)
            else:
                arrived.add_done_callback(partial(self._end, group))
            yield

    def _next_group(self, line: _Line) -> list[_Asked]:
        """Take the next copies that are made together: one by a buffer, or some from locked pages."""
        group: list[_Asked] = []
        nbytes = 0
        with self._lock:
            while line.waiting and (not group or self._is_locked(line.waiting[0])):
                nbytes += line.waiting[0].nbytes
                if group and nbytes > _GROUP_BYTES:
                    break
                group.append(line.waiting.popleft())
                if not self._is_locked(group[0]):
                    break
            line.is_served = bool(group)
        return group

    def _is_locked(self, asked: _Asked) -> bool:
        return self._pages is not None and asked.key.layer in self._pages.layers

    def _move(self, group: Sequence[_Asked]) -> DeviceEvent:
        """Queue copies, on the lane's thread, which may wait for the disk."""
        if not self._is_locked(group[0]):
            return self._move_by_buffer(group[0])
        copies = [
            (there + part.start, _address(part.stack.raw[asked.key.expert]), part.nbytes)
            for asked in group
            for there in (asked.slot.data_ptr(),)
            for part in asked.parts
        ]
        with self._streams.copying():
            self._streams.queue_copies(np.array(copies, np.int64))
            return self._streams.record(copies=True)

    def _move_by_buffer(self, asked: _Asked) -> DeviceEvent:
        buffer = self._buffers.popleft()
        self._buffers.append(buffer)
        if buffer.copied is not None:
            buffer.copied.synchronize()
        filled = buffer.memory.numpy()
        end = 0
        for part in asked.parts:
            end = part.start + part.nbytes
            np.copyto(filled[part.start : end], part.stack.raw[asked.key.expert].reshape(-1))
        with self._streams.copying():
            asked.slot[:end].copy_(buffer.memory[:end], non_blocking=True)
            buffer.copied = self._streams.record(copies=True)
        return buffer.copied

    def _end(self, group: Sequence[_Asked], arrived: Future[None]) -> None:
        error = arrived.exception()
        if error is None:
            self._draw(group)
        for asked in group:
            if error is None:
                asked.done.set_result(None)
            else:
                asked.done.set_exception(error)

    def _draw(self, group: Sequence[_Asked]) -> None:
        """Show copies that ended together, one behind the other, each as long as its share of their bytes."""
        if not self._recorder.enabled:
            return
        at_ns, end_ns = self.take_span(group[0].start_ns)
        total = sum(asked.nbytes for asked in group)
        for asked in group:
            until_ns = at_ns + (end_ns - at_ns) * asked.nbytes // total
            total -= asked.nbytes
            args = {"layer": asked.key.layer, "expert": asked.key.expert, "bytes": asked.nbytes}
            self._recorder.span(Lane.GPU_H2D, Name.LOAD, at_ns, until_ns, args)
            at_ns = until_ns


def slot_bytes(stack: ExpertStack) -> int:
    """Return what an expert takes in a slot."""
    last = slot_parts(stack)[-1]
    return last.start + last.nbytes


def slot_parts(stack: ExpertStack) -> tuple[SlotPart, ...]:
    """Return where the matrices and biases of an expert lie in a slot."""
    stacks = stack.parts
    starts = slot_starts([int(each.raw[0].nbytes) for each in stacks])
    return tuple(map(SlotPart, starts, stacks))


def _address(matrix: ByteArray) -> int:
    assert matrix.flags.c_contiguous, "the rows of a matrix lie one behind the other"
    return int(matrix.ctypes.data)
