"""Plans of published models at usual device sizes, from metadata alone, against bytes counted by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from benchmarks.synthetic_model import SHAPES, has_more_bits, tensors_of, write_metadata
from thermocline.cli.device_plan import plan_device
from thermocline.config import EngineConfig, MemoryConfig, SchedulerConfig
from thermocline.experts.placement.planner import DeviceMemory
from thermocline.experts.placement.wish import device_needs
from thermocline.modelfile.reader import open_model_file
from thermocline.models.cache_size import cache_spec
from thermocline.models.prompt_limits import prompt_limits
from thermocline.models.registry import read_spec

GIB = 1 << 30
BLOCK_TOKENS = MemoryConfig().block_tokens
# Bytes of a block of 256 weights.
Q4_K, Q6_K = 144, 210


@dataclass(frozen=True)
class Published:
    """What a model's data sheet says: weights per matrix of an expert, cached numbers, recurrent states."""

    layers: int
    experts: int
    matrix: int
    num_cached: int
    """Numbers that one token leaves in all caches."""
    context: int
    """Tokens, as `thermocline plan` has them unless told."""
    rotary_dims: int
    """Of each head."""
    state_bytes: int = 0
    """Float32 of the delta rule and the convolution, in all recurrent layers."""


PUBLISHED = {
    "qwen3-30b-a3b": Published(48, 128, 2048 * 768, 48 * 2 * 4 * 128, 32768, 128),
    "qwen3.6-35b-a3b": Published(
        40,
        256,
        2048 * 512,
        10 * 2 * 2 * 256,
        32768,
        64,
        30 * 4 * (32 * 128 * 128 + 3 * (2 * 16 + 32) * 128),
    ),
    "olmoe-1b-7b": Published(16, 64, 2048 * 1024, 16 * 2 * 16 * 128, 4096, 128),
}
# Trunk without the embedding table, and that table, of the Q4_K_M files.
TRUNK_BYTES = {
    "qwen3-30b-a3b": (822_523_904, 175_030_272),
    "qwen3.6-35b-a3b": (1_379_707_392, 286_064_640),
    "olmoe-1b-7b": (253_077_504, 57_950_208),
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Specs and tensor tables of all three, each from a file that is a header and a hole."""
    folder = tmp_path_factory.mktemp("published")
    found = {}
    for name in PUBLISHED:
        with open_model_file(write_metadata(folder / f"{name}.gguf", name)) as file:
            found[name] = read_spec(file), tuple(file.tensors.values())
    return found


def routed_bytes(model: Published) -> tuple[int, int, int]:
    """Return one expert with a down matrix of four bits, one of six, and all experts."""
    small, large = (model.matrix * (2 * Q4_K + down) // 256 for down in (Q4_K, Q6_K))
    num_large = sum(has_more_bits(layer, model.layers) for layer in range(model.layers))
    total = model.experts * (num_large * large + (model.layers - num_large) * small)
    return small, large, total


def planned(opened, name, vram: int, kv_type: str = "f16"):
    """Return sizes and plan of a GPU with so many bytes, for two chunks of 512 tokens in flight."""
    spec, tensors = opened[name]
    config = EngineConfig(
        memory=MemoryConfig(kv_type=kv_type),
        scheduler=SchedulerConfig(prefill_chunk_tokens=512, max_prompt_chunks=2),
    )
    limits = prompt_limits(config, spec, 0, 0)
    cache = cache_spec(config, spec, limits)
    needs = device_needs(tensors, spec, cache, limits)
    memory = DeviceMemory(vram, vram)
    return needs.sizes, plan_device(config.placement, needs, memory, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("vram_gib", [8, 12, 16, 24])
@pytest.mark.parametrize(
    ("cache", "numerator"), [("f32", 128), ("bf16", 64), ("f16", 64), ("q8_0", 34)]
)
def test_every_byte_of_a_published_model_is_counted(opened, name, vram_gib, cache, numerator):
    """Non-expert weights, cache, uploads, workspace and experts add up; 32 numbers take `numerator` bytes."""
    model = PUBLISHED[name]
    sizes, plan = planned(opened, name, vram_gib * GIB, cache)
    small, large, routed = routed_bytes(model)
    trunk, embedding = TRUNK_BYTES[name]
    # One block and one state more than requests have: rows that fill up a step are written there. And four states for
    # rows of drafts.
    context = (model.context + BLOCK_TOKENS) * model.num_cached * numerator // 32
    context += 13 * model.state_bytes
    workspace = (768 << 20) + 4 * 12 * 512 * 2048
    assert plan.routed_expert_bytes == routed
    if vram_gib * GIB < trunk + context + workspace + (64 << 20):
        assert plan.trunk_layers_on_gpu == plan.kv_bytes == 0
        assert any("--ctx" in reason and "missing" in reason for reason in plan.reasons)
        return
    assert (plan.trunk_layers_on_gpu, plan.trunk_layers) == (model.layers, model.layers)
    # Cosines and sines of each position.
    assert plan.non_expert_bytes == trunk + model.context * 4 * model.rotary_dims
    assert plan.kv_bytes >= context
    assert plan.kv_contexts == 1 or plan.hot_expert_bytes == routed
    assert plan.workspace_bytes == plan.safety_bytes == workspace
    num_staged, rest = divmod(plan.staging_bytes, large)
    assert rest == 0
    # As many as the average layer lacks, in an eighth of the bytes at most; but sixteen.
    lacking = model.experts * (1 - plan.expert_budget_bytes / routed)
    eighth = (plan.staging_bytes + plan.expert_budget_bytes) / 8 / large
    assert num_staged == pytest.approx(max(min(lacking, eighth), 16), rel=0.06)
    room = vram_gib * GIB - workspace - plan.staging_bytes - trunk
    room -= context + model.context * 4 * model.rotary_dims
    assert 0 <= min(room, routed) - plan.expert_budget_bytes < small + large
    by_size = {small: 0, large: 0}
    for hot, layer in zip(plan.placement.hot, sizes.layers, strict=True):
        by_size[layer.expert] += len(hot)
    assert sum(nbytes * count for nbytes, count in by_size.items()) == plan.hot_expert_bytes
    assert sorted(plan.slots.values()) == sorted(filter(None, by_size.values()))
    assert plan.hot_expert_bytes == plan.expert_budget_bytes
    assert plan.device_bytes + plan.workspace_bytes <= vram_gib * GIB
    assert plan.host_bytes == embedding + routed - plan.hot_expert_bytes
    assert any("the whole trunk on the device" in reason for reason in plan.reasons)


def test_the_tensor_tables_are_those_of_the_data_sheets():
    """The files of these tests have the bytes that the sheets' dimensions make."""
    for name, model in PUBLISHED.items():
        tensors = tuple(tensors_of(SHAPES[name], model.layers, "Q4_K_M"))
        experts = sum(tensor.nbytes for tensor in tensors if "_exps" in tensor.name)
        assert experts == routed_bytes(model)[2]
        assert sum(tensor.nbytes for tensor in tensors) - experts == sum(TRUNK_BYTES[name])
