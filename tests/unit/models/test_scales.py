"""Numbers that files keep beside their blocks: one per matrix, one per expert, which products are multiplied by.

Scales that are powers of two change no digit, so that a file of W / s with scale s answers as the file of W does,
to the bit, whatever computes it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.compare import assert_within
from tests.support.devices import DEVICES
from tests.support.engine_runs import EXACT_CACHE, greedy_tokens, prompt_logits
from tests.support.toy_archs import ToyArch, toy_arch_weights, write_toy_arch
from tests.support.toy_model import ToyShape, toy_weights, write_toy_model
from thermocline import Engine, EngineConfig, PlacementConfig, RemoteConfig, SchedulerConfig
from thermocline.cli.info import inspect
from thermocline.config import CpuConfig
from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.experts.backends.hot_device import device_layers
from thermocline.experts.catalog import ExpertCatalog
from thermocline.kernels import _native
from thermocline.kernels.reference import ReferenceKernels
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model

PROMPT = [int(t) for t in np.random.default_rng(3).integers(0, 256, 40)]
MIX = {"attn": "Q8_0", "gate_up": "Q8_0", "down": "Q4_0", "output": "Q8_0"}
TOYS = {
    "qwen3moe": ToyShape(formats=MIX),
    "olmoe": ToyArch("olmoe", layers=2, kv_heads=4),
    "qwen2moe": ToyArch("qwen2moe", layers=2, shared=64, formats=MIX),
    "qwen35moe": ToyArch("qwen35moe", layers=2, interval=2, rotary=8, shared=64, formats=MIX),
    "fused": ToyArch("qwen35moe", layers=2, interval=2, rotary=8, fused=True),
    "qwen3next": ToyArch("qwen3next", layers=2, interval=2, rotary=8),
    "laguna": ToyArch("laguna", layers=5, rotary=8, window=16, shared=64, formats=MIX),
}
ALL_TOYS = pytest.mark.parametrize("toy", TOYS.values(), ids=TOYS)
MARK = np.float32(12345.678)
NO_PRODUCTS = ("token_embd.", "ssm_conv1d.")


def weights_of(toy):
    """The toy's tensors by name."""
    return toy_weights(toy) if isinstance(toy, ToyShape) else toy_arch_weights(toy)


def write(path, toy, weights, **options):
    """Write the toy with these tensors."""
    writer = write_toy_model if isinstance(toy, ToyShape) else write_toy_arch
    return writer(path, toy, weights=weights, **options)


def scaled(weights, *, powers=True, seed=5):
    """The same model with a scale beside every matrix, and what rounds activations elsewhere."""
    rng = np.random.default_rng(seed)
    result = dict(weights)
    for name, values in weights.items():
        is_product = values.ndim > 1 or "ffn_gate_inp_shexp" in name
        if not is_product or any(part in name for part in NO_PRODUCTS):
            continue
        exponents = rng.uniform(-3, 3, values.shape[0] if values.ndim == 3 else 1)
        scales = np.exp2(np.round(exponents) if powers else exponents).astype(np.float32)
        each = scales.reshape(-1, 1, 1) if values.ndim == 3 else scales
        stem = name.removesuffix(".weight")
        result[name] = values / each
        result[f"{stem}.scale"] = scales
        result[f"{stem}.input_scale"] = np.full_like(scales, 0.3)
    assert sum(name.endswith(".scale") for name in result) > 8
    return result


async def answer(path, config):
    """Return the logits of a prompt of two chunks, and a greedy answer after it."""
    async with Engine.open(path, config) as engine:
        logits = await prompt_logits(engine, PROMPT)
        return logits, await greedy_tokens(engine, PROMPT, 8)


def config(remote=None, **placement):
    """An engine's settings with a chunk shorter than the prompt."""
    return EngineConfig(
        memory=EXACT_CACHE,
        scheduler=SchedulerConfig(prefill_chunk_tokens=32),
        placement=PlacementConfig(**placement),
        remote=remote or RemoteConfig(),
    )


@pytest.mark.slow
@ALL_TOYS
async def test_native_kernels_take_them(tmp_path, toy):
    """Prompt and answer are those of the file without scales, to the bit: in the fused layer, too."""
    weights = weights_of(toy)
    plain = write(tmp_path / "plain.gguf", toy, weights)
    other = write(tmp_path / "scaled.gguf", toy, scaled(weights))
    (logits, tokens), (expected, expected_tokens) = (
        await answer(other, config()),
        await answer(plain, config()),
    )
    assert np.array_equal(logits, expected)
    assert tokens == expected_tokens
    assert len(set(tokens)) > 2, "a model that repeats one token proves nothing"


@pytest.mark.slow
@pytest.mark.skipif(
    "amx_emulated" not in _native.emulated_sets(), reason="needs a processor with AVX-512"
)
@pytest.mark.parametrize("name", ["qwen35moe", "laguna"])
async def test_matrix_tiles_take_them(tmp_path, name):
    """Prompts in the tiles of a processor that has them (here an emulator's) are the same, to the bit."""
    toy = TOYS[name]
    weights = weights_of(toy)
    settings = EngineConfig(memory=EXACT_CACHE, cpu=CpuConfig(isa="amx_emulated"))
    logits = []
    for stem, tensors in (("plain", weights), ("scaled", scaled(weights))):
        async with Engine.open(write(tmp_path / f"{stem}.gguf", toy, tensors), settings) as engine:
            logits.append(await prompt_logits(engine, PROMPT))
    assert np.array_equal(*logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3moe", "qwen35moe", "laguna"])
async def test_the_reference_takes_them(tmp_path, name):
    """The NumPy kernels give the same bits as without scales."""
    toy, settings = TOYS[name], EngineConfig(kernels="reference", memory=EXACT_CACHE)
    weights = weights_of(toy)
    logits = []
    for stem, tensors in (("plain", weights), ("scaled", scaled(weights))):
        path = write(tmp_path / f"{stem}.gguf", toy, tensors)
        async with Engine.open(path, settings) as engine:
            logits.append(await prompt_logits(engine, PROMPT[:12]))
    assert np.array_equal(*logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["olmoe", "fused"])
async def test_any_number_may_be_a_scale(tmp_path, name):
    """Scales that are no powers of two: native and NumPy kernels agree as without, and with the plain model."""
    toy = TOYS[name]
    weights = weights_of(toy)
    plain = write(tmp_path / "plain.gguf", toy, weights)
    other = write(tmp_path / "scaled.gguf", toy, scaled(weights, powers=False))
    results = []
    for path, kernels in ((plain, "reference"), (other, "reference"), (other, "native")):
        async with Engine.open(path, EngineConfig(kernels=kernels, memory=EXACT_CACHE)) as engine:
            results.append(await prompt_logits(engine, PROMPT[:12]))
    assert_within(results[1], results[0], "reference/float32")
    assert_within(results[2], results[1], "reference/float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "remote"),
    [
        ({"hot_device": "simulated", "hot_fraction": 0.5}, RemoteConfig()),
        ({"hot_device": "cpu", "hot_fraction": 0.5}, RemoteConfig()),
        ({}, RemoteConfig(workers=("local:1",), share=0.5)),
    ],
    ids=["simulated", "cpu", "worker"],
)
async def test_wherever_experts_are_computed(tmp_path, placement, remote):
    """Slots of a device, a hot tier on the CPU, and workers: the same bits."""
    toy = TOYS["qwen3moe"]
    path = write(tmp_path / "scaled.gguf", toy, scaled(weights_of(toy)))
    expected = await answer(path, config())
    logits, tokens = await answer(path, config(remote, **placement))
    assert np.array_equal(logits, expected[0])
    assert tokens == expected[1]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["fused", "qwen35moe"])
async def test_non_expert_weights_on_a_device_take_them(tmp_path, device, name):
    """Plain numbers that were multiplied out, and blocks with their scale beside them: the same bits."""
    toy = TOYS[name]
    weights = weights_of(toy)
    settings = replace(config(trunk_device=device), kernels="reference")
    logits = []
    for stem, tensors in (("plain", weights), ("scaled", scaled(weights))):
        async with Engine.open(write(tmp_path / f"{stem}.gguf", toy, tensors), settings) as engine:
            logits.append(await prompt_logits(engine, PROMPT[:12]))
    assert np.array_equal(*logits)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_whole", [False, True], ids=["half", "whole"])
async def test_experts_on_a_device_take_them(tmp_path, device, is_whole):
    """Some experts there and some on the CPU, and whole chunks on one device: the same bits as without scales."""
    toy = TOYS["qwen3moe"]
    weights = weights_of(toy)
    placed = {"hot_fraction": 1.0, "trunk_device": device} if is_whole else {"hot_fraction": 0.5}
    settings = config(hot_device=device, expert_cache="static", **placed)
    # One chunk: of so many pairs that they are sorted.
    settings = replace(settings, scheduler=SchedulerConfig())
    logits = []
    for stem, tensors in (("plain", weights), ("scaled", scaled(weights))):
        async with Engine.open(write(tmp_path / f"{stem}.gguf", toy, tensors), settings) as engine:
            hot = engine._parts.experts.hot_device
            assert hot is not None
            assert (hot.full is not None) == is_whole
            logits.append(await prompt_logits(engine, PROMPT))
    assert np.array_equal(*logits)


def test_a_gpu_is_offered_scaled_experts(tmp_path):
    """Every layer, as without scales."""
    toy = TOYS["qwen3moe"]
    weights = weights_of(toy)
    for stem, tensors in (("plain", weights), ("scaled", scaled(weights))):
        with open_model_file(write(tmp_path / f"{stem}.gguf", toy, tensors)) as file:
            model = open_model(file, ReferenceKernels())
            assert len(device_layers(ExpertCatalog(model.expert_layers))) == 2


def test_scales_are_no_experts(tmp_path):
    """Scales count as non-expert weights: an expert has the bytes and the layout that it has without them."""
    toy = TOYS["qwen3moe"]
    weights = weights_of(toy)
    facts = []
    for stem, tensors in (("plain", weights), ("scaled", scaled(weights))):
        with open_model_file(write(tmp_path / f"{stem}.gguf", toy, tensors)) as file:
            facts.append(inspect(file))
    plain, other = facts
    assert plain.sizes is not None
    assert other.sizes is not None
    assert other.unsupported == ()
    assert other.footprint.expert_bytes == plain.footprint.expert_bytes
    assert other.sizes.routed == plain.sizes.routed
    assert [layer.layout for layer in other.sizes.layers] == [
        layer.layout for layer in plain.sizes.layers
    ]
    assert other.sizes.total == other.footprint.total_bytes


@pytest.mark.parametrize(
    ("name", "values", "error"),
    [
        ("token_embd.scale", [2.0], UnsupportedModelError),
        ("output_norm.scale", [2.0], UnsupportedModelError),
        ("blk.0.attn_norm.input_scale", [2.0], UnsupportedModelError),
        ("blk.1.ffn_up_exps.scale", [1.0, 2.0], ModelFileError),
        ("blk.1.attn_q.scale", [1.0, 2.0], ModelFileError),
        ("blk.1.attn_q.scale", [float("nan")], ModelFileError),
        ("blk.1.ffn_down_exps.scale", [1.0] * 7 + [float("inf")], ModelFileError),
    ],
)
def test_scales_without_a_meaning_are_refused(tmp_path, name, values, error):
    """A scale of what is no product, of a wrong length, or not finite, is an error that names it."""
    toy = TOYS["qwen3moe"]
    given = np.array(values, np.float32)
    # The writer takes finite numbers only.
    weights = weights_of(toy) | {name: np.where(np.isfinite(given), given, MARK)}
    path = write(tmp_path / "m.gguf", toy, weights)
    bad = given[~np.isfinite(given)].tobytes()
    path.write_bytes(path.read_bytes().replace(MARK.tobytes(), bad or MARK.tobytes()))
    with open_model_file(path) as file, pytest.raises(error, match=name):
        open_model(file, ReferenceKernels())
