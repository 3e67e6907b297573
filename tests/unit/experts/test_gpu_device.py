"""A GPU's experts, on torch's CPU: bytes arrive, work is the CPU's, what fails is told, and speeds are measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.compare import assert_within
from tests.support.devices import DEVICES
from tests.support.kernel_cases import expert_work, make_expert, make_weight
from thermocline.calibration.gpu_speeds import measure_gpu
from thermocline.errors import DeviceFaultError, EngineClosedError
from thermocline.experts.backends.expert_copies import ExpertCopies, slot_bytes, slot_parts
from thermocline.experts.backends.gpu import GpuDevice
from thermocline.experts.backends.gpu_trial import GpuTrial
from thermocline.experts.backends.gpu_warm_up import compile_experts
from thermocline.experts.backends.slot_memory import SlotMemory
from thermocline.experts.backends.trial import TRIAL_ROWS
from thermocline.experts.placement.slots import UNIT_BYTES, LayoutSlots
from thermocline.kernels.gpu.expert_ffn import DECODE, PROMPT
from thermocline.kernels.gpu.streams import DeviceStreams
from thermocline.kernels.reference import ReferenceKernels
from thermocline.messages import ExpertDispatch, ExpertIndex, ExpertKey, LayerIndex
from thermocline.traces.lanes import Lane
from thermocline.traces.recorder import MemoryRecorder
from thermocline.workers.lane import LaneThread

NUM_EXPERTS = 6
LAYERS = (LayerIndex(0), LayerIndex(1), LayerIndex(2))
FORMATS = (("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "Q4_0", "F16"), ("IQ2_XXS", "IQ3_S", "NVFP4"))
SCALED = LAYERS[2]


class Experts:
    """Stands in for the catalog: a layer of each layout."""

    num_layers, num_experts, routed_layers = len(LAYERS), NUM_EXPERTS, list(LAYERS)

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        self.works = []
        for formats in FORMATS:
            experts = [make_expert(rng, formats, 256, 256, make_weight) for _ in range(NUM_EXPERTS)]
            self.works.append(expert_work(rng, experts, (3, 0, 1, 2, 0, 1), tokens=5))
        stack = self.works[SCALED].stack
        gate, down = (
            replace(part, scales=rng.uniform(0.3, 3.0, NUM_EXPERTS).astype(np.float32))
            for part in (stack.gate, stack.down)
        )
        stack = replace(stack, gate=gate, down=down)
        self.works[SCALED] = replace(self.works[SCALED], stack=stack)

    def stack(self, layer: int):
        return self.works[layer].stack

    def expert_bytes(self, layer: int) -> int:
        return self.stack(layer)[0].nbytes

    def layout(self, layer: int) -> str:
        return ",".join(FORMATS[layer])


class Opened:
    """A device with room for some experts of each layout."""

    def __init__(self, kind: str, experts: Experts, recorder: MemoryRecorder) -> None:
        self.streams = DeviceStreams.open(kind)
        self.copies, self.lane = LaneThread(Lane.GPU_H2D, recorder), LaneThread(Lane.HOT, recorder)
        sizes = {experts.layout(layer): slot_bytes(experts.stack(layer)) for layer in LAYERS}
        self.memory = SlotMemory({name: LayoutSlots(size, 4) for name, size in sizes.items()}, 3)
        mover = ExpertCopies(self.streams, self.copies, max(sizes.values()), recorder)
        self.device = GpuDevice(experts, LAYERS, self.memory, self.streams, self.lane, mover)

    def close(self) -> None:
        self.lane.close()
        self.copies.close()
        self.streams.close()


@pytest.fixture(params=DEVICES)
def opened(request):
    """The device, its experts and a recorder."""
    recorder, experts = MemoryRecorder(1 << 12), Experts()
    one = Opened(request.param, experts, recorder)
    yield one, experts
    one.close()


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("prompt", [False, True])
def test_experts_arrive_and_compute_what_the_cpu_does(opened, layer, prompt):
    """All slots of a layout and the spare ones, copies in flight together, outputs as the reference's."""
    one, experts = opened
    slots = [one.device.allocate(layer) for _ in range(NUM_EXPERTS)]
    copies = [
        one.device.begin_copy(ExpertKey(layer, ExpertIndex(n)), slot, urgent=n % 2 == 0)
        for n, slot in enumerate(slots)
    ]
    for copy in copies:
        copy.result(20)
    work = experts.works[layer]
    share = ExpertDispatch(
        work.experts, work.counts, work.rows, np.zeros_like(work.rows), work.scale
    )
    at = np.array(slots, np.int32)[work.experts]
    found = one.device.outputs(layer, share, at, one.device.sent(work.x), prompt=prompt)
    exact = not prompt or one.streams.device.type == "cpu"
    tolerance = "device/float32" if exact else "device/bfloat16"
    assert_within(found, ReferenceKernels().expert_outputs(work), tolerance)
    for slot in slots:
        one.device.free(layer, slot)
    assert [one.device.allocate(layer) for _ in slots] == slots


def test_bytes_of_a_slot_are_those_of_the_file(opened):
    """Gate, up and down, one behind the other, each where a load of 16 bytes may begin; neighbours keep theirs."""
    one, experts = opened
    slots = {layer: one.device.allocate(layer) for layer in LAYERS}
    for layer, slot in slots.items():
        one.device.begin_copy(ExpertKey(layer, ExpertIndex(4)), slot).result(20)
    memory = one.device.arena.cpu().numpy()
    for layer, slot in slots.items():
        start = slot * UNIT_BYTES
        for part in slot_parts(experts.stack(layer)):
            assert part.start % 16 == 0
            found = memory[start + part.start :][: part.nbytes]
            np.testing.assert_array_equal(found, part.stack.raw[4].reshape(-1))


def test_a_copy_that_fails_is_told_and_the_next_one_comes(opened, monkeypatch):
    """What a read raises reaches who waits; after closing there is an error, too."""
    one, _ = opened
    key, slot = ExpertKey(LAYERS[0], ExpertIndex(1)), one.device.allocate(LAYERS[0])
    with monkeypatch.context() as patch:
        patch.setattr(np, "copyto", lambda *_: (_ for _ in ()).throw(OSError("gone")))
        with pytest.raises(OSError, match="gone"):
            one.device.begin_copy(key, slot).result(20)
    one.device.begin_copy(key, slot).result(20)
    one.copies.close()
    with pytest.raises(EngineClosedError):
        one.device.begin_copy(key, slot)


def test_a_trial_finds_costs_and_gives_its_slots_back(opened):
    """Seconds that ascend with rows, a copy's time, and what a layer costs at least."""
    one, experts = opened
    trial = GpuTrial(one.device, experts, ReferenceKernels(), 1, one.lane)
    for layer in LAYERS:
        found = trial.times(layer)
        assert len(found.device_s) == len(TRIAL_ROWS)
        # Means of what falls are equal but for their last bits.
        assert 0 < found.device_s[0] <= found.device_s[-1] * (1 + 1e-12)
        assert found.copy_s > 0 < found.launch_overhead_s
        assert 0 < found.copy_slowdown <= 1
        assert found.recorded is None  # nobody asked
        trial.check(layer)
    slots = [one.device.allocate(LAYERS[0]) for _ in range(4)]
    assert len(set(slots)) == 4


def test_experts_in_a_recorded_step_are_timed(opened, monkeypatch):
    """What a decode step costs that was recorded: less than a launch by the host, which a step does not have."""
    one, experts = opened
    events = []

    def capture(_, work):
        events.append("captured")
        return lambda: events.append("replayed")

    monkeypatch.setattr(DeviceStreams, "can_capture", True)
    monkeypatch.setattr(DeviceStreams, "capture", capture)
    trial = GpuTrial(one.device, experts, ReferenceKernels(), 1, one.lane, records_steps=True)
    found = trial.times(LAYERS[0])
    assert events.count("captured") == 2
    assert events.count("replayed") >= 64
    each_s, launch_s = found.recorded
    assert 0 < each_s < found.device_s[0] + found.launch_overhead_s
    assert launch_s >= 0

    def refuse(_, work):
        raise RuntimeError("nothing can be captured")

    monkeypatch.setattr(DeviceStreams, "capture", refuse)
    assert trial.times(LAYERS[0]).recorded is None


def test_a_device_that_computes_something_else_is_found_out(opened, monkeypatch):
    """One wrong expert is enough."""
    one, experts = opened
    outputs = one.device.outputs

    def wrong(layer, share, slots, sent, *, prompt):
        values = outputs(layer, share, slots, sent, prompt=prompt)
        values[-1] = -values[-1]
        return values

    monkeypatch.setattr(GpuDevice, "outputs", lambda _, *args, **kinds: wrong(*args, **kinds))
    trial = GpuTrial(one.device, experts, ReferenceKernels(), 1, one.lane)
    for look in (trial.times, trial.check):
        with pytest.raises(DeviceFaultError, match="layer 0 come out differently"):
            look(LAYERS[0])


@pytest.mark.parametrize("kind", DEVICES)
def test_speeds_of_a_device(kind):
    """Every rate is above nothing."""
    speeds = measure_gpu(kind, Experts(), ReferenceKernels(), 1)
    assert speeds.name
    rates = (
        speeds.read_bytes_per_s,
        speeds.multiply_adds_per_s,
        speeds.pinned_to_device_bytes_per_s,
        speeds.pageable_to_device_bytes_per_s,
        speeds.pinned_to_host_bytes_per_s,
        speeds.pageable_to_host_bytes_per_s,
        speeds.launch_s,
    )
    assert min(rates) > 0


def test_tiles_of_every_size_are_computed_before_requests(opened, monkeypatch):
    """One expert, and more than fit the smaller kernel that lays out tiles, where a layer has so many."""
    one, experts = opened
    monkeypatch.setattr(experts, "num_experts", 80, raising=False)
    found = set()

    def outputs(layer, work, slots, sent, *, prompt):
        form = PROMPT if prompt else DECODE
        num_pairs, num_experts = len(work.rows), len(work.experts)
        assert len(sent.host) == num_pairs / num_experts
        assert slots.tolist() == [0] * num_experts
        found.add((layer, prompt, form.pairs_per_tile(num_pairs, num_experts), num_experts))

    sums = []
    monkeypatch.setattr(one.device, "outputs", outputs)
    empty_sum = one.device.empty_sum
    monkeypatch.setattr(one.device, "empty_sum", lambda *sizes: sums.append(empty_sum(*sizes)))
    compile_experts(one.device, 3)
    assert [each.tolist() for each in sums] == [[[0.0] * 256]]
    tiles = [(form is PROMPT, size) for form in (DECODE, PROMPT) for size in form.tile_pairs]
    assert found == {
        (layer, *tile, count) for layer in LAYERS for tile in tiles for count in (1, 65)
    }


def test_experts_that_can_not_be_computed_at_the_start_are_logged(opened, monkeypatch, caplog):
    """Their tiles are named; a device that fails for good ends the start."""
    one, _ = opened

    def outputs(layer, work, slots, sent, *, prompt):
        if prompt:
            raise ValueError("too much shared memory")

    monkeypatch.setattr(one.device, "outputs", outputs)
    compile_experts(one.device, 3)
    assert len(caplog.messages) == len(LAYERS) * len(PROMPT.tile_pairs)
    assert "layer 0 in tiles of 16 could not be computed" in caplog.text

    def dead(*_, **__):
        raise DeviceFaultError("gone")

    monkeypatch.setattr(one.device, "outputs", dead)
    with pytest.raises(DeviceFaultError, match="gone"):
        compile_experts(one.device, 3)
