"""Latent windows of other sizes than full layers: what files state, what is computed, and what is refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.block_runs import states_in_chunks
from tests.support.changed_toys import spec_of, write_changed, write_without
from tests.support.dots3_cases import DOTS3_OPTIONS
from tests.support.toy_archs import ToyArch, toy_arch_weights
from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.kernels.cache_format import CacheType, HeadShape
from thermocline.kernels.reference import ReferenceKernels
from thermocline.modelfile.reader import open_model_file
from thermocline.models import latent_attention
from thermocline.models.registry import can_draft, open_model
from thermocline.models.spec import LayerKind

DEFAULT, ODD = (ToyArch("dots3note", **DOTS3_OPTIONS[name]) for name in ("default", "odd"))
IDS = [(5 * n + n * n) % 250 for n in range(60)]
PATTERN = [False, False, True, True, True, False]


def test_what_a_file_states(tmp_path):
    """Kinds of layers with heads, rows and bases of their own, and an indexer in those without a window."""
    spec = spec_of(write_changed(tmp_path, DEFAULT))
    assert [kind is LayerKind.WINDOW for kind in spec.layer_kinds] == PATTERN
    assert spec.kv_shapes[1] == HeadShape(1, 40, 32, index=64)
    assert spec.kv_shapes[2] == HeadShape(1, 48, 40)
    assert spec.layer_heads == (4, 4, 2, 2, 2, 4)
    assert spec.indexer.layers == (0, 1, 5)
    assert (spec.indexer.pairs, spec.indexer.turns_last) == (True, False)
    assert (spec.window.num_tokens, spec.window.rope.base, spec.window.rope.pairs) == (
        16,
        500,
        True,
    )
    full, near = spec.at(1), spec.at(2)
    assert (full.latent.rank, full.latent.key_dim, full.latent.value_dim) == (32, 24, 16)
    assert (near.latent.rank, near.latent.key_dim, near.latent.value_dim) == (40, 28, 24)
    assert (full.num_heads, near.num_heads) == (4, 2)
    assert full.attention_scale == pytest.approx(24**-0.5)
    assert near.attention_scale == pytest.approx(28**-0.5)
    assert spec.cpu_only == "attention to chosen positions"


def test_rows_may_be_as_wide_as_published(tmp_path):
    """1,024 numbers and 64 that turn, of layers with a window."""
    keys = {"attention.kv_lora_rank_swa": 1080, "attention.key_length_swa": None}
    path = write_changed(tmp_path, DEFAULT, **keys, **{"attention.value_length_swa": 1080})
    assert spec_of(path).kv_shapes[2] == HeadShape(1, 1088, 1080)


@pytest.mark.parametrize(
    ("keys", "error", "says"),
    [
        ({"attention.sliding_window": 0}, ModelFileError, "sliding_window is 0"),
        ({"attention.sliding_window_pattern": None}, ModelFileError, "a boolean for each layer"),
        ({"attention.indexer.types": None}, ModelFileError, "a boolean for each layer"),
        ({"attention.indexer.types": [True] * 6}, ModelFileError, "must name the layers"),
        (
            {
                "attention.sliding_window_pattern": [True] * 6,
                "attention.indexer.types": [False] * 6,
            },
            UnsupportedModelError,
            "a window in each layer",
        ),
        ({"attention.key_length_mla_swa": 8}, ModelFileError, "key_length_mla_swa is 8"),
        ({"attention.key_length_swa": 47}, UnsupportedModelError, "key_length_swa = 47"),
        ({"attention.kv_lora_rank_swa": None}, ModelFileError, "kv_lora_rank_swa"),
        ({"attention.head_count": [4, 4, 2, 2, 4, 4]}, ModelFileError, r"blk\.4\."),
        ({"rope.freq_base_swa": 0.0}, ModelFileError, "freq_base_swa is 0"),
        ({"rope.dimension_count_swa": 6}, UnsupportedModelError, "dimension_count_swa = 6"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            UnsupportedModelError,
            "rope.scaling.factor",
        ),
    ],
)
def test_files_that_can_not_be_computed_are_refused(tmp_path, keys, error, says):
    """With the key, or the tensor, and what is wrong with it."""
    path = write_changed(tmp_path, DEFAULT, **keys)
    with pytest.raises(error, match=says), open_model_file(path) as file:
        open_model(file, ReferenceKernels())


@pytest.mark.parametrize("name", ["attn_gate", "attn_k_norm", "attn_kv_a_norm", "attn_v_b"])
@pytest.mark.parametrize("layer", [1, 2])
def test_a_missing_tensor_is_named(tmp_path, name, layer):
    """Of layers of both kinds; none has a default."""
    path = write_without(tmp_path, DEFAULT, f"blk.{layer}.{name}.weight")
    with (
        open_model_file(path) as file,
        pytest.raises(ModelFileError, match=rf"blk\.{layer}\.{name}"),
    ):
        open_model(file, ReferenceKernels())


def test_an_indexer_of_a_layer_with_a_window_is_refused(tmp_path):
    """It has no place."""
    weights = toy_arch_weights(DEFAULT)
    weights["blk.2.indexer.proj.weight"] = weights["blk.1.indexer.proj.weight"]
    path = write_changed(tmp_path, DEFAULT, weights)
    with open_model_file(path) as file, pytest.raises(UnsupportedModelError, match="no place"):
        open_model(file, ReferenceKernels())


def test_a_block_behind_the_last_layer_is_left_out(tmp_path):
    """It has the sizes of a window's layers, and drafts nothing."""
    weights = toy_arch_weights(DEFAULT)
    behind = {
        name.replace("blk.4.", "blk.6."): values
        for name, values in weights.items()
        if name.startswith("blk.4.")
    }
    shape = DEFAULT.hidden, 2 * DEFAULT.hidden
    behind["blk.6.nextn.eh_proj.weight"] = np.zeros(shape, np.float32)
    keys = {
        "block_count": 7,
        "nextn_predict_layers": 1,
        "attention.head_count": [4, 4, 2, 2, 2, 4, 2],
    }
    path = write_changed(tmp_path, DEFAULT, weights | behind, **keys)
    with open_model_file(path) as file:
        model = open_model(file, ReferenceKernels())
        assert (model.spec.num_layers, model.spec.num_predict_layers) == (6, 1)
        assert not can_draft(file, model.spec)


@pytest.mark.parametrize("name", DOTS3_OPTIONS)
@pytest.mark.parametrize("cache_type", [CacheType.F32, CacheType.F16])
def test_how_many_tokens_go_together_changes_no_bit(tmp_path, monkeypatch, name, cache_type):
    """Neither of a chunk, nor of those that are scored or read."""
    path = write_changed(tmp_path, ToyArch("dots3note", **DOTS3_OPTIONS[name]))
    expected = states_in_chunks(path, IDS, [60], cache_type)
    monkeypatch.setattr(latent_attention, "SCORED_TOGETHER", 5)
    monkeypatch.setattr(latent_attention, "_READ_TOGETHER", 7)
    for cuts in ([1, 2, 3, 5, 8, 13, 21, 22, 23, 34, 55, 60], [31, 60], list(range(1, 61))):
        np.testing.assert_array_equal(states_in_chunks(path, IDS, cuts, cache_type), expected)
