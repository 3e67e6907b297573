"""A hot device is opened before anything depends on it, and only once."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from tests.support.toy_model import ToyShape, write_toy_model
from thermocline.config import EngineConfig, HeatConfig, PlacementConfig
from thermocline.engine import expert_placement
from thermocline.engine.build_context import BuildContext
from thermocline.engine.devices import Devices
from thermocline.errors import DeviceFaultError
from thermocline.experts.backends.hot_device import OpenGpu
from thermocline.experts.catalog import ExpertCatalog
from thermocline.experts.placement.allocation import allocate
from thermocline.experts.placement.initial import InitialPlacement
from thermocline.experts.placement.wish import device_needs, device_wish
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kv.cache import SequenceCache
from thermocline.kv.pool import KVPool
from thermocline.modelfile.reader import open_model_file
from thermocline.models.cache_size import cache_spec
from thermocline.models.prompt_limits import prompt_limits
from thermocline.models.registry import open_model
from thermocline.traces.recorder import MemoryRecorder

SHAPE = ToyShape(layers=2, formats={"gate_up": "Q8_0", "down": "Q8_0"})


@pytest.fixture
def log(monkeypatch):
    """What is opened and closed, in order."""
    log: list[object] = []

    @contextmanager
    def saver(initial):
        yield
        log.append(initial)

    monkeypatch.setattr(InitialPlacement, "heat_saver", saver)
    return log


@pytest.fixture
def context(tmp_path):
    """A GPU that is open and may have all experts, chosen by "auto"."""
    with ExitStack() as owned:
        file = owned.enter_context(open_model_file(write_toy_model(tmp_path / "m.gguf", SHAPE)))
        kernels, recorder = ReferenceKernels(), MemoryRecorder(8, enabled=False)
        config = EngineConfig(heat=HeatConfig(enabled=False), kernels="reference")
        chosen = PlacementConfig(
            hot_device="cuda", trunk_device="cpu", expert_cache="static", hot_fraction=1.0
        )
        model = open_model(file, kernels)
        limits = prompt_limits(config, model.spec, 0, 0)
        cache = cache_spec(config, model.spec, limits)
        needs = device_needs(file.tensors.values(), model.spec, cache, limits)
        allocation = allocate(
            needs.on_device, device_wish(config.placement, chosen, needs, 4 << 30)
        )
        gpu = OpenGpu(None, None)
        devices = Devices(chosen, None, gpu, needs, cache, allocation, ())
        kept = owned.enter_context(ExitStack())
        pools = SequenceCache(KVPool((), 1, 1))
        yield BuildContext(
            config, devices, file, model, kernels, recorder, limits, pools, owned, kept
        )


def opens(log, monkeypatch, error=None):
    """Replace `build_gpu_device` by one that opens something and then fails with `error`, if any."""

    def build_gpu_device(config, experts, gpu, memory, recorder, opened):
        log.append(f"open {experts.placement.num_hot}")
        opened.callback(log.append, "close")
        if error is not None:
            raise error
        return "device"

    monkeypatch.setattr(expert_placement, "build_gpu_device", build_gpu_device)


def place(context):
    """Place the model's experts."""
    return expert_placement.place_experts(context, ExpertCatalog(context.model.expert_layers))


def test_a_device_that_opens_is_closed_with_the_engine(context, log, monkeypatch):
    """The hot experts are on it, and the heat is kept when `kept` closes."""
    opens(log, monkeypatch)
    placed = place(context)
    cut = replace(context.devices, allocation=placed.devices.allocation)
    assert (placed.hot_device, placed.devices) == ("device", cut)
    assert 0 < cut.allocation.slot_bytes <= context.devices.allocation.expert_bytes
    assert placed.hot_mask.all()
    assert log == [f"open {placed.hot_mask.sum()}"]
    context.owned.close()
    assert log[1:] == ["close", placed.initial]


def test_a_gpu_that_nobody_asked_for_may_refuse(context, log, monkeypatch):
    """What it opened is closed at once, no expert is hot, and a single placement is kept to the end."""
    opens(log, monkeypatch, DeviceFaultError("boom"))
    placed = place(context)
    assert len(log) == 2
    assert log[1] == "close"
    assert placed.hot_device is None
    assert not placed.hot_mask.any()
    assert placed.devices.placement.hot_device == "none"
    assert "hot experts on the CPU" in placed.devices.reasons[0]
    assert "boom" in placed.devices.reasons[0]
    context.owned.close()
    assert log[2:] == [placed.initial]


def test_a_gpu_that_was_asked_for_raises(context, log, monkeypatch):
    """No silent other device, and nothing stays open."""
    opens(log, monkeypatch, DeviceFaultError("boom"))
    asked = replace(context.config, placement=PlacementConfig(hot_device="cuda"))
    with pytest.raises(DeviceFaultError, match="boom"):
        place(replace(context, config=asked))
    context.owned.close()
    assert log[1:] == ["close"]
