"""Latent attention as files state it: sizes, rotary scaling, routers, and what is refused by name."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from tests.support.latent_cases import LATENT_OPTIONS
from tests.support.toy_archs import ToyArch, toy_arch_weights, write_toy_arch
from thermocline.cli.info import info
from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.kernels.cache_format import CacheType, HeadShape
from thermocline.kernels.dense_contract import Gating
from thermocline.kernels.reference import ReferenceKernels, decode_blocks
from thermocline.kernels.whole_layer import LatentWeights
from thermocline.kv.pool import KVPool
from thermocline.modelfile.reader import open_model_file
from thermocline.models.attention_specs import LatentSpec
from thermocline.models.registry import open_model, read_spec
from thermocline.models.rope import Yarn
from thermocline.models.sizes import measure_sizes

LITE, V3, FLASH, OLD, LARGE = (
    ToyArch("deepseek2", **LATENT_OPTIONS[name])
    for name in ("lite", "v3", "flash", "old", "large_v2")
)


def spec_of(path):
    with open_model_file(path) as file:
        return read_spec(file)


def write(tmp_path, toy, weights=None, **keys):
    metadata = {f"deepseek2.{key}": value for key, value in keys.items()}
    return write_toy_arch(tmp_path / "m.gguf", toy, weights=weights, metadata=metadata)


def test_a_token_takes_one_row_in_each_layer(tmp_path):
    """The row's numbers, once: in the spec, in sizes that planners use, in the pool, and in the report."""
    path = write(tmp_path, V3)
    with open_model_file(path) as file:
        spec = read_spec(file)
        sizes = measure_sizes(file.tensors.values(), spec, CacheType.F16)
    row = V3.rank + V3.rotary
    assert spec.kv_shapes == (HeadShape(1, row, V3.rank),) * V3.layers
    assert sizes.kv(100) == 100 * V3.layers * row * 2
    pool = KVPool(spec.kv_shapes, 3, 16, CacheType.F16)
    assert pool.reserved_bytes == 3 * 16 * V3.layers * row * 2
    shown = " ".join(CliRunner().invoke(info, [str(path)]).output.split())
    assert f"4 heads of 24, one row of {row} numbers per token for all" in shown


@pytest.mark.parametrize("mscale", [0.707, 1.0])
def test_yarn_scales_scores_and_not_rotation(tmp_path, mscale):
    """The multiplier is ten times what the file says; its square is on all scores."""
    spec = spec_of(write(tmp_path, LITE, **{"rope.scaling.yarn_log_multiplier": 0.1 * mscale}))
    assert isinstance(spec.rope_scaling, Yarn)
    assert spec.rope_scaling.magnitude == 1.0
    expected = (1 + 0.1 * mscale * math.log(8)) ** 2 / math.sqrt(24)
    assert spec.attention_scale == pytest.approx(expected, rel=1e-6)
    assert spec_of(write(tmp_path, FLASH)).attention_scale == pytest.approx(1 / math.sqrt(24))


@pytest.mark.parametrize("multiplier", [None, 0.0])
def test_yarn_without_the_multiplier_scales_rotation_alone(tmp_path, multiplier):
    """As configurations without mscale_all_dim have it: the usual factor, and no score is scaled besides."""
    spec = spec_of(write(tmp_path, V3, **{"rope.scaling.yarn_log_multiplier": multiplier}))
    assert spec.rope_scaling.magnitude == pytest.approx(0.1 * math.log(8) + 1)
    assert spec.attention_scale == pytest.approx(1 / math.sqrt(24))


def test_yarn_with_a_factor_of_its_own_turns_by_it(tmp_path):
    """The configuration's attention_factor is on cosines and sines, and the multiplier scales scores all the same."""
    spec = spec_of(write(tmp_path, V3, **{"rope.scaling.yarn_attn_factor": 0.9}))
    assert spec.rope_scaling.magnitude == pytest.approx(0.9)
    expected = (1 + 0.1 * math.log(8)) ** 2 / math.sqrt(24)
    assert spec.attention_scale == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("rope.scaling.yarn_log_multiplier", -0.1, ModelFileError),
        ("rope.scaling.attn_factor", 1.5, UnsupportedModelError),
    ],
)
def test_yarn_that_nobody_writes_is_refused(tmp_path, key, value, error):
    """A multiplier below zero, and llama.cpp's factor besides its own."""
    with pytest.raises(error, match=key):
        spec_of(write(tmp_path, V3, **{key: value}))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_old_files_have_keys_and_values_in_one_tensor(tmp_path, kind):
    """Its rows are split by head, and k_b is exchanged; a block type keeps v_b in the file."""
    toy = replace(OLD, formats={"latent": kind})
    weights = toy_arch_weights(toy)
    with open_model_file(write(tmp_path, toy, weights)) as file:
        spec = read_spec(file)
        model = open_model(file, ReferenceKernels())
        up = model.non_expert.layers[1].mixer.up
        both = decode_blocks(
            file.view("blk.1.attn_kv_b.weight"),
            file.tensors["blk.1.attn_kv_b.weight"].format.type_id,
        )
    assert spec.latent == LatentSpec(32, 0, 24, 16, 8)
    by_head = both.reshape(toy.heads, 16 + 16, toy.rank)
    keys, values = (
        decode_blocks(stack.raw.reshape(-1, stack.raw.shape[-1]), stack.format.type_id)
        for stack in (up.keys, up.values)
    )
    expected = by_head[:, :16].transpose(0, 2, 1).reshape(keys.shape)
    np.testing.assert_allclose(
        keys, expected, rtol=0 if kind in ("F32", "F16") else 5e-4, atol=1e-7
    )
    assert np.array_equal(values, by_head[:, 16:].reshape(values.shape))
    assert up.values.format.name == kind


def test_a_key_beyond_halves_is_kept_whole(tmp_path):
    """Exchanged keys are halves, unless one is larger than any half."""
    weights = toy_arch_weights(OLD)
    weights["blk.0.attn_kv_b.weight"][0, 0] = 1e6
    toy = replace(OLD, formats={"latent": "BF16"})
    with open_model_file(write(tmp_path, toy, weights)) as file:
        layers = open_model(file, ReferenceKernels()).non_expert.layers
        assert [layer.mixer.up.keys.format.name for layer in layers] == ["F32", "F16", "F16"]


def test_an_old_file_of_other_heads_is_refused(tmp_path):
    """Keys of fewer heads than queries are no latent attention of the model's."""
    with pytest.raises(UnsupportedModelError, match="head_count_kv"):
        spec_of(write(tmp_path, OLD, **{"attention.head_count_kv": 1}))


def test_a_group_is_judged_by_its_best_expert_or_two(tmp_path, monkeypatch):
    """DeepSeek-V2 takes one, V3 two. Files of the large V2 may not name its groups: its sizes do."""
    rule = spec_of(write(tmp_path, LARGE)).router
    assert (rule.num_groups, rule.num_groups_used, rule.group_best) == (4, 2, 1)
    rule = spec_of(write(tmp_path, V3)).router
    assert (rule.num_groups, rule.num_groups_used, rule.group_best) == (4, 2, 2)
    assert rule.gating is Gating.SIGMOID
    monkeypatch.setattr("thermocline.models.architectures.deepseek2._LARGE_V2", (3, 12))
    monkeypatch.setattr("thermocline.models.architectures.deepseek2._LARGE_V2_GROUPS", (6, 3))
    unnamed = {"expert_group_count": None, "expert_group_used_count": None}
    rule = spec_of(write(tmp_path, LARGE, **unnamed)).router
    assert (rule.num_groups, rule.num_groups_used, rule.group_best) == (6, 3, 1)
    assert spec_of(write(tmp_path, LARGE)).router.num_groups == 4


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((512, 0, 192, 128, 64), 256), ((512, 0, 256, 256, 64), 512), ((32, 0, 24, 16, 8), 32)],
)
def test_cells_of_a_prompt_are_as_long_as_the_form_needs(sizes, expected):
    """As few as pay wherever they begin, as a power of two; none where it never pays."""
    latent = LatentSpec(*sizes)
    assert latent.expanded_tokens == expected
    made = latent.rank * (latent.plain + latent.value_dim)

    def pays(num_tokens: int, start: int) -> bool:
        pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        absorbed = num_tokens * made + pairs * (2 * latent.rank + latent.turned)
        return (start + num_tokens) * made + pairs * (latent.key_dim + latent.value_dim) < absorbed

    assert all(pays(expected, start) for start in range(0, 1 << 20, 4096))
    assert not pays(expected // 2, 1 << 20)
    assert LatentSpec(16, 0, 40, 32, 8).expanded_tokens == 0


def test_a_missing_gating_function_is_a_softmax_but_in_the_first_files_of_glm(
    tmp_path, monkeypatch
):
    """Those are known by their layers and vocabulary, as llama.cpp knows them."""
    assert spec_of(write(tmp_path, LITE)).router.gating is Gating.SOFTMAX
    path = write(tmp_path, FLASH, expert_gating_func=None)
    assert spec_of(path).router.gating is Gating.SOFTMAX
    monkeypatch.setattr("thermocline.models.architectures.deepseek2._FLASH_LAYERS", (3,))
    assert spec_of(path).router.gating is Gating.SOFTMAX
    monkeypatch.setattr("thermocline.models.architectures.deepseek2._FLASH_VOCABULARY", 264)
    assert spec_of(path).router.gating is Gating.SIGMOID


@pytest.mark.parametrize("gating", list(Gating))
def test_every_gating_function_is_read(tmp_path, gating):
    """By the number that GGUF gives it; one has none."""
    path = write(tmp_path, FLASH, expert_gating_func=int(gating))
    if gating is Gating.NEAR_BEST:
        with pytest.raises(UnsupportedModelError, match="expert_gating_func = 64"):
            spec_of(path)
    else:
        assert spec_of(path).router.gating is gating


def test_queries_have_one_matrix_or_two(tmp_path):
    """The tensors of the file decide, and the rank must fit them."""
    for toy, has_low in ((LITE, False), (V3, True)):
        with open_model_file(write(tmp_path, toy)) as file:
            model = open_model(file, ReferenceKernels())
            mixer = model.non_expert.layers[0].mixer
        assert isinstance(mixer, LatentWeights)
        assert (mixer.low is not None) is has_low
    for rank in (0, 47, None):
        path = write(tmp_path, V3, **{"attention.q_lora_rank": rank})
        with open_model_file(path) as file, pytest.raises(ModelFileError, match="attn_q_a"):
            open_model(file, ReferenceKernels())


def test_a_matrix_of_another_shape_is_named(tmp_path):
    """k_b of too few heads is an error that names the tensor."""
    weights = toy_arch_weights(V3)
    name = "blk.1.attn_k_b.weight"
    weights[name] = weights[name][:3]
    path = write(tmp_path, V3, weights)
    with open_model_file(path) as file, pytest.raises(ModelFileError, match=name):
        open_model(file, ReferenceKernels())


def test_shared_experts_are_one_of_all_their_width(tmp_path):
    """Two of width 32, and none where the file has none."""
    assert spec_of(write(tmp_path, V3)).shared_intermediate_size == 64
    toy = replace(V3, extra=V3.extra | {"expert_shared_count": 0})
    weights = {n: v for n, v in toy_arch_weights(toy).items() if "shexp" not in n}
    with open_model_file(write(tmp_path, toy, weights)) as file:
        assert open_model(file, ReferenceKernels()).non_expert.layers[1].shared is None
