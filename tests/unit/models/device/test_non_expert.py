"""A model's non-expert weights on a device, layer by layer against the CPU's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.arch_cases import ARCH_CASES
from tests.support.compare import assert_within
from tests.support.device_blocks import blocks_of
from tests.support.devices import DEVICES
from tests.support.toy_archs import write_toy_arch
from tests.support.toy_model import write_toy_model
from tests.unit.kernels.test_whole_layer import BLOCK, cache_of, chunk_of
from thermocline.errors import DeviceMemoryError
from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.gpu.streams import DeviceStreams
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kv.cache import KVCacheSpec
from thermocline.messages import ChunkId, LayerIndex, SegmentKind
from thermocline.modelfile.reader import open_model_file
from thermocline.models.device.non_expert import DeviceNonExpert
from thermocline.models.registry import open_model

WISH = KVCacheSpec(CacheType.F32, BLOCK, 12, 4, 0, 4)
_NAMES = ("_odd", "_default", "_lite", "_all_routed")
CASES = [
    case
    for case in ARCH_CASES
    if case.name.endswith(_NAMES) and "attention.indexer.top_k" not in case.toy.extra
]


@pytest.fixture(params=DEVICES)
def streams(request):
    """A device, closed at the end."""
    with DeviceStreams.open(request.param) as opened:
        yield opened


def prompt_then_answers(states: bool):
    """Return chunks of three sequences: their prompts, then two steps of answers; nothing before them."""
    lengths = [9, 1, 22]
    chunks = [chunk_of(lengths, [0, 0, 0], SegmentKind.PROMPT)]
    for step in range(2):
        starts = [length + step for length in lengths]
        chunks.append(chunk_of([1] * 3, starts, SegmentKind.DECODE))
    return [replace(chunk, id=ChunkId(number)) for number, chunk in enumerate(chunks)]


def compare_layers(path, streams) -> None:
    with open_model_file(path) as file:
        kernels = ReferenceKernels()
        model = open_model(file, kernels)
        # Layers with a window have blocks of their own, here under the same numbers.
        windows = {"window_blocks": WISH.num_blocks} if model.spec.window_layers else {}
        device = DeviceNonExpert(model, kernels, streams, replace(WISH, **windows))
        cache, rng = cache_of(model.spec, CacheType.F32), np.random.default_rng(3)
        for given in prompt_then_answers(model.spec.state is not None):
            chunk = replace(given, window_places=given.places(window=False)) if windows else given
            prompt, shape = chunk.is_prompt, (chunk.num_tokens, model.spec.hidden_size)
            x = rng.standard_normal(shape).astype(np.float32)
            for layer in map(LayerIndex, range(model.spec.num_layers)):
                attended = model.attend(layer, chunk, x, cache)
                expected = model.route(layer, chunk, attended)
                found = device.attend_and_route(layer, chunk, x)
                assert_within(found.residual, expected.residual, "non-expert/float32")
                assert_within(found.x, expected.x, "non-expert/float32")
                if expected.ending is not None:
                    ours, theirs = found.ending.finish(found.x), expected.ending.finish(expected.x)
                    assert_within(ours, theirs, "non-expert/float32")
                ids, weights = found.routing.expert_ids, found.routing.weights
                np.testing.assert_array_equal(ids, expected.routing.expert_ids)
                np.testing.assert_allclose(weights, expected.routing.weights, rtol=1e-4)
                assert ids.dtype == np.int32
            logits = device.head(x, prompt=prompt)
            assert_within(logits, model.head(x, prompt=prompt), "non-expert/float32")
        assert not device._begun, "a chunk that has left is remembered"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layer_is_the_cpus(tmp_path, streams, case):
    """Prompts, then answers over what they left: all architectures, with sizes that hurt."""
    compare_layers(write_toy_arch(tmp_path / "toy.gguf", case.toy), streams)


def test_every_layer_of_qwen3moe_is_the_cpus(tmp_path, streams):
    """The same for the first architecture."""
    compare_layers(write_toy_model(tmp_path / "toy.gguf"), streams)


def test_after_a_chunk_whose_memory_runs_out_others_are_computed(tmp_path, streams, monkeypatch):
    """The error is typed; what was kept for later is let go; the next chunk is computed."""
    path = write_toy_model(tmp_path / "toy.gguf")
    with open_model_file(path) as file:
        kernels = ReferenceKernels()
        device = DeviceNonExpert(open_model(file, kernels), kernels, streams, WISH)
        chunk = chunk_of([1], [0], SegmentKind.DECODE)
        x = np.ones((1, 64), np.float32)
        expected = device.attend_and_route(LayerIndex(0), chunk, x)
        assert len(device._captured) == 1

        def full(*args, **rest):
            raise torch.OutOfMemoryError("tried to allocate 1 GiB. There is none")

        with monkeypatch.context() as broken:
            broken.setattr("thermocline.kernels.gpu.layer.rms_norm", full)
            with pytest.raises(DeviceMemoryError, match="tried to allocate 1 GiB"):
                device.attend_and_route(LayerIndex(0), chunk, x)
        assert len(device._captured) == len(device._begun) == 0
        again = device.attend_and_route(LayerIndex(0), replace(chunk, id=ChunkId(5)), x)
        assert_within(again.residual, expected.residual, "non-expert/float32")


@pytest.mark.parametrize("arch", ["laguna", "qwen35moe"])
def test_rows_of_padding_write_nowhere_and_change_no_bit(tmp_path, streams, arch):
    """Three tokens take four rows: whatever lies in the fourth's places, the results and all other places stay."""
    case = next(case for case in CASES if case.name == f"{arch}_default")
    chunk = chunk_of([1] * 3, [9, 1, 22], SegmentKind.DECODE)
    with open_model_file(write_toy_arch(tmp_path / "toy.gguf", case.toy)) as file:
        kernels, found = ReferenceKernels(), {}
        model = open_model(file, kernels)
        x = np.random.default_rng(3).standard_normal((3, model.spec.hidden_size)).astype(np.float32)
        for filling in (0.0, float("nan")):
            device = DeviceNonExpert(model, kernels, streams, WISH)
            assert device.num_blocks == WISH.num_blocks
            kept = memories(device)
            with torch.inference_mode():
                for memory in kept:
                    memory.fill_(7.0)
                    memory[-1] = filling
            routed = [
                device.attend_and_route(LayerIndex(layer), chunk, x)
                for layer in range(model.spec.num_layers)
            ]
            found[filling] = [
                (one.residual, one.x, one.routing.expert_ids, one.routing.weights) for one in routed
            ]
            for memory in kept:
                is_cache = memory.shape[1:2] == (BLOCK,) and memory.ndim == 4
                rows = memory.flatten(0, 1) if is_cache else memory
                mine = chunk.kv_slots.tolist() if is_cache else [0, 1, 2]
                others = sorted({*range(len(rows) - (BLOCK if is_cache else 1))} - {*mine})
                assert (rows[others] == 7.0).all(), "a place that no token has was written to"
                assert (rows[mine] != 7.0).any(), "nothing was written"
        for one, other in zip(*found.values(), strict=True):
            assert one[0].shape == x.shape
            for mine, theirs in zip(one, other, strict=True):
                np.testing.assert_array_equal(mine, theirs)


def memories(device: DeviceNonExpert) -> list[torch.Tensor]:
    """Return all that a device remembers, caches by block, the places of padding last."""
    found = blocks_of(device)
    return found + [part for one in device._states.values() for part in (one.conv, one.recurrent)]
