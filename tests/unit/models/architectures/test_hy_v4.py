"""Independent streams, sinks and gates of each number: what files state, what is computed, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.block_runs import BLOCKS, chunk_of, states_in_chunks
from tests.support.changed_toys import spec_of, write_changed, write_without
from tests.support.compare import assert_within
from tests.support.hy_v4_cases import HY_V4_OPTIONS
from tests.support.toy_archs import ToyArch
from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.kernels.cache_format import CacheType, HeadShape, read_index
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.reference import ReferenceKernels
from thermocline.messages import LayerIndex, SegmentKind
from thermocline.modelfile.reader import open_model_file
from thermocline.models import latent_attention
from thermocline.models.layers import compute_layer
from thermocline.models.lone_sequence import lone_cache
from thermocline.models.registry import open_model
from thermocline.models.spec import StreamsSpec
from thermocline.models.streams import end_streams, narrow, widen

DEFAULT, ODD, ALL = (ToyArch("hy_v4", **HY_V4_OPTIONS[n]) for n in ("default", "odd", "no_indexer"))
IDS = [(5 * n + n * n) % 250 for n in range(60)]
INDEX, TURNED = 64, 8


def test_what_a_file_states(tmp_path):
    """Streams, sinks, which layers choose, an indexer whose last numbers turn, and limits of routed experts alone."""
    spec = spec_of(write_changed(tmp_path, DEFAULT))
    floor = pytest.approx(1e-6)
    assert replace(spec.streams, floor=0.0) == StreamsSpec(4, sums=True, magnitude=2.0)
    assert spec.streams.floor == floor
    assert spec.indexer.layers == (0, 1, 5)
    assert (spec.indexer.turns_last, spec.indexer.pairs) == (True, True)
    assert spec.indexer.epsilon == spec.rms_epsilon
    assert spec.latent.sinks
    assert spec.kv_shapes[5] == HeadShape(1, 40, DEFAULT.rank, index=INDEX)
    assert spec.kv_shapes[4] == HeadShape(1, 40, DEFAULT.rank)
    assert (spec.expert_limits[3].up, spec.shared_limits) == (pytest.approx(0.8), ())
    assert spec.cpu_only == "attention to chosen positions and several residual streams"


def test_a_file_may_name_no_indexer(tmp_path):
    """Then all positions are read, which a count of 0 says, too."""
    assert spec_of(write_changed(tmp_path, ALL)).indexer is None
    keys = {"attention.indexer.top_k": 0}
    assert spec_of(write_changed(tmp_path, ALL, **keys)).indexer is None


def test_sinks_leave_the_expanded_form_out(tmp_path):
    """Which would pay without them."""
    latent = spec_of(write_changed(tmp_path, DEFAULT)).latent
    assert latent.expanded_tokens == 0
    assert replace(latent, sinks=False).expanded_tokens > 0


@pytest.mark.parametrize(
    ("keys", "error", "says"),
    [
        ({"hyper_connection.count": 0}, ModelFileError, "count is 0"),
        ({"hyper_connection.epsilon": 0.0}, ModelFileError, "epsilon is 0"),
        ({"hyper_connection.magnitude": 0.0}, ModelFileError, "magnitude is 0"),
        ({"hyper_connection.magnitude": None}, ModelFileError, "magnitude"),
        ({"attention.indexer.types": None}, ModelFileError, "a boolean for each layer"),
        ({"attention.indexer.types": [True] * 3}, ModelFileError, "3 entries for 6 layers"),
        (
            {"attention.indexer.types": [False, *[True] * 5]},
            ModelFileError,
            "the first layer has no earlier one",
        ),
        ({"attention.indexer.key_length": 6}, ModelFileError, "key_length is 6"),
        ({"attention.q_lora_rank": 0}, ModelFileError, "q_lora_rank is 0"),
        ({"expert_gating_func": 5}, UnsupportedModelError, "expert_gating_func = 5"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            UnsupportedModelError,
            "rope.scaling.factor",
        ),
        ({"attention.head_count_kv": 4}, UnsupportedModelError, "head_count_kv = 4"),
        (
            {"attention.temperature_scale": 0.5, "attention.temperature_length": 64},
            UnsupportedModelError,
            "temperature_scale",
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
        *("attn_gate", "attn_sinks", "indexer.proj", "indexer.k_norm", "attn_q_a", "attn_k_b"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path, name):
    """None of them has a default."""
    path = write_without(tmp_path, DEFAULT, f"blk.5.{name}.weight")
    with open_model_file(path) as file, pytest.raises(ModelFileError, match=r"blk\.5\."):
        open_model(file, ReferenceKernels())


@pytest.mark.parametrize("name", ["fn", "base", "scale"])
def test_a_missing_end_is_named(tmp_path, name):
    """What sums the streams behind the last layer."""
    path = write_without(tmp_path, DEFAULT, f"output_hc_{name}.weight")
    with open_model_file(path) as file, pytest.raises(ModelFileError, match=f"output_hc_{name}"):
        open_model(file, ReferenceKernels())


def test_an_indexer_that_no_key_counts_is_refused(tmp_path):
    """Its tensors have no place then."""
    keys = {"attention.indexer.top_k": None}
    path = write_changed(tmp_path, DEFAULT, **keys)
    with (
        open_model_file(path) as file,
        pytest.raises(UnsupportedModelError, match="have no place") as caught,
    ):
        open_model(file, ReferenceKernels())
    assert any("indexer" in name for name in caught.value.unsupported)


@pytest.mark.parametrize("name", ["default", "odd", "no_indexer", "one_position"])
@pytest.mark.parametrize("cache_type", [CacheType.F32, CacheType.F16])
def test_how_many_tokens_go_together_changes_no_bit(tmp_path, monkeypatch, name, cache_type):
    """Neither of a chunk, nor of those that are scored or read."""
    path = write_changed(tmp_path, ToyArch("hy_v4", **HY_V4_OPTIONS[name]))
    expected = states_in_chunks(path, IDS, [60], cache_type)
    monkeypatch.setattr(latent_attention, "SCORED_TOGETHER", 5)
    monkeypatch.setattr(latent_attention, "_READ_TOGETHER", 7)
    for cuts in ([1, 2, 3, 5, 8, 13, 21, 22, 23, 34, 55, 60], [31, 60], list(range(1, 61))):
        np.testing.assert_array_equal(states_in_chunks(path, IDS, cuts, cache_type), expected)


@pytest.mark.parametrize("may_expand", [0, 32, 60])
def test_tokens_that_may_take_the_expanded_form_take_the_other(tmp_path, may_expand):
    """Whatever a chunk says: that form has no sinks."""
    with open_model_file(write_changed(tmp_path, ALL)) as file:
        kernels = NativeKernels(threads=1)
        model = open_model(file, kernels)
        found = []
        for count in (0, may_expand):
            cache = lone_cache(model.spec, len(BLOCKS), 16, CacheType.F32)
            chunk = chunk_of(IDS, 0, SegmentKind.PROMPT)
            segments = [each._replace(num_expanded=count) for each in chunk.segments]
            chunk = replace(chunk, segments=tuple(segments))
            x = model.embed(chunk.token_ids)
            found.append(compute_layer(kernels, model, LayerIndex(0), chunk, x, cache))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    "kernels", [NativeKernels(threads=1), ReferenceKernels()], ids=["native", "reference"]
)
@pytest.mark.parametrize("toy", [DEFAULT, ODD], ids=["four", "three"])
def test_what_a_part_takes_of_streams_and_gives_them(tmp_path, kernels, toy):
    """As the definition says it, in double, and the same of a model's end."""
    with open_model_file(write_changed(tmp_path, toy)) as file:
        model = open_model(file, kernels)
        streams, count = model.non_expert.layers[1].streams, model.spec.streams.count
        rng = np.random.default_rng(3)
        x = rng.standard_normal((5, count * toy.hidden)).astype(np.float32)
        out = rng.standard_normal((5, toy.hidden)).astype(np.float32)
        for mixer in (streams.mixer, streams.feed_forward):
            taken = narrow(kernels, mixer, x, prompt=False)
            found = widen(taken.rest, out, taken.shares)
            weights, shares = _weights(kernels, mixer, x, mixer.scales, count)
            wide = x.astype(np.float64).reshape(5, count, -1)
            total = (wide * (weights + mixer.floor)[..., None]).sum(axis=1)
            mean = np.square(total).mean(axis=1, keepdims=True) + mixer.epsilon
            assert_within(taken.x, total / np.sqrt(mean) * mixer.gain, "reference/float32")
            shares = mixer.magnitude * shares + mixer.floor
            expected = (wide + shares[..., None] * out[:, None]).reshape(5, -1)
            assert_within(found, expected, "reference/float32")
        end = model._end_mixer
        weights, _ = _weights(kernels, end, x, 1.0, count)
        total = (wide * (weights + end.floor)[..., None]).sum(axis=1)
        assert_within(end_streams(kernels, end, x, count), total, "reference/float32")


def _weights(kernels, mixer, x, scales, count):
    """Return sigmoids [T, streams] of logits of the mixer, and of those behind them."""
    matrix = kernels.decode_rows(mixer.project, np.arange(len(mixer.base), dtype=np.int32))
    normed = x.astype(np.float64)
    normed /= np.sqrt(np.square(normed).mean(axis=1, keepdims=True) + mixer.epsilon)
    logits = normed @ matrix.T * scales + mixer.base
    return np.split(1 / (1 + np.exp(-logits)), [count], axis=1)


def test_an_indexers_last_numbers_turn(tmp_path):
    """Neighbours together, of its rows as of its queries: scores are those that NumPy computes in double."""
    with open_model_file(write_changed(tmp_path, DEFAULT)) as file:
        kernels = NativeKernels(threads=1)
        model = open_model(file, kernels)
        cache = lone_cache(model.spec, len(BLOCKS), 16, CacheType.F32).kv.layer(LayerIndex(5))
        chunk, weights = chunk_of(IDS, 0, SegmentKind.PROMPT), model.non_expert.layers[5].mixer
        indexer, rng = weights.indexer, np.random.default_rng(5)
        normed, ranked = (
            rng.standard_normal((60, width)).astype(np.float32)
            for width in (DEFAULT.hidden, DEFAULT.query_rank)
        )
        rope = model._rope(LayerIndex(5), chunk)
        asked = latent_attention._ask(kernels, indexer, (normed, ranked), rope, chunk, cache)
        q, k = (
            kernels.decode_rows(part, np.arange(part.rows, dtype=np.int32)).astype(np.float64)
            for part in (indexer.q, indexer.k)
        )
        frequencies = model.non_expert.ropes[5].frequencies()
    keys = normed @ k.T
    keys -= keys.mean(axis=1, keepdims=True)
    keys /= np.sqrt((keys**2).mean(axis=1, keepdims=True) + indexer.epsilon)
    turn = np.exp(1j * np.arange(60)[:, None] * frequencies)
    keys = _turned(keys * indexer.gain + indexer.bias, turn)
    heads = _turned((ranked @ q.T).reshape(60, -1, INDEX), turn[:, None])
    rows = read_index(cache.shape, cache.index, chunk.kv_slots)
    products = np.einsum("thd,bd->thb", asked.q.astype(np.float64), rows)
    assert_within(products, np.einsum("thd,bd->thb", heads, keys), "reference/float32")


def _turned(rows: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Return rows whose last numbers are turned, neighbours together."""
    last = rows[..., -TURNED:]
    found = (last[..., 0::2] + 1j * last[..., 1::2]) * turn
    pairs = np.stack((found.real, found.imag), axis=-1).reshape(last.shape)
    return np.concatenate((rows[..., :-TURNED], pairs), axis=-1)
