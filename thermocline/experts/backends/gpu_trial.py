"""Measures what experts cost a GPU, and checks that its outputs are the CPU's.

Blocks for some tenths of a second and while Triton compiles kernels; for the start.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.errors import DeviceFaultError, DeviceMemoryError
from thermocline.experts.backends.trial import (
    TRIAL_ROWS,
    TrialTimes,
    launch_overhead_seconds,
    least_seconds,
)
from thermocline.kernels.contract import ExpertWork
from thermocline.messages import ExpertDispatch, ExpertKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.experts.backends.gpu import GpuDevice
    from thermocline.experts.catalog import ExpertCatalog
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.weight import FloatArray, IntArray
    from thermocline.messages import LayerIndex
    from thermocline.workers.lane import LaneThread

# Mean square of the difference over that of the CPU's outputs. They round differently: 1e-4 is usual.
_MAX_ERROR: Final = 1e-2
# At a time: what they wait for at the end is not theirs.
_REPLAYS: Final = 32
_COMPARED_ROWS: Final = (1, 16)  # one of each arithmetic
_LEAST_S: Final = 1e-7
# Of a prompt's experts: what so many take beyond so few is what they cost where a layer has many. A few leave most of a
# large GPU idle, and take as long as more of them.
_FEW, _MANY = 16, 48
_COPIES: Final = 32
_ROWS_BACK: Final = 1024  # a prompt's outputs for the host: through memory that is not pinned


@dataclass(frozen=True, slots=True)
class GpuTrial:
    """`Trial` of a GPU. kernels: the CPU's, of so many threads. records_steps: whether what a recorded step costs matters.

    bulk: copies experts 0, 1, ... of a layer by one call, waits for them, and returns how many; None where nothing is copied so.
    """

    device: GpuDevice
    catalog: ExpertCatalog
    kernels: Kernels
    threads: int
    lane: LaneThread
    records_steps: bool = False
    bulk: Callable[[LayerIndex], int] | None = None

    def check(self, layer: LayerIndex) -> None:
        """Raise DeviceFaultError where outputs differ from the CPU's, DeviceMemoryError; measures nothing."""
        with ExitStack() as held:
            slots = self._take_slots(held, layer)
            self._copy(layer, slots, len(slots))
            self._compare_all(layer, slots)

    def times(self, layer: LayerIndex) -> TrialTimes:
        """See `Trial.times`. Raises what `check` does."""
        with ExitStack() as held:
            slots = self._take_slots(held, layer)
            copy_s = self._copy_seconds(layer, slots)
            self._compare_all(layer, slots)
            one_s = self._seconds(layer, slots[:1], 1)
            count = min(TRIAL_ROWS[1], len(slots))
            single_s = self._seconds(layer, slots[:count], 1)
            # A call costs what its first expert takes beyond another one.
            each_s = max((single_s - one_s) / max(count - 1, 1), _LEAST_S)
            call_s = max(one_s - each_s, 0.0)
            device = [each_s]
            for rows in tuple(TRIAL_ROWS)[1:]:
                few_s, many_s = (
                    self._seconds(layer, np.resize(slots, number), rows, fetches=False)
                    for number in (_FEW, _MANY)
                )
                device.append(max((many_s - few_s) / (_MANY - _FEW), device[-1]))
            recorded = self._recorded(layer, slots[:count]) if self.records_steps else None
        host_s = _least(partial(self._copy_on_host, layer))
        hidden_size = self.device.hidden_size(layer)
        rows_s = _least(lambda: self.device.empty_outputs(_ROWS_BACK, hidden_size)) / _ROWS_BACK
        with_rows = [
            each + rows * rows_s for rows, each in zip(TRIAL_ROWS, device, strict=True) if rows > 1
        ]
        return TrialTimes(
            (device[0], *with_rows),
            copy_s,
            call_s + launch_overhead_seconds(self.lane),
            min(1.0, host_s / copy_s) / self.threads,
            recorded,
            rows_s,
            self._bulk_copy_seconds(layer),
        )

    def _recorded(self, layer: LayerIndex, slots: IntArray) -> tuple[float, float] | None:
        """Return the seconds of one expert with one row and of the launch when replayed; None where nothing is recorded."""
        few, many = (self._replayed_seconds(layer, part) for part in (slots[:1], slots))
        if few is None or many is None:
            return None
        each_s = max((many - few) / max(len(slots) - 1, 1), _LEAST_S)
        return each_s, max(few - each_s, 0.0)

    def _replayed_seconds(self, layer: LayerIndex, slots: IntArray) -> float | None:
        """Return the seconds of a replay among many, which wait for nothing but the one before."""
        work, x = trial_dispatch(len(slots), 1, self.catalog.stack(layer).hidden_size)
        replay = self.device.recorded(layer, work, slots, self.device.sent(x))
        return None if replay is None else _least(partial(replay, _REPLAYS)) / _REPLAYS

    def _take_slots(self, held: ExitStack, layer: LayerIndex) -> IntArray:
        """Return some slots, at least one, with the layer's first experts in them."""
        wanted = min(max(TRIAL_ROWS.values()), len(self.catalog.stack(layer)))
        slots: list[int] = []
        for _ in range(wanted):
            try:
                slots.append(self.device.allocate(layer))
            except DeviceMemoryError:
                if not slots:
                    raise
                break
            held.callback(self.device.free, layer, slots[-1])
        return np.array(slots, np.int32)

    def _copy_seconds(self, layer: LayerIndex, slots: IntArray) -> float:
        """Return the seconds of an expert's copy, back to back with others, from memory."""
        self._copy(layer, slots, _COPIES)  # from the disk
        return max(_least(partial(self._copy, layer, slots, _COPIES)) / _COPIES, _LEAST_S)

    def _copy(self, layer: LayerIndex, slots: IntArray, number: int) -> None:
        """Copy the layer's first experts, each to its slot, so many copies back to back, and wait for them."""
        copies = [
            self.device.begin_copy(ExpertKey.of(layer, n % len(slots)), slot)
            for n, slot in enumerate(np.resize(slots, number).tolist())
        ]
        for copy in copies:
            copy.result()

    def _bulk_copy_seconds(self, layer: LayerIndex) -> float | None:
        if self.bulk is None:
            return None
        number = self.bulk(layer)
        return max(_least(partial(self.bulk, layer)) / number, _LEAST_S)

    def _copy_on_host(self, layer: LayerIndex) -> None:
        stack = self.catalog.stack(layer)
        for part in stack.parts:
            part.raw[0].copy()

    def _seconds(
        self, layer: LayerIndex, slots: IntArray, rows: int, *, fetches: bool = True
    ) -> float:
        """fetches: the outputs, too."""
        stack = self.catalog.stack(layer)
        work, x = trial_dispatch(len(slots), rows, stack.hidden_size)
        # Some take part several times, where many are measured.
        work = work._replace(experts=work.experts % len(stack))
        if fetches:
            return _least(lambda: self._outputs(layer, slots, work, x))
        sent = self.device.sent(x)
        return _least(lambda: self.device.computed(layer, work, slots, sent))

    def _outputs(
        self, layer: LayerIndex, slots: IntArray, work: ExpertDispatch, x: FloatArray
    ) -> FloatArray:
        sent = self.device.sent(x)
        prompt = bool(work.counts[0] > 1)
        return self.device.outputs(layer, work, slots, sent, prompt=prompt)

    def _compare_all(self, layer: LayerIndex, slots: IntArray) -> None:
        for rows in _COMPARED_ROWS:
            self._compare(layer, slots, rows)

    def _compare(self, layer: LayerIndex, slots: IntArray, rows: int) -> None:
        stack = self.catalog.stack(layer)
        work, x = trial_dispatch(len(slots), rows, stack.hidden_size)
        given = ExpertWork(stack, work.experts, work.counts, x, work.rows, work.weights)
        expected = self.kernels.expert_outputs(given, prompt=rows > 1)
        found = self._outputs(layer, slots, work, x)
        error = float(np.square(found - expected).mean() / max(np.square(expected).mean(), 1e-30))
        if not error <= _MAX_ERROR:  # NaN, too
            raise DeviceFaultError(
                f"experts of layer {layer} come out differently on {self.device} and on the CPU "
                f"(relative mean square {error:.2g}). Fix: another driver, torch or Triton, or compute "
                "experts on the CPU (--hot-device none)"
            )


def trial_dispatch(num_experts: int, rows: int, hidden: int) -> tuple[ExpertDispatch, FloatArray]:
    """Return a dispatch in which each of the first experts has the same tokens, and their activations."""
    x = np.random.default_rng(rows).standard_normal((rows, hidden)).astype(np.float32)
    tokens = np.tile(np.arange(rows, dtype=np.int32), num_experts)
    work = ExpertDispatch(
        np.arange(num_experts, dtype=np.int32),
        np.full(num_experts, rows, np.int32),
        tokens,
        np.zeros(len(tokens), np.int32),
        np.ones(len(tokens), np.float32),
    )
    return work, x


def _least(job: Callable[[], object]) -> float:
    job()  # compiles
    return least_seconds(job)
