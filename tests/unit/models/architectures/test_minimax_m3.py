"""Key heads that each read chosen blocks: what files state, which blocks are read, and what is refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.block_runs import BLOCKS, chunk_of, states_in_chunks
from tests.support.changed_toys import spec_of, write_changed, write_without
from tests.support.minimax_m3_cases import MINIMAX_M3_OPTIONS
from tests.support.toy_archs import ToyArch
from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.kernels.cache_format import CacheType, HeadShape, read_index
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kernels.weight import ExpertActivation
from thermocline.messages import LayerIndex, SegmentKind
from thermocline.modelfile.reader import open_model_file
from thermocline.models import choosing, head_blocks
from thermocline.models.lone_sequence import lone_cache
from thermocline.models.registry import open_model
from thermocline.parallel.parts import Mixing, mixing_of

DEFAULT, LOCAL = (
    ToyArch("minimax-m3", **MINIMAX_M3_OPTIONS[name]) for name in ("default", "local_blocks")
)
IDS = [(5 * n + n * n) % 250 for n in range(100)]


def test_what_a_file_states(tmp_path):
    """Which layers choose, how many blocks, which of them always, and a row of each token for the indexer."""
    spec = spec_of(write_changed(tmp_path, DEFAULT))
    indexer = spec.indexer
    assert spec.dense_layers == {0}
    assert indexer.layers == (1, 2, 3)
    assert (indexer.most_read, indexer.block, indexer.local) == (24, 8, 1)
    assert (indexer.num_heads, indexer.dim, indexer.by_head) == (4, 16, True)
    assert spec.kv_shapes[:2] == (HeadShape(4, 16), HeadShape(4, 16, index=16))
    assert (spec.rotary_dims, spec.expert_activation) == (8, ExpertActivation.CLAMPED_SILU)
    # What is compared with is each token's own, so that ranks give each other no more than keys.
    assert mixing_of(spec) == (Mixing.CACHE,) * 4
    local = spec_of(write_changed(tmp_path, LOCAL)).indexer
    assert (local.most_read, local.block, local.local, local.layers) == (20, 4, 3, (0, 1, 2))


@pytest.mark.parametrize(
    ("keys", "error", "says"),
    [
        ({"attention.indexer.head_count": 8}, UnsupportedModelError, "head_count = 8"),
        ({"attention.indexer.key_length": 6}, ModelFileError, "key_length is 6"),
        ({"attention.indexer.top_k": 0}, ModelFileError, "top_k is 0"),
        ({"attention.indexer.block_size": 0}, ModelFileError, "block_size is 0"),
        ({"attention.indexer.local_blocks": 4}, ModelFileError, "is 4, of 3 blocks"),
        ({"rope.dimension_count": 18}, ModelFileError, "at most 16"),
        ({"leading_dense_block_count": 4}, ModelFileError, "is 4, of 4 layers"),
    ],
)
def test_files_that_can_not_be_computed_are_refused(tmp_path, keys, error, says):
    """With the key and what is wrong with it."""
    with pytest.raises(error, match=says):
        spec_of(write_changed(tmp_path, DEFAULT, **keys))


@pytest.mark.parametrize(
    "name",
    [
        *("attn_q_norm", "attn_k_norm", "indexer.q_proj", "indexer.k_proj", "indexer.q_norm"),
        *("indexer.k_norm", "ffn_gate_inp", "ffn_up_exps", "ffn_down_shexp"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path, name):
    """None of them has a default."""
    path = write_without(tmp_path, DEFAULT, f"blk.2.{name}.weight")
    with open_model_file(path) as file, pytest.raises(ModelFileError, match=r"blk\.2\."):
        open_model(file, ReferenceKernels())


@pytest.mark.parametrize("name", ["default", "odd", "local_blocks", "no_local", "one_kv_head"])
@pytest.mark.parametrize("cache_type", [CacheType.F32, CacheType.F16])
def test_how_many_tokens_go_together_changes_no_bit(tmp_path, monkeypatch, name, cache_type):
    """Neither of a chunk, nor of those that are scored."""
    path = write_changed(tmp_path, ToyArch("minimax-m3", **MINIMAX_M3_OPTIONS[name]))
    expected = states_in_chunks(path, IDS, [100], cache_type)
    monkeypatch.setattr(choosing, "SCORED_TOGETHER", 5)
    for cuts in ([1, 2, 3, 5, 8, 13, 21, 22, 34, 55, 89, 100], [31, 100], range(1, 101)):
        found = states_in_chunks(path, IDS, list(cuts), cache_type)
        np.testing.assert_array_equal(found, expected)


def test_which_blocks_are_read(tmp_path):
    """Of each key head those with the best products that NumPy computes in double, and the last one; else all."""
    path, layer = write_changed(tmp_path, DEFAULT), LayerIndex(2)
    with open_model_file(path) as file:
        kernels = NativeKernels(threads=1)
        model = open_model(file, kernels)
        cache = lone_cache(model.spec, len(BLOCKS), 16, CacheType.F32).kv.layer(layer)
        chunk, indexer = (
            chunk_of(IDS, 0, SegmentKind.PROMPT),
            model.non_expert.layers[layer].mixer.indexer,
        )
        normed = np.random.default_rng(5).standard_normal((100, DEFAULT.hidden)).astype(np.float32)
        rope = model._rope(layer, chunk)
        asked = head_blocks.ask_by_heads(kernels, indexer, normed, rope, chunk, cache)
        words = asked.chosen(kernels.dense, chunk, cache)
        q, k = (
            kernels.decode_rows(part, np.arange(part.rows, dtype=np.int32)).astype(np.float64)
            for part in (indexer.q, indexer.k)
        )

    def turned(rows: np.ndarray, gain: np.ndarray) -> np.ndarray:
        rows = rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + indexer.epsilon) * gain
        cos, sin = rope.cosines[:, None], rope.sines[:, None]
        a, b = rows[..., :4], rows[..., 4:8]
        return np.concatenate((a * cos - b * sin, b * cos + a * sin, rows[..., 8:]), axis=-1)

    q_gain, k_gain = indexer.gains
    heads = turned((normed @ q.T).reshape(100, 4, 16), q_gain)
    rows = turned((normed @ k.T).reshape(100, 1, 16), k_gain)[:, 0]
    slots = (BLOCKS[np.arange(100) // 16] * 16 + np.arange(100) % 16).astype(np.int32)
    np.testing.assert_allclose(read_index(cache.shape, cache.index, slots), rows, atol=2e-3)
    scores = np.einsum("thd,pd->thp", heads, rows)
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    different = 0
    for position in range(100):
        last = position // 8
        reads = bits[position, :, : position + 1]
        if last < 3:
            assert reads.all()
            continue
        for head in range(4):
            best = [
                scores[position, head, 8 * n : min(8 * n + 8, position + 1)].max()
                for n in range(last + 1)
            ]
            wanted = {*np.argsort(best[:last])[::-1][:2].tolist(), last}
            assert {*(np.flatnonzero(reads[head]) // 8).tolist()} == wanted
            assert reads[head].sum() == 16 + position % 8 + 1
        different += len({row.tobytes() for row in reads}) > 1
    assert different > 50


def test_without_local_blocks_a_token_may_not_read_itself(tmp_path):
    """The best blocks of a key head may all lie before it."""
    toy = ToyArch("minimax-m3", **MINIMAX_M3_OPTIONS["no_local"])
    path, layer = write_changed(tmp_path, toy), LayerIndex(1)
    with open_model_file(path) as file:
        kernels = NativeKernels(threads=1)
        model = open_model(file, kernels)
        cache = lone_cache(model.spec, len(BLOCKS), 16, CacheType.F32).kv.layer(layer)
        chunk = chunk_of(IDS, 0, SegmentKind.PROMPT)
        indexer = model.non_expert.layers[layer].mixer.indexer
        normed = np.random.default_rng(5).standard_normal((100, toy.hidden)).astype(np.float32)
        rope = model._rope(layer, chunk)
        asked = head_blocks.ask_by_heads(kernels, indexer, normed, rope, chunk, cache)
        words = asked.chosen(kernels.dense, chunk, cache)
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    own = bits[np.arange(100), :, np.arange(100)]
    assert 0 < own[50:].mean() < 1
