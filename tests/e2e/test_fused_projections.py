"""Files as a converter's options write them: fused q, k and v, biases where others have none, stretched contexts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.engine_runs import EXACT_CACHE, prompt_logits
from tests.support.fused_projections import SCALED_ROPES, biased, fused
from tests.support.oracle_cases import prompt_ids
from tests.support.toy_archs import ToyArch, toy_arch_weights, write_toy_arch
from thermocline.config import EngineConfig
from thermocline.engine.api import Engine

TOYS = {
    "olmoe": ToyArch("olmoe", kv_heads=4, layers=2),
    "qwen2moe": ToyArch("qwen2moe", layers=2),
    "qwen35moe": ToyArch("qwen35moe", layers=2, interval=2, rotary=8),
    "qwen3next": ToyArch("qwen3next", layers=2, interval=2, rotary=8),
    "kimi-linear": ToyArch("kimi-linear", layers=2, interval=2, head_dim=24, rotary=8),
}


async def logits_of(path, length: int = 40) -> np.ndarray:
    async with Engine.open(path, EngineConfig(memory=EXACT_CACHE)) as engine:
        return await prompt_logits(engine, prompt_ids(length))


@pytest.mark.parametrize("toy", TOYS.values(), ids=TOYS)
async def test_fused_projections_change_no_bit(tmp_path, toy):
    """A file with attn_qkv gives the logits of the one with three tensors."""
    weights = toy_arch_weights(toy)
    apart = write_toy_arch(tmp_path / "apart.gguf", toy, weights=weights)
    together = write_toy_arch(tmp_path / "together.gguf", toy, weights=fused(weights))
    np.testing.assert_array_equal(await logits_of(together), await logits_of(apart))


@pytest.mark.parametrize("arch", ["olmoe", "qwen2moe"])
async def test_one_bias_may_stand_alone(tmp_path, arch):
    """A missing bias is zeros, and one that is there counts."""
    toy = replace(TOYS[arch], biased=False)
    plain = toy_arch_weights(toy)
    one = biased(plain, ("k",))
    sizes = {"q": 64, "v": toy.kv_heads * toy.head_dim}
    zeros = {
        f"blk.{layer}.attn_{part}.bias": np.zeros(size, np.float32)
        for layer in range(toy.layers)
        for part, size in sizes.items()
    }
    paths = [
        write_toy_arch(tmp_path / f"{number}.gguf", toy, weights=weights)
        for number, weights in enumerate((plain, one, one | zeros, fused(one | zeros)))
    ]
    without, alone, filled, together = [await logits_of(path) for path in paths]
    np.testing.assert_array_equal(alone, filled)
    np.testing.assert_array_equal(together, filled)
    assert np.abs(alone - without).max() > 1e-3


@pytest.mark.parametrize("keys", SCALED_ROPES.values(), ids=SCALED_ROPES)
@pytest.mark.parametrize("arch", ["olmoe", "qwen35moe"])
async def test_a_stretched_context_changes_what_is_far(tmp_path, arch, keys):
    """The first token is as before, and later ones are not: the keys are used, not passed over."""
    toy = TOYS[arch]
    plain = await logits_of(write_toy_arch(tmp_path / "plain.gguf", toy))
    scaled = await logits_of(
        write_toy_arch(tmp_path / "scaled.gguf", replace(toy, extra=toy.extra | keys))
    )
    np.testing.assert_allclose(scaled[0], plain[0], rtol=1e-4, atol=1e-5)
    assert np.abs(scaled[-1] - plain[-1]).max() > 1e-3
