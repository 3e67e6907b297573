"""Attention to chosen positions: what files state, what is chosen, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from tests.support.block_runs import chunk_of, trunk_states
from tests.support.changed_toys import spec_of, write_changed, write_without
from tests.support.latent_cases import DEEPSEEK32_OPTIONS, GLM_DSA_OPTIONS
from tests.support.toy_archs import ToyArch, toy_arch_weights
from thermocline.cli.info import info
from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.kernels.cache_format import CacheType, HeadShape
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.reference import ReferenceKernels
from thermocline.kv.pool import KVPool
from thermocline.messages import SegmentKind
from thermocline.modelfile.reader import open_model_file
from thermocline.models import latent_attention
from thermocline.models.choosing import best
from thermocline.models.latent_attention import Choices, ChosenSlots
from thermocline.models.registry import open_model, read_spec
from thermocline.models.sizes import measure_sizes

V32 = ToyArch("deepseek32", **DEEPSEEK32_OPTIONS["default"])
GLM, SHARED = (ToyArch("glm-dsa", **GLM_DSA_OPTIONS[name]) for name in ("default", "shared"))
INDEX = 64


def test_a_token_takes_a_row_of_the_indexer_besides(tmp_path):
    """In the spec, in sizes that planners use, in the pool, and in the report; other layers' rows are as they were."""
    path = write_changed(tmp_path, SHARED)
    with open_model_file(path) as file:
        spec = read_spec(file)
        sizes = measure_sizes(file.tensors.values(), spec, CacheType.F16)
    row = SHARED.rank + SHARED.rotary
    chooses = [True, False, True, False, False]
    shapes = [HeadShape(1, row, SHARED.rank, index=INDEX if own else 0) for own in chooses]
    assert list(spec.kv_shapes) == shapes
    with_block = replace(spec, num_predict_layers=1)
    assert with_block.next_block_shapes == (HeadShape(1, row, SHARED.rank),)
    numbers = 5 * row + 2 * INDEX
    assert sizes.kv(100) == 100 * numbers * 2
    pool = KVPool(spec.kv_shapes, 3, 16, CacheType.F16)
    assert pool.reserved_bytes == 3 * 16 * numbers * 2
    shown = " ".join(CliRunner().invoke(info, [str(path)]).output.split())
    assert f"one row of {row} numbers per token for all; a token reads 7 positions" in shown


def test_which_layers_choose(tmp_path):
    """All of V3.2 and GLM-5; of GLM-5.2 those that the file names, or its pattern, known by its context."""
    assert spec_of(write_changed(tmp_path, V32)).indexer.layers == (0, 1, 2)
    assert spec_of(write_changed(tmp_path, GLM)).indexer.layers == (0, 1, 2)
    assert spec_of(write_changed(tmp_path, SHARED)).indexer.layers == (0, 2)
    long = spec_of(write_changed(tmp_path, GLM, context_length=1 << 20, block_count=12))
    assert long.indexer.layers == (0, 1, 2, 6, 10)


def test_tensors_of_a_layer_that_takes_a_choice_are_left_out(tmp_path):
    """Converters may leave them in the file."""
    weights = toy_arch_weights(SHARED)
    own = {name: values for name, values in weights.items() if name.startswith("blk.0.indexer.")}
    added = {name.replace("blk.0.", "blk.1."): values for name, values in own.items()}
    assert len(added) == 5
    with open_model_file(write_changed(tmp_path, SHARED, weights | added)) as file:
        model = open_model(file, NativeKernels(threads=1))
        assert model.non_expert.layers[1].mixer.indexer is None
        assert (model.has_whole_layers, model.has_whole_steps) == (True, False)


@pytest.mark.parametrize(
    ("keys", "error", "says"),
    [
        ({"attention.indexer.top_k": 0}, ModelFileError, "top_k is 0"),
        ({"attention.indexer.key_length": 6}, ModelFileError, "key_length is 6"),
        ({"attention.indexer.head_count": None}, ModelFileError, "head_count"),
        (
            {"attention.temperature_scale": 0.5, "attention.temperature_length": 8},
            UnsupportedModelError,
            "attention.temperature_scale",
        ),
        (
            {"attention.indexer.types": [False] + 4 * [True]},
            ModelFileError,
            "the first layer has no earlier one",
        ),
        ({"attention.indexer.types": [True]}, ModelFileError, "has 1 entries for 5 layers"),
        ({"attention.q_lora_rank": 0}, ModelFileError, "q_lora_rank is 0"),
        ({"attention.indexer.key_length": 1153}, UnsupportedModelError, "1153 numbers for a token"),
    ],
)
def test_files_that_can_not_be_computed_are_refused(tmp_path, keys, error, says):
    """With the key and what is wrong with it."""
    with pytest.raises(error, match=says):
        spec_of(write_changed(tmp_path, SHARED, **keys))


def test_a_missing_tensor_is_named(tmp_path):
    """A layer that chooses has all five."""
    for name in ("attn_k.weight", "attn_q_b.weight", "k_norm.weight", "k_norm.bias", "proj.weight"):
        path = write_without(tmp_path, V32, f"blk.1.indexer.{name}")
        with open_model_file(path) as file, pytest.raises(ModelFileError, match=f"indexer.{name}"):
            open_model(file, ReferenceKernels())


def test_the_best_positions_are_read():
    """As many as asked for, ascending; of equal scores the first ones, and what is not a number last."""
    rng = np.random.default_rng(3)
    for count, kept in ((1, 1), (5, 5), (9, 1), (200, 31)):
        scores = rng.standard_normal(count).astype(np.float32)
        expected = np.sort(np.argsort(-scores, kind="stable")[:kept])
        np.testing.assert_array_equal(best(scores, kept), expected)
    ties = np.array([0, 2, 0, 0, 1, 0], np.float32)
    np.testing.assert_array_equal(best(ties, 4), [0, 1, 2, 4])
    broken = np.array([np.nan, 1, np.nan, -np.inf, 3], np.float32)
    np.testing.assert_array_equal(best(broken, 2), [1, 4])
    np.testing.assert_array_equal(best(broken, 3), [0, 1, 4])


def test_how_many_tokens_go_together_changes_no_bit(tmp_path, monkeypatch):
    """Of those that are scored, and of those that read."""
    path, ids = write_changed(tmp_path, SHARED), [(5 * n + n * n) % 250 for n in range(60)]
    expected = trunk_states(path, ids)
    monkeypatch.setattr(latent_attention, "SCORED_TOGETHER", 5)
    monkeypatch.setattr(latent_attention, "_READ_TOGETHER", 7)
    np.testing.assert_array_equal(trunk_states(path, ids), expected)


def test_a_choice_is_kept_as_long_as_its_chunk():
    """Also where a failure ends it: nobody has to say that it is over. Equal chunks are not the same one."""
    choices, none = Choices(), np.empty((0, 4), np.int32)
    first, second = (chunk_of([1, 2], 0, SegmentKind.DECODE) for _ in range(2))
    found = ChosenSlots(none[:, 0], none)
    choices.note(first, found)
    assert choices.last(first) is found
    with pytest.raises(KeyError):
        choices.last(second)
    del first
    assert len(choices) == 0
