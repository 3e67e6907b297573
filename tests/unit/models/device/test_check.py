"""What a device is tried with before it is used: every way of computing there, and nothing of it stays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.arch_cases import ARCH_CASES
from tests.support.capturing_device import Capturing, everything
from tests.support.kernel_cases import decoded
from tests.support.toy_archs import write_toy_arch
from tests.unit.kernels.test_whole_layer import BLOCK
from thermocline.errors import DeviceFaultError
from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.gpu import attention, weights
from thermocline.kernels.gpu.steps import StepBuffers
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kernels.weight import Weight
from thermocline.kv.cache import KVCacheSpec
from thermocline.messages import SegmentKind
from thermocline.modelfile.formats import FORMATS_BY_NAME
from thermocline.modelfile.reader import open_model_file
from thermocline.models.device import non_expert as device_non_expert
from thermocline.models.device.check import check_non_expert
from thermocline.models.device.non_expert import DeviceNonExpert
from thermocline.models.registry import open_model

WISH = KVCacheSpec(CacheType.F32, BLOCK, 12, 4, 0, 4)


@pytest.fixture(params=["laguna_default", "qwen35moe_default"])
def opened(request, tmp_path):
    """A model, and it on a device: windows in the one, recurrent states in the other."""
    case = next(case for case in ARCH_CASES if case.name == request.param)
    wish = replace(WISH, window_blocks=6) if request.param.startswith("laguna") else WISH
    with (
        open_model_file(write_toy_arch(tmp_path / "toy.gguf", case.toy)) as file,
        Capturing() as streams,
    ):
        kernels = ReferenceKernels()
        model = open_model(file, kernels)
        yield model, DeviceNonExpert(model, kernels, streams, wish), streams


@pytest.mark.parametrize("block_tokens", [16, 3, 1])
def test_a_good_device_passes_and_keeps_nothing(tmp_path, block_tokens):
    """Whatever the size of a block: caches, states, buffers and graphs are as they were."""
    case = next(case for case in ARCH_CASES if case.name == "qwen35moe_default")
    with open_model_file(write_toy_arch(tmp_path / "toy.gguf", case.toy)) as file:
        kernels = ReferenceKernels()
        model = open_model(file, kernels)
        with Capturing() as streams:
            wish = replace(WISH, block_tokens=block_tokens, num_blocks=20)
            check_non_expert(DeviceNonExpert(model, kernels, streams, wish), model)
            assert {*streams.events} == {"captured", "replayed"}


def test_decode_capture_replay_and_head_leave_no_trace(opened):
    """Each kind of layer is captured once and replayed twice; then nothing is left but the places of padding."""
    model, device, streams = opened
    check_non_expert(device, model)
    captured = streams.events.count("captured")
    assert captured > 0
    assert streams.events.count("replayed") == 2 * captured
    assert len(device._captured) == len(device._begun) == 0
    assert everything(device)
    for part in everything(device):
        assert not part.any(), "something that a request may have was written to"


@pytest.mark.parametrize("what", ["prompt", "decode", "replay", "context", "head"])
def test_a_device_that_is_wrong_somewhere_is_found_out(opened, monkeypatch, what):
    """In decode steps, replayed ones, those with long contexts, or the head alone; nothing stays then, either."""
    model, device, streams = opened
    if what == "head":
        head = device_non_expert._Head
        compute_head = head.__call__
        monkeypatch.setattr(head, "__call__", lambda self, x, **how: -compute_head(self, x, **how))
    elif what == "replay":
        capture = streams.capture

        def stale(work):
            capture(work)
            return lambda: None  # what lies there is the last step's

        monkeypatch.setattr(streams, "capture", stale)
    elif what == "context":
        attend = attention.naive_attention

        def short(q, span, cache, rule):
            found = attend(q, span, cache, rule)
            return found.neg() if int(span.positions.max()) > 2 * BLOCK else found

        monkeypatch.setattr(attention, "naive_attention", short)
    else:
        is_prompt = what == SegmentKind.PROMPT
        compute = StepBuffers._compute

        def wrong(self, layer) -> None:
            compute(self, layer)
            if self._inputs.is_prompt == is_prompt:
                self._out.neg_()

        monkeypatch.setattr(StepBuffers, "_compute", wrong)
    steps = {"head": "head of a prompt", "replay": "layer 0 of a decode"}
    step = steps.get(what, rf"layer \d of a {what.replace('context', 'prompt')}")
    with pytest.raises(DeviceFaultError, match=f"{step}.*comes out differently"):
        check_non_expert(device, model)
    assert len(device._captured) == len(device._begun) == 0


def test_each_format_is_tried(tmp_path, monkeypatch):
    """A layer whose matrices are of another format has device code of its own, which may be what is wrong."""
    case = next(case for case in ARCH_CASES if case.name == "olmoe_default")
    with open_model_file(write_toy_arch(tmp_path / "toy.gguf", case.toy)) as file:
        kernels = ReferenceKernels()
        model = open_model(file, kernels)
        parts = model.non_expert.layers[1]
        halves = decoded(parts.mixer.output).astype(np.float16)
        other = Weight("o", FORMATS_BY_NAME["F16"], halves.view(np.uint8), halves.shape[1])
        mixed = replace(parts, mixer=replace(parts.mixer, output=other))
        layers = [mixed if layer is parts else layer for layer in model.non_expert.layers]
        monkeypatch.setattr(model, "non_expert", replace(model.non_expert, layers=layers))
        monkeypatch.setattr(
            weights, "naive_block_product", lambda matrix, x, **_: x.new_ones(len(x), matrix.rows)
        )
        with Capturing() as streams:
            device = DeviceNonExpert(model, kernels, streams, WISH)
            with pytest.raises(DeviceFaultError, match="layer 1"):
                check_non_expert(device, model)
