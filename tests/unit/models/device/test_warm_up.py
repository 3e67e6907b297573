"""What is compiled and captured before the first request, and that nothing else is captured afterwards."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from tests.support.arch_cases import ARCH_CASES
from tests.support.capturing_device import Capturing, everything
from tests.support.toy_archs import write_toy_arch
from tests.unit.kernels.test_whole_layer import BLOCK, chunk_of
from thermocline.errors import DeviceFaultError
from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.gpu.steps import StepBuffers
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kv.cache import KVCacheSpec
from thermocline.messages import ChunkId, LayerIndex, SegmentKind, StateUse
from thermocline.modelfile.reader import open_model_file
from thermocline.models.device.non_expert import DeviceNonExpert
from thermocline.models.device.warm_up import warm_up
from thermocline.models.registry import open_model

WISH = KVCacheSpec(CacheType.F32, BLOCK, 12, 4, 0, 4)
NUM_SIZES = 3  # batches of 1, 2 and 4 for three requests


@pytest.fixture(params=["laguna_default", "qwen35moe_default"])
def opened(request, tmp_path):
    """A model on a device: windows in the one, recurrent states in the other."""
    case = next(case for case in ARCH_CASES if case.name == request.param)
    with (
        open_model_file(write_toy_arch(tmp_path / "toy.gguf", case.toy)) as file,
        Capturing() as streams,
    ):
        kernels = ReferenceKernels()
        yield DeviceNonExpert(open_model(file, kernels), kernels, streams, WISH), streams


def answer(device: DeviceNonExpert, positions: list[int], number: int) -> None:
    """Compute one step of answers at these positions."""
    chunk = chunk_of([1] * len(positions), positions, SegmentKind.DECODE)
    x = np.ones((len(positions), device.spec.hidden_size), np.float32)
    for layer in map(LayerIndex, range(device.spec.num_layers)):
        device.attend_and_route(layer, replace(chunk, id=ChunkId(number)), x)


def test_no_context_and_no_batch_is_captured_later(opened, caplog):
    """One graph of each layer, and of the head, and size of a batch, before any request: contexts grow over borders of blocks, and mix."""
    device, streams = opened
    with caplog.at_level(logging.INFO, "thermocline.devices"):
        warm_up(device, 3, None)
    captured = NUM_SIZES * (device.spec.num_layers + 1)  # the head, too
    assert streams.events.count("captured") == device.num_captured == captured
    for part in everything(device):
        assert not part.any(), "something that a request may have was written to"
    (line,) = caplog.messages
    assert f"decode steps of up to 4 tokens are {captured} captured graphs" in line
    streams.events.clear()
    last = 4 * BLOCK - 1
    steps = [[n] for n in (0, 1, BLOCK - 1, BLOCK, last)]
    steps += [[BLOCK - 1, last], [BLOCK, 2 * BLOCK], [0, 3 * BLOCK, 7], [last, last, last]]
    for number, positions in enumerate(steps):
        answer(device, positions, number)
    assert streams.events == ["replayed"] * device.spec.num_layers * len(steps)


def test_steps_of_one_answer_with_drafts_are_captured_too(opened):
    """Up to seven drafted tokens, wherever they are; models without states need no more graphs than larger batches."""
    device, streams = opened
    warm_up(device, 3, None, drafts=True)
    sizes = NUM_SIZES + 1 + (2 if device.is_recurrent else 0)
    heads = NUM_SIZES + 1
    assert device.num_captured == sizes * device.spec.num_layers + heads
    for part in everything(device):
        assert not part.any(), "something that a request may have was written to"
    streams.events.clear()
    for number, (rows, start) in enumerate([(2, 0), (3, 5), (4, BLOCK), (5, 2), (8, 2 * BLOCK)]):
        chunk = chunk_of([rows], [start], SegmentKind.DECODE)
        saves = tuple((count, 1 + count % 2) for count in range(1, rows))
        segment = chunk.segments[0]._replace(num_drafted=rows - 1, state=StateUse(0, saves=saves))
        windows = chunk.window_places
        if windows is not None:
            own = windows.segments[0]._replace(num_drafted=rows - 1)
            windows = windows._replace(segments=(own,))
        chunk = replace(chunk, id=ChunkId(number), segments=(segment,), window_places=windows)
        x = np.ones((rows, device.spec.hidden_size), np.float32)
        for layer in map(LayerIndex, range(device.spec.num_layers)):
            device.attend_and_route(layer, chunk, x)
    assert streams.events == ["replayed"] * device.spec.num_layers * 5


def test_what_fails_is_logged_and_the_rest_is_captured(opened, caplog, monkeypatch):
    """A kernel that a prompt of one size needs can not be compiled: requests with others go on."""
    device, _streams = opened
    compute = StepBuffers._compute

    def fail_at_32(self, layer) -> None:
        if self._tokens == 32:
            raise ValueError("no kernel for this")
        compute(self, layer)

    monkeypatch.setattr(StepBuffers, "_compute", fail_at_32)
    with caplog.at_level(logging.INFO, "thermocline.devices"):
        warm_up(device, 3, None)
    failed, ready = caplog.messages
    assert "prompt of 32 tokens" in failed
    assert "no kernel for this" in failed
    assert "1 of 7 shapes failed" in ready
    assert device.num_captured == NUM_SIZES * (device.spec.num_layers + 1)


def test_a_device_that_fails_for_good_is_told(opened, monkeypatch):
    """Nothing is tried on it any more."""
    device, _ = opened
    tried = []

    def dead(self, layer) -> None:
        tried.append(layer)
        raise DeviceFaultError("the device does not work any more")

    monkeypatch.setattr(StepBuffers, "_compute", dead)
    with pytest.raises(DeviceFaultError, match="any more"):
        warm_up(device, 3, None)
    assert len(tried) == 1
