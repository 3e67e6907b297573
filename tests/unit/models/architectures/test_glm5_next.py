"""Streams that are mixed as wholes, and pooled keys: what files state, what is computed, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.block_runs import BLOCKS, chunk_of, states_in_chunks
from tests.support.changed_toys import spec_of, write_changed, write_without
from tests.support.glm5_cases import GLM5_OPTIONS
from tests.support.toy_archs import ToyArch, toy_arch_weights
from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.kernels.cache_format import CacheType, HeadShape, read_index
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.reference import ReferenceKernels
from thermocline.messages import LayerIndex, SegmentKind
from thermocline.modelfile.reader import open_model_file
from thermocline.models import latent_attention
from thermocline.models.lone_sequence import lone_cache
from thermocline.models.registry import can_draft, open_model
from thermocline.models.spec import LayerKind, StreamsSpec

DEFAULT, ODD, SHARED = (
    ToyArch("glm5-next", **GLM5_OPTIONS[name]) for name in ("default", "odd", "shared")
)
IDS = [(5 * n + n * n) % 250 for n in range(60)]
INDEX, POOL = 32, 4


def test_what_a_file_states(tmp_path):
    """Streams, kinds of layers, which of them choose, bounded decays, and rows with a token's weights beside its key."""
    spec = spec_of(write_changed(tmp_path, DEFAULT))
    assert replace(spec.streams, floor=0.0) == StreamsSpec(4, rounds=20)
    assert spec.streams.floor == pytest.approx(1e-6)
    assert [kind is LayerKind.ATTENTION for kind in spec.layer_kinds] == [*[False] * 3, True, False]
    assert (spec.latent.turned, spec.latent.plain) == (0, DEFAULT.head_dim)
    assert spec.recurrent.lower_bound == -5.0
    assert spec.indexer.layers == (3,)
    assert (spec.indexer.block, spec.indexer.row) == (POOL, 2 * INDEX)
    assert spec.kv_shapes[3] == HeadShape(1, DEFAULT.rank, DEFAULT.rank, index=2 * INDEX)
    assert spec.expert_limits[3].up == pytest.approx(0.8)
    assert spec_of(write_changed(tmp_path, SHARED)).indexer.layers == (1,)
    assert spec_of(write_changed(tmp_path, ODD)).recurrent.lower_bound == 0.0


def test_a_limit_of_routed_experts_is_that_of_shared_ones_where_they_have_none(tmp_path):
    """As llama.cpp reads it."""
    spec = spec_of(write_changed(tmp_path, DEFAULT, swiglu_clamp_shexp=None))
    assert spec.shared_limits == spec.expert_limits


@pytest.mark.parametrize(
    ("keys", "error", "says"),
    [
        ({"hyper_connection.count": 1}, ModelFileError, "count is 1"),
        ({"hyper_connection.count": 17}, UnsupportedModelError, r"count = 17 \(at most 16\)"),
        ({"hyper_connection.sinkhorn_iterations": 0}, ModelFileError, "sinkhorn_iterations is 0"),
        ({"hyper_connection.epsilon": 0.0}, ModelFileError, "epsilon is 0"),
        ({"kda.gate_lower_bound": 1.0}, ModelFileError, "must be a negative number"),
        ({"attention.indexer.kpool": 1}, ModelFileError, "kpool is 1"),
        ({"attention.indexer.top_k": 6}, ModelFileError, "is 6, no multiple"),
        ({"attention.indexer.key_length": 577}, UnsupportedModelError, "1154 numbers"),
        (
            {"attention.indexer.kpool_select_tail": False},
            UnsupportedModelError,
            "kpool_select_tail = false",
        ),
        (
            {"attention.indexer.types": [True, True, True, False, True]},
            ModelFileError,
            "the first layer that attends",
        ),
    ],
)
def test_files_that_can_not_be_computed_are_refused(tmp_path, keys, error, says):
    """With the key and what is wrong with it."""
    with pytest.raises(error, match=says):
        spec_of(write_changed(tmp_path, DEFAULT, **keys))


@pytest.mark.parametrize(
    "name",
    [
        *("hc_attn_fn", "hc_attn_base", "hc_attn_scale", "hc_ffn_fn", "attn_norm", "ffn_norm"),
        *("indexer_compressor_gate", "indexer_compressor_ape", "indexer.proj", "attn_q_a"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path, name):
    """None of them has a default."""
    path = write_without(tmp_path, DEFAULT, f"blk.3.{name}.weight")
    with open_model_file(path) as file, pytest.raises(ModelFileError, match=r"blk\.3\."):
        open_model(file, ReferenceKernels())


def test_a_block_behind_the_last_layer_is_left_out(tmp_path):
    """It may be there, and drafts nothing."""
    weights = toy_arch_weights(DEFAULT)
    behind = {
        name.replace("blk.3.", "blk.5."): values
        for name, values in weights.items()
        if name.startswith("blk.3.") and ".hc_" not in name
    }
    behind["blk.5.nextn.eh_proj.weight"] = np.zeros(
        (DEFAULT.hidden, 2 * DEFAULT.hidden), np.float32
    )
    keys = {
        "block_count": 6,
        "nextn_predict_layers": 1,
        "attention.head_count_kv": [0, 0, 0, 1, 0, 1],
        "swiglu_clamp_exp": [0.8] * 6,
        "swiglu_clamp_shexp": [0.8] * 6,
    }
    path = write_changed(tmp_path, DEFAULT, weights | behind, **keys)
    with open_model_file(path) as file:
        model = open_model(file, ReferenceKernels())
        assert (model.spec.num_layers, model.spec.num_predict_layers) == (5, 1)
        assert not can_draft(file, model.spec)


@pytest.mark.parametrize("name", ["default", "odd", "shared", "two_streams"])
@pytest.mark.parametrize("cache_type", [CacheType.F32, CacheType.F16])
def test_how_many_tokens_go_together_changes_no_bit(tmp_path, monkeypatch, name, cache_type):
    """Neither of a chunk, whose pools begin in another one, nor of those that are scored or read."""
    path = write_changed(tmp_path, ToyArch("glm5-next", **GLM5_OPTIONS[name]))
    expected = states_in_chunks(path, IDS, [60], cache_type)
    monkeypatch.setattr(latent_attention, "SCORED_TOGETHER", 5)
    monkeypatch.setattr(latent_attention, "_READ_TOGETHER", 7)
    for cuts in ([1, 2, 3, 5, 8, 13, 21, 22, 23, 34, 55, 60], [31, 60], list(range(1, 61))):
        np.testing.assert_array_equal(states_in_chunks(path, IDS, cuts, cache_type), expected)


def test_which_positions_are_read(tmp_path):
    """Pools by scores that NumPy computes in double of weighted means, and what is behind the last whole one; else all."""
    path = write_changed(tmp_path, DEFAULT)
    with open_model_file(path) as file:
        kernels = NativeKernels(threads=1)
        model = open_model(file, kernels)
        cache = lone_cache(model.spec, len(BLOCKS), 16, CacheType.F32).kv.layer(LayerIndex(3))
        chunk, weights = chunk_of(IDS, 0, SegmentKind.PROMPT), model.non_expert.layers[3].mixer
        indexer, rng = weights.indexer, np.random.default_rng(5)
        normed, ranked = (
            rng.standard_normal((60, width)).astype(np.float32)
            for width in (DEFAULT.hidden, DEFAULT.query_rank)
        )
        nothing = model._rope(LayerIndex(3), chunk)
        asked = latent_attention._ask(kernels, indexer, (normed, ranked), nothing, chunk, cache)
        near = latent_attention._near(chunk.segments, chunk.positions, weights)
        choice = latent_attention._choose(kernels.dense, asked, chunk, near, cache, weights)
        q, k, gate, says = (
            kernels.decode_rows(part, np.arange(part.rows, dtype=np.int32)).astype(np.float64)
            for part in (indexer.q, indexer.k, indexer.pool.gate, indexer.weights)
        )
    keys = normed @ k.T
    keys -= keys.mean(axis=1, keepdims=True)
    keys /= np.sqrt((keys**2).mean(axis=1, keepdims=True) + indexer.epsilon)
    keys = (keys * indexer.gain + indexer.bias).reshape(15, POOL, INDEX)
    shares = np.exp((normed @ gate.T).reshape(15, POOL, INDEX) + indexer.pool.places)
    pooled = (keys * shares).sum(axis=1) / shares.sum(axis=1)
    ends = np.arange(POOL - 1, 60, POOL)
    slots = (BLOCKS[ends // 16] * 16 + ends % 16).astype(np.int32)
    rows = read_index(cache.shape, cache.index, slots)
    np.testing.assert_allclose(rows[:, :INDEX], pooled, rtol=1e-4, atol=1e-5)
    assert not rows[:, INDEX:].any()

    heads = (ranked @ q.T).reshape(60, -1, INDEX)
    scores = np.maximum(np.einsum("thd,bd->thb", heads, pooled), 0)
    scores = np.einsum("thb,th->tb", scores, normed @ says.T)
    assert near == [8 + POOL - 1]  # two pools, and what is behind them
    assert choice.rows.tolist() == list(range(near[0], 60))
    for position, found in zip(choice.rows.tolist(), choice.slots, strict=True):
        whole = (position + 1) // POOL
        best = np.sort(np.argsort(-scores[position, :whole], kind="stable")[:2])
        read = [*(best[:, None] * POOL + np.arange(POOL)).reshape(-1)]
        read += range(whole * POOL, position + 1)
        assert found.tolist() == [BLOCKS[each // 16] * 16 + each % 16 for each in read]
