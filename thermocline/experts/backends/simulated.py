"""A simulated device for hot experts: its own memory, its own compute thread, a link of configured speed.

For studying and testing schedules on a machine without a GPU; outputs are the CPU's to the bit. Copies take the time
that the configured bandwidth allows. Compute takes what one thread takes, times a configured slowdown.
"""

from __future__ import annotations

import heapq
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, cast

import numpy as np

from thermocline.errors import DeviceMemoryError
from thermocline.experts.backends.contract import KeptOutputs
from thermocline.experts.dispatch.grouping import pairs_by_slot
from thermocline.kernels.contract import ExpertWork
from thermocline.kernels.dense_contract import Contributions
from thermocline.kernels.weight import WeightStack
from thermocline.messages import LayerIndex
from thermocline.traces.lanes import Lane, Name
from thermocline.workers.lane import result_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from concurrent.futures import Future

    from thermocline.experts.backends.contract import SentRows
    from thermocline.experts.catalog import ExpertCatalog
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.dense_contract import DenseKernels
    from thermocline.kernels.weight import ByteArray, ExpertStack, FloatArray, IntArray
    from thermocline.messages import ExpertDispatch, ExpertKey, LayerWork
    from thermocline.traces.recorder import Recorder
    from thermocline.workers.lane import JobLane, LaneThread

# The longest that the copy of an expert delays activations.
_PIECE_S: Final = 0.5e-3
# Sleeps end late: the excess is credited to the next copy, and waits too short for a sleep add up.
_MAX_DEBT_S: Final = 1e-3
_MIN_SLEEP_S: Final = 50e-6


@dataclass(slots=True)
class _Pool:
    """Slots of one layout; memory is used as slots are filled."""

    slot_bytes: int
    free: list[int]


class ExpertKernels(Protocol):
    """What a device computes with; see `Kernels`."""

    @property
    def dense(self) -> DenseKernels:
        """What adds up."""
        ...

    def expert_outputs(self, work: ExpertWork, *, prompt: bool = False) -> FloatArray:
        """See `Kernels.expert_outputs`."""
        ...

    def expert_sum(
        self, work: ExpertWork, pair_of: IntArray, residual: FloatArray, *, prompt: bool = False
    ) -> FloatArray:
        """See `Kernels.expert_sum`."""
        ...


@dataclass(frozen=True, slots=True)
class SlowedKernels:
    """`ExpertKernels` that take `slowdown` times as long as `kernels`; the rest of it they sleep."""

    kernels: Kernels
    slowdown: float

    @property
    def dense(self) -> DenseKernels:
        """At full speed."""
        return self.kernels.dense

    def expert_outputs(self, work: ExpertWork, *, prompt: bool = False) -> FloatArray:
        return self._slowed(partial(self.kernels.expert_outputs, work, prompt=prompt))

    def expert_sum(
        self, work: ExpertWork, pair_of: IntArray, residual: FloatArray, *, prompt: bool = False
    ) -> FloatArray:
        job = partial(self.kernels.expert_sum, work, pair_of, residual, prompt=prompt)
        return self._slowed(job)

    def _slowed(self, job: Callable[[], FloatArray]) -> FloatArray:
        start_s = time.perf_counter()
        values = job()
        time.sleep((time.perf_counter() - start_s) * (self.slowdown - 1))
        return values


class CopyEngine:
    """Moves arrays between host and device at `bytes_per_s`, on a lane of its own."""

    def __init__(self, lane: LaneThread, bytes_per_s: float, recorder: Recorder) -> None:
        self._lane = lane
        self._bytes_per_s = bytes_per_s
        self._recorder = recorder
        self._free_s = 0.0  # when the link is idle

    def begin_rows(self, values: FloatArray, work: LayerWork) -> Future[FloatArray]:
        """Begin to copy activations; the future has the copy, after as long as the bandwidth allows."""
        job = partial(self._copied, values)
        return self._lane.begin(Name.COPY, job, work.chunk, work.layer, bytes=values.nbytes)

    def begin(
        self, key: ExpertKey, targets: list[ByteArray], sources: list[ByteArray], *, urgent: bool
    ) -> Future[None]:
        """Begin to copy an expert's matrices in pieces, between which activations may go."""
        return self._lane.submit_background(self._pieces(key, targets, sources), urgent=urgent)

    def _pieces(
        self, key: ExpertKey, targets: list[ByteArray], sources: list[ByteArray]
    ) -> Generator[None, None, None]:
        step = max(1, int(self._bytes_per_s * _PIECE_S))
        for target, source in zip(targets, sources, strict=True):
            for start in range(0, target.nbytes, step):
                piece = slice(start, start + step)
                start_ns = self._recorder.now_ns()
                self._move(target[piece], source[piece])
                args = {"layer": key.layer, "expert": key.expert, "bytes": target[piece].nbytes}
                self._recorder.span(
                    Lane.GPU_H2D, Name.LOAD, start_ns, self._recorder.now_ns(), args
                )
                yield

    def _copied(self, values: FloatArray) -> FloatArray:
        copied = np.empty_like(values)
        self._move(copied, values)
        return copied

    def _move(self, target: FloatArray | ByteArray, source: FloatArray | ByteArray) -> None:
        now_s = time.perf_counter()
        is_idle = now_s - self._free_s > _MAX_DEBT_S
        since_s = now_s if is_idle else self._free_s
        self._free_s = since_s + source.nbytes / self._bytes_per_s
        target[...] = source
        wait_s = self._free_s - time.perf_counter()
        if wait_s > _MIN_SLEEP_S:
            time.sleep(wait_s)


@dataclass(frozen=True, slots=True)
class _SentRows:
    """Rows on their way to the device, which waits for them. rows: int32 [n], their ids, ascending.

    parts: float32 [1, n, D], or [2, n, D] with the same rows of the residual.
    """

    rows: IntArray
    parts: Future[FloatArray]


class SimulatedDevice:
    """`ExpertDevice` in the host's memory. Raises DeviceMemoryError when `memory_bytes` are used up."""

    def __init__(
        self,
        catalog: ExpertCatalog,
        memory_bytes: int,
        kernels: ExpertKernels,
        lane: JobLane,
        engine: CopyEngine,
    ) -> None:
        self._catalog = catalog
        self._memory_bytes = memory_bytes
        self.kernels = kernels
        """Those of its one thread."""
        self._lane = lane
        self._engine = engine
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._pool_of: dict[LayerIndex, _Pool] = {}
        self._stacks: dict[LayerIndex, ExpertStack] = {}
        self._make_pools()

    def __repr__(self) -> str:
        return f"SimulatedDevice({self._used_bytes} of {self._memory_bytes} bytes used)"

    @property
    def used_bytes(self) -> int:
        """Bytes of slots and activations."""
        return self._used_bytes

    def limit_memory(self, memory_bytes: int) -> None:
        """Have only so many bytes from now on, as if another program had taken the rest."""
        self._memory_bytes = memory_bytes

    def allocate(self, layer: LayerIndex) -> int:
        pool = self._pool_of[layer]
        with self._lock:
            if not pool.free:
                raise DeviceMemoryError("one more expert", pool.slot_bytes)
            self._take(pool.slot_bytes, "one more expert")
            return heapq.heappop(pool.free)

    def free(self, layer: LayerIndex, slot: int) -> None:
        pool = self._pool_of[layer]
        with self._lock:
            self._used_bytes -= pool.slot_bytes
            heapq.heappush(pool.free, slot)

    def stack(self, layer: LayerIndex) -> ExpertStack:
        """Return the slots of a layer's layout as a stack of experts with its formula."""
        return self._stacks[layer]

    def begin_copy(self, key: ExpertKey, slot: int, *, urgent: bool = False) -> Future[None]:
        targets = _bytes_of(self.stack(key.layer), slot)
        sources = _bytes_of(self._catalog.stack(key.layer), key.expert)
        return self._engine.begin(key, targets, sources, urgent=urgent)

    @contextmanager
    def scratch(self, nbytes: int) -> Iterator[None]:
        with self._lock:
            self._take(nbytes, "a layer's activations")
        try:
            yield
        finally:
            with self._lock:
                self._used_bytes -= nbytes

    async def send(
        self, work: LayerWork, rows: IntArray, *, with_residual: bool = False
    ) -> SentRows:
        """See `ExpertDevice.send`. Only the device waits for the rows: the CPU may be at work when they arrive."""
        parts = (work.x[rows], work.residual[rows]) if with_residual else (work.x[rows],)
        return _SentRows(rows, self._engine.begin_rows(np.stack(parts), work))

    async def compute(
        self, work: LayerWork, dispatch: ExpertDispatch, slots: IntArray, sent: SentRows
    ) -> FloatArray:
        assert isinstance(sent, _SentRows), "the rows were sent to another device"
        return await self._run(partial(self._outputs, work, dispatch, slots, sent), work, dispatch)

    async def keep(
        self, work: LayerWork, dispatch: ExpertDispatch, slots: IntArray, sent: SentRows
    ) -> KeptOutputs:
        assert isinstance(sent, _SentRows), "the rows were sent to another device"
        job = partial(self._outputs, work, dispatch, slots, sent)
        num_experts = len(dispatch.experts)
        values = await self._lane.run(Name.HOT, job, work.chunk, work.layer, experts=num_experts)
        return KeptOutputs(dispatch, values)

    async def compute_sum(
        self,
        work: LayerWork,
        dispatch: ExpertDispatch,
        slots: IntArray,
        sent: SentRows,
        kept: Sequence[KeptOutputs] = (),
    ) -> FloatArray:
        assert isinstance(sent, _SentRows), "the rows were sent to another device"
        job = partial(self._sum, work, dispatch, slots, sent, kept)
        return await self._run(job, work, dispatch)

    async def _run(
        self, job: Callable[[], FloatArray], work: LayerWork, dispatch: ExpertDispatch
    ) -> FloatArray:
        """Return the result of a job on the device, on the host. The device begins its copy at once."""

        def compute() -> Future[FloatArray]:
            return self._engine.begin_rows(job(), work)

        num_experts = len(dispatch.experts)
        copy = await self._lane.run(Name.HOT, compute, work.chunk, work.layer, experts=num_experts)
        return await result_of(copy)

    def _outputs(
        self, work: LayerWork, dispatch: ExpertDispatch, slots: IntArray, sent: _SentRows
    ) -> FloatArray:
        given = self._expert_work(work, dispatch, slots, sent)
        return self.kernels.expert_outputs(given, prompt=work.chunk.is_prompt)

    def _sum(
        self,
        work: LayerWork,
        dispatch: ExpertDispatch,
        slots: IntArray,
        sent: _SentRows,
        kept: Sequence[KeptOutputs],
    ) -> FloatArray:
        parts = sent.parts.result()
        assert len(parts) > 1, "the rows were sent without the residual"
        if not kept:
            given = self._expert_work(work, dispatch, slots, sent)
            pair_of = pairs_by_slot(work.routing, dispatch)
            return self.kernels.expert_sum(given, pair_of, parts[1], prompt=work.chunk.is_prompt)
        last = KeptOutputs(dispatch, self._outputs(work, dispatch, slots, sent))
        found = [
            Contributions(part.rows, part.slots, cast("FloatArray", values))
            for part, values in (*kept, last)
        ]
        return self.kernels.dense.combine(parts[1], found, work.routing.expert_ids.shape[1])

    def _expert_work(
        self, work: LayerWork, dispatch: ExpertDispatch, slots: IntArray, sent: _SentRows
    ) -> ExpertWork:
        rows = np.searchsorted(sent.rows, dispatch.rows).astype(np.int32)
        x = sent.parts.result()[0]
        return ExpertWork(self.stack(work.layer), slots, dispatch.counts, x, rows, dispatch.weights)

    def _take(self, nbytes: int, what: str) -> None:
        missing = self._used_bytes + nbytes - self._memory_bytes
        if missing > 0:
            raise DeviceMemoryError(what, missing)
        self._used_bytes += nbytes

    def _make_pools(self) -> None:
        layers: dict[str, list[LayerIndex]] = {}
        for number in range(self._catalog.num_layers):
            layer = LayerIndex(number)
            if self._catalog.expert_bytes(layer):
                layers.setdefault(self._catalog.layout(layer), []).append(layer)
        for of_layout in layers.values():
            stack, nbytes = (
                self._catalog.stack(of_layout[0]),
                self._catalog.expert_bytes(of_layout[0]),
            )
            # Twice the experts: the same one may be promoted and uploaded at once.
            most = 2 * len(of_layout) * len(stack)
            num_slots = max(1, min(most, self._memory_bytes // nbytes))
            parts = _empty(stack, num_slots)
            pool = _Pool(nbytes, list(range(num_slots)))
            for layer in of_layout:
                self._pool_of[layer] = pool
                self._stacks[layer] = self._catalog.stack(layer).made_of(parts)


def _bytes_of(stack: ExpertStack, index: int) -> list[ByteArray]:
    """Return the matrices and biases of one expert, and their scales if any, as rows of bytes."""
    parts = [part.raw[index].reshape(-1) for part in stack.parts]
    scales = [part.scales[index : index + 1] for part in stack.parts if part.scales is not None]
    return parts + [scale.view(np.uint8) for scale in scales]


def _empty(like: ExpertStack, num_slots: int) -> list[WeightStack]:
    return [
        WeightStack(
            part.name,
            part.format,
            np.empty((num_slots, *part.raw.shape[1:]), np.uint8),
            part.cols,
            None if part.scales is None else np.ones(num_slots, np.float32),
        )
        for part in like.parts
    ]
