"""Windows, entries and experts by token: what files state, what is computed, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.block_runs import BLOCKS, chunk_of, states_in_chunks
from tests.support.changed_toys import spec_of, write_changed, write_without
from tests.support.deepseek4_cases import DEEPSEEK4_OPTIONS
from tests.support.toy_archs import ToyArch, toy_arch_weights
from thermocline.config import EngineConfig, MemoryConfig
from thermocline.engine.cache_builder import choose_limits
from thermocline.errors import ConfigError, ModelFileError, UnsupportedModelError
from thermocline.kernels.cache_format import CacheType, HeadShape
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.dense_contract import Gating
from thermocline.kernels.entries import EntryCache
from thermocline.kernels.recurrent_contract import StateShape
from thermocline.kernels.reference import ReferenceKernels
from thermocline.messages import LayerIndex, SegmentKind
from thermocline.modelfile.reader import open_model_file
from thermocline.models import compressed_attention
from thermocline.models.cache_size import cache_spec
from thermocline.models.layers import compute_layer
from thermocline.models.lone_sequence import lone_cache
from thermocline.models.registry import open_model
from thermocline.models.spec import LayerKind, StreamsSpec
from thermocline.models.streams import narrow

DEFAULT = ToyArch("deepseek4", **DEEPSEEK4_OPTIONS["default"])
IDS = [(5 * n + n * n) % 250 for n in range(128)]
DIM = 24


def test_what_a_file_states(tmp_path):
    """Streams, the window, entries by layer, their rope without a factor on it, and what a token and a sequence keep."""
    spec = spec_of(write_changed(tmp_path, DEFAULT))
    assert replace(spec.streams, floor=0.0) == StreamsSpec(4, rounds=20, sums=True)
    assert spec.router.gating is Gating.SQRT_SOFTPLUS
    assert (spec.num_layers_by_token, spec.num_predict_layers) == (1, 0)
    entries = spec.entries
    assert (entries.window, entries.ratios, entries.most_read) == (8, (0, 4, 128, 4, 128), 4)
    assert entries.rope.num_dims == 8
    assert entries.rope.base == 160000.0
    assert entries.rope.scaling.factor == 4.0
    assert entries.rope.magnitude == 1.0
    assert spec.rope_scaling is None
    assert [kind is LayerKind.RECURRENT for kind in spec.layer_kinds] == [True, *[False] * 4]
    index = spec.entries.index_dim
    assert spec.kv_shapes[1] == HeadShape(1, DIM // 4, DIM // 4, index=index // 4)
    assert spec.kv_shapes[2] == HeadShape(1, 2, 2)  # 16 places of two numbers for 24
    assert spec.further_states == {
        0: StateShape((8, DIM), (0, 0, 0)),
        1: StateShape((8, DIM), (1, 8, 4 * (DIM + index))),
        2: StateShape((8, DIM), (1, 128, 2 * DIM)),
        3: StateShape((8, DIM), (1, 8, 4 * (DIM + index))),
        4: StateShape((8, DIM), (1, 128, 2 * DIM)),
    }
    assert spec.expert_limits[3].up == pytest.approx(0.8)
    plain = spec_of(write_changed(tmp_path, DEFAULT, swiglu_clamp_shexp=None))
    assert plain.shared_limits == plain.expert_limits


@pytest.mark.parametrize(
    ("keys", "error", "says"),
    [
        ({"attention.compress_ratios": [0, 4, 64, 4, 0]}, UnsupportedModelError, "with 64"),
        ({"attention.compress_ratios": [0, 4, 4]}, ModelFileError, "must have 5 entries"),
        ({"attention.output_group_count": 3}, ModelFileError, "does not divide 4 heads"),
        ({"attention.head_count_kv": 2}, UnsupportedModelError, "head_count_kv = 2"),
        ({"attention.sliding_window": 0}, ModelFileError, "sliding_window is 0"),
        ({"attention.indexer.key_length": 6}, ModelFileError, "key_length is 6"),
        ({"attention.indexer.key_length": 33}, ModelFileError, "is odd"),
        ({"attention.compress_rope_freq_base": 0.0}, ModelFileError, "freq_base is 0"),
        ({"rope.dimension_count": 26}, ModelFileError, "at most 24"),
        ({"hyper_connection.count": 17}, UnsupportedModelError, r"count = 17 \(at most 16\)"),
        ({"expert_gating_func": 9}, UnsupportedModelError, "expert_gating_func = 9"),
    ],
)
def test_files_that_can_not_be_computed_are_refused(tmp_path, keys, error, says):
    """With the key and what is wrong with it."""
    with pytest.raises(error, match=says):
        spec_of(write_changed(tmp_path, DEFAULT, **keys))


@pytest.mark.parametrize(
    "name",
    [
        *("attn_sinks", "attn_q_a", "attn_kv", "attn_kv_a_norm", "attn_output_a", "attn_norm"),
        *("attn_compressor_kv", "attn_compressor_ape", "attn_compressor_norm", "hc_attn_fn"),
        *("indexer_compressor_gate", "indexer.proj", "indexer.attn_q_b", "ffn_gate_shexp"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path, name):
    """None of them has a default."""
    path = write_without(tmp_path, DEFAULT, f"blk.3.{name}.weight")
    with open_model_file(path) as file, pytest.raises(ModelFileError, match=r"blk\.3\."):
        open_model(file, ReferenceKernels())


@pytest.mark.parametrize("part", ["fn", "base", "scale"])
def test_a_model_whose_end_takes_no_sum_is_refused(tmp_path, part):
    """The mean, which another model takes, would be another answer."""
    path = write_without(tmp_path, DEFAULT, f"output_hc_{part}.weight")
    with open_model_file(path) as file, pytest.raises(ModelFileError, match=f"output_hc_{part}"):
        open_model(file, ReferenceKernels())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda table: table - 1, "names an expert beyond the 8"),
        (lambda table: table + 1, "names an expert beyond the 8"),
        (lambda table: table[1:], "has shape"),
    ],
)
def test_a_table_of_experts_that_is_none_is_refused(tmp_path, change, says):
    """Its numbers would be read as those of experts."""
    weights, name = toy_arch_weights(DEFAULT), "blk.0.ffn_gate_tid2eid.weight"
    weights[name] = np.ascontiguousarray(change(weights[name]))
    path = write_changed(tmp_path, DEFAULT, weights)
    with open_model_file(path) as file, pytest.raises(ModelFileError, match=says):
        open_model(file, ReferenceKernels())


def test_a_bias_for_tokens_of_images_is_left_out(tmp_path):
    """Files of the model that sees have it."""
    weights = toy_arch_weights(DEFAULT)
    weights["blk.0.exp_probs_b_vl.bias"] = weights["blk.1.exp_probs_b.bias"]
    path = write_changed(tmp_path, DEFAULT, weights)
    with open_model_file(path) as file:
        open_model(file, ReferenceKernels())


def test_blocks_that_entries_do_not_fit_are_refused(tmp_path):
    """An entry lies in one block, with the last of its tokens."""
    config = EngineConfig(memory=MemoryConfig(block_tokens=24))
    with open_model_file(write_changed(tmp_path, DEFAULT)) as file:
        spec = spec_of(file.path)
        with pytest.raises(ConfigError, match="must be a multiple of 16"):
            cache_spec(config, spec, choose_limits(config, spec, file))


@pytest.mark.parametrize("name", ["default", "all_entries", "odd", "whole_heads", "two_streams"])
@pytest.mark.parametrize("cache_type", [CacheType.F32, CacheType.F16])
def test_how_many_tokens_go_together_changes_no_bit(tmp_path, monkeypatch, name, cache_type):
    """Neither of a chunk, whose entries begin in another one, nor of those that are scored or read."""
    path = write_changed(tmp_path, ToyArch("deepseek4", **DEEPSEEK4_OPTIONS[name]))
    expected = states_in_chunks(path, IDS, [128], cache_type)
    monkeypatch.setattr(compressed_attention, "SCORED_TOGETHER", 5)
    monkeypatch.setattr(compressed_attention, "_READ_TOGETHER", 7)
    for cuts in ([1, 2, 3, 5, 8, 13, 21, 22, 34, 55, 89, 127, 128], [31, 128], range(1, 129)):
        found = states_in_chunks(path, IDS, list(cuts), cache_type)
        np.testing.assert_array_equal(found, expected)


def test_which_entries_are_made(tmp_path):
    """Of four tokens and those before them, weighted by number, normed and turned, as NumPy computes in double."""
    path, layer = write_changed(tmp_path, DEFAULT), LayerIndex(3)
    with open_model_file(path) as file:
        kernels = NativeKernels(threads=1)
        model = open_model(file, kernels)
        cache = lone_cache(model.spec, len(BLOCKS), 16, CacheType.F32)
        chunk, parts = chunk_of(IDS, 0, SegmentKind.PROMPT), model.non_expert.layers[layer]
        x = model.embed(chunk.token_ids)
        for number in range(layer):
            x = compute_layer(kernels, model, LayerIndex(number), chunk, x, cache)
        model.attend(layer, chunk, x, cache)
        normed = narrow(kernels, parts.streams.mixer, x, prompt=True).x.astype(np.float64)
        of = parts.mixer.compressor
        kv, gates = (
            normed @ kernels.decode_rows(part, np.arange(part.rows, dtype=np.int32)).T
            for part in (of.kv, of.gate)
        )
    entries = EntryCache(cache.kv.layer(layer), 4)
    found = entries.rows(entries.slots(BLOCKS, np.arange(32)), DIM).view(np.float32)
    gates += np.tile(of.places, (32, 1))
    # The first half of a token's numbers is of the next entry, the second of its own.
    nothing = np.zeros((4, DIM)), np.full((4, DIM), -np.inf)
    before, own = (
        [
            np.concatenate((none, each[:-4, :DIM])).reshape(32, 4, DIM),
            each[:, DIM:].reshape(32, 4, DIM),
        ]
        for each, none in zip((kv, gates), nothing, strict=True)
    )
    (kv_before, kv_own), (gates_before, gates_own) = before, own
    shares = np.exp(np.concatenate((gates_before, gates_own), axis=1))
    shares /= shares.sum(axis=1, keepdims=True)
    made = (shares * np.concatenate((kv_before, kv_own), axis=1)).sum(axis=1)
    made *= of.gain / np.sqrt((made**2).mean(axis=1, keepdims=True) + parts.mixer.epsilon)
    angles = 4 * np.arange(32)[:, None] * model.non_expert.ropes[layer].frequencies()
    turned = (made[:, -8::2] + 1j * made[:, -7::2]) * np.exp(1j * angles)
    made[:, -8::2], made[:, -7::2] = turned.real, turned.imag
    np.testing.assert_allclose(found, made, rtol=1e-3, atol=1e-4)
