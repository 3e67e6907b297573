"""A device on which a worker computes experts: holds those that its parents asked for, as far as it has room.

Owns the device, its slots and its memory. Loads torch only for a GPU. Knows no connection and no request. Outputs are
those of the device's kernels, which round differently from the CPU's on a GPU.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from thermocline.errors import ConfigError, DeviceMemoryError, ThermoclineError
from thermocline.experts.backends.hot_device import device_layers
from thermocline.experts.backends.simulated import CopyEngine, SimulatedDevice
from thermocline.experts.backends.slot_memory import SlotMemory
from thermocline.experts.placement.slots import plan_slots
from thermocline.kernels.contract import ExpertWork
from thermocline.kernels.gpu.requirements import why_no_gpu
from thermocline.messages import ExpertDispatch, ExpertKey, LayerIndex
from thermocline.traces.lanes import Lane
from thermocline.traces.recorder import NullRecorder
from thermocline.workers.lane import LaneThread

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from typing import Self

    from thermocline.experts.backends.contract import SlotDevice
    from thermocline.experts.catalog import ExpertCatalog
    from thermocline.kernels.contract import Kernels
    from thermocline.messages import FloatArray, IntArray
    from thermocline.traces.recorder import Recorder

DEVICES: Final = ("auto", "cuda", "torch-cpu", "simulated", "none")
"""What `worker --hot-device` takes."""

# Of a GPU's free memory: the rest is for activations, and for what others take.
_MEMORY_SHARE: Final = 0.85
# Of the simulated device: as fast as copies within memory.
_SIMULATED_BYTES_PER_S: Final = 10e9


class _Computes(Protocol):
    """What a device computes, on the calling thread."""

    def __call__(
        self,
        layer: LayerIndex,
        dispatch: ExpertDispatch,
        slots: IntArray,
        x: FloatArray,
        *,
        prompt: bool,
    ) -> FloatArray:
        """Return the weighted outputs, float32 [pairs, D]. x: float32 [n, D], to which the dispatch's rows point."""
        ...


@dataclass(frozen=True, slots=True)
class _OpenDevice:
    """name: as people are told; layers: those whose experts it can compute."""

    name: str
    device: SlotDevice
    layers: frozenset[LayerIndex]
    compute: _Computes


class DeviceExperts:
    """Experts on a device, shared by all of a worker's connections. Close it (or leave its context).

    Parents that hold the same expert share its slot. From any thread; one computes at a time.
    """

    def __init__(self, opened: _OpenDevice, owned: ExitStack) -> None:
        self._opened, self._owned = opened, owned
        self._lock = threading.Lock()
        self._slots: dict[ExpertKey, int] = {}
        self._num_holders = Counter[ExpertKey]()

    def __repr__(self) -> str:
        num_held = sum(count > 0 for count in self._num_holders.values())
        return f"DeviceExperts({self.name}, {len(self._slots)} experts, {num_held} held)"

    @property
    def name(self) -> str:
        """What the device is."""
        return self._opened.name

    def hold(self, held: Sequence[IntArray]) -> tuple[IntArray, ...]:
        """Return the slots of a parent's experts, by layer and place in its lists, int32; -1 where there is no room.

        The first places of all layers go first. Blocks until the experts are copied. Give them back with `release`.
        """
        slots = tuple(np.full(len(experts), -1, np.int32) for experts in held)
        with self._lock:
            copies = []
            wanted = {
                ExpertKey.of(layer, expert)
                for layer, experts in enumerate(held)
                for expert in experts.tolist()
            }
            for layer, place in _by_place(held):
                if layer not in self._opened.layers:
                    continue
                key = ExpertKey.of(layer, int(held[layer][place]))
                if key not in self._slots:
                    slot = self._allocate(layer, wanted)
                    if slot is None:
                        continue  # there may be room for another layer's
                    self._slots[key] = slot
                    copies.append(self._opened.device.begin_copy(key, slot))
                self._num_holders[key] += 1
                slots[layer][place] = self._slots[key]
            for copy in copies:
                copy.result()
        return slots

    def release(self, held: Sequence[IntArray], slots: Sequence[IntArray]) -> None:
        """Take back what `hold` returned. Nothing is computed with it any more.

        The experts stay until others want their room: a parent that did not wait for the copies finds them when it
        comes again.
        """
        with self._lock:
            for layer, of_layer in enumerate(slots):
                for place in np.flatnonzero(of_layer >= 0).tolist():
                    self._num_holders[ExpertKey.of(layer, int(held[layer][place]))] -= 1

    def _allocate(self, layer: LayerIndex, wanted: Collection[ExpertKey]) -> int | None:
        """Return a slot, None where there is no room even without the experts that nobody holds or wants."""
        device = self._opened.device
        with suppress(DeviceMemoryError):
            return device.allocate(layer)
        unheld = [key for key in self._slots if not self._num_holders[key] and key not in wanted]
        for key in unheld:
            device.free(key.layer, self._slots.pop(key))
        if unheld:
            with suppress(DeviceMemoryError):
                return device.allocate(layer)
        return None

    def outputs(self, layer: int, work: ExpertWork, slots: IntArray, *, prompt: bool) -> FloatArray:
        """Return what `Kernels.expert_outputs` does, of experts in slots, int32 [experts]. Blocks.

        Raises EngineError where the device fails.
        """
        none = np.zeros(len(work.rows), np.int32)
        dispatch = ExpertDispatch(work.experts, work.counts, work.rows, none, work.scale)
        with self._lock:
            return self._opened.compute(LayerIndex(layer), dispatch, slots, work.x, prompt=prompt)

    def close(self) -> None:
        """Let the device go."""
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class WorkerDeviceWish:
    """kind: one of DEVICES; memory_bytes: for experts, None is what is free. kernels: the CPU's, with so many threads, by which
    a GPU is judged. number: of the GPU, where there are several.
    """

    kind: str
    memory_bytes: int | None
    catalog: ExpertCatalog
    kernels: Kernels
    threads: int
    number: int | None = None


def open_wished_device(
    wish: WorkerDeviceWish, say: Callable[[str], object]
) -> DeviceExperts | None:
    """Return an open device, None for "none", and for "auto" where no GPU can be used: `say` is told why one that is there can not.

    Raises what `open_device_experts` does.
    """
    if wish.kind == "none" or (wish.kind == "auto" and why_no_gpu() is not None):
        return None
    if wish.kind != "auto":
        return open_device_experts(wish)
    try:
        return open_device_experts(replace(wish, kind="cuda"))
    except ThermoclineError as error:
        say(f"experts on the CPU: the GPU can not be used ({error})")
        return None


def open_device_experts(wish: WorkerDeviceWish) -> DeviceExperts:
    """Return an open device.

    Raises ConfigError, DeviceMissingError, DeviceMemoryError, and DeviceFaultError where a GPU's outputs differ.
    """
    with ExitStack() as owned:
        recorder = NullRecorder()
        copies = owned.enter_context(LaneThread(Lane.GPU_H2D, recorder))
        if wish.kind == "simulated":
            opened = _open_simulated(wish, copies, recorder)
        elif wish.kind in ("cuda", "torch-cpu"):
            opened = _open_gpu(wish, copies, recorder, owned)
        else:
            raise ConfigError(f"--hot-device {wish.kind}: use one of {', '.join(DEVICES)}")
        return DeviceExperts(opened, owned.pop_all())


def _open_simulated(wish: WorkerDeviceWish, copies: LaneThread, recorder: Recorder) -> _OpenDevice:
    catalog, memory_bytes = wish.catalog, wish.memory_bytes
    engine = CopyEngine(copies, _SIMULATED_BYTES_PER_S, recorder)
    limit = catalog.total_bytes if memory_bytes is None else memory_bytes
    # The caller computes what the simulation would run on a lane.
    device = SimulatedDevice(catalog, limit, wish.kernels, copies, engine)

    def compute(
        layer: LayerIndex, dispatch: ExpertDispatch, slots: IntArray, x: FloatArray, *, prompt: bool
    ) -> FloatArray:
        work = ExpertWork(
            device.stack(layer), slots, dispatch.counts, x, dispatch.rows, dispatch.weights
        )
        return wish.kernels.expert_outputs(work, prompt=prompt)

    return _OpenDevice("the simulated device", device, frozenset(catalog.routed_layers), compute)


def _open_gpu(
    wish: WorkerDeviceWish, copies: LaneThread, recorder: Recorder, owned: ExitStack
) -> _OpenDevice:
    from thermocline.kernels.gpu.requirements import require_packages

    require_packages()
    from thermocline.experts.backends.expert_copies import ExpertCopies
    from thermocline.experts.backends.gpu import GpuDevice
    from thermocline.experts.backends.gpu_trial import GpuTrial
    from thermocline.kernels.gpu.streams import DeviceStreams

    catalog, layers = wish.catalog, device_layers(wish.catalog)
    if not layers:
        raise ConfigError(
            "no layer's experts are of a type that the GPU's kernels read: use --hot-device none"
        )
    streams = owned.enter_context(DeviceStreams.open(wish.kind, wish.number))
    memory = _slots(catalog, layers, wish.memory_bytes, streams.free_bytes())
    lane = owned.enter_context(LaneThread(Lane.GPU_COMPUTE, recorder))
    mover = ExpertCopies(streams, copies, max(map(catalog.expert_bytes, layers)), recorder)
    device = GpuDevice(catalog, tuple(layers), memory, streams, lane, mover)
    GpuTrial(device, catalog, wish.kernels, wish.threads, lane).times(layers[0])

    def compute(
        layer: LayerIndex, dispatch: ExpertDispatch, slots: IntArray, x: FloatArray, *, prompt: bool
    ) -> FloatArray:
        return device.outputs(layer, dispatch, slots, device.sent(x), prompt=prompt)

    return _OpenDevice(str(streams.device), device, frozenset(layers), compute)


def _slots(
    catalog: ExpertCatalog,
    layers: Sequence[LayerIndex],
    memory_bytes: int | None,
    free_bytes: int | None,
) -> SlotMemory:
    """Return slots for as many experts of these layers as there is memory for, of each layout its share."""
    budget = catalog.total_bytes if free_bytes is None else int(free_bytes * _MEMORY_SHARE)
    if memory_bytes is not None:
        budget = min(budget, memory_bytes)
    sizes = {catalog.layout(layer): catalog.expert_bytes(layer) for layer in layers}
    num_layers = Counter(catalog.layout(layer) for layer in layers)
    num_experts = {name: count * catalog.num_experts for name, count in num_layers.items()}
    slots = plan_slots(sizes, num_experts, {}, budget)
    if not any(each.count for each in slots.values()):
        raise DeviceMemoryError(
            "a single expert", min(sizes.values()), fix="give it more (--device-memory)"
        )
    return SlotMemory(slots, 0)


def _by_place(held: Sequence[IntArray]) -> Iterator[tuple[LayerIndex, int]]:
    """Yield layers with places in their lists: the first place of all layers, then the second, and so on."""
    places = zip_longest(*(range(len(experts)) for experts in held))
    for row in places:
        for layer, place in enumerate(row):
            if place is not None:
                yield LayerIndex(layer), place
