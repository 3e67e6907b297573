"""Several residual streams, n-grams and chosen blocks: what files state, what is computed, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from tests.support.block_runs import BLOCKS, chunk_of, states_in_chunks
from tests.support.changed_toys import spec_of, write_changed, write_without
from tests.support.streams_cases import STREAMS_OPTIONS
from tests.support.toy_archs import ToyArch, toy_arch_weights
from thermocline.cli.info import info
from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.kernels.cache_format import CacheType, HeadShape
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.dense_contract import Attending
from thermocline.kernels.recurrent_contract import StateShape
from thermocline.kernels.reference import ReferenceKernels
from thermocline.messages import LayerIndex, SegmentKind
from thermocline.modelfile.reader import open_model_file
from thermocline.models import block_attention, choosing
from thermocline.models.lone_sequence import lone_cache
from thermocline.models.ngrams import hashed_rows
from thermocline.models.registry import open_model, read_spec
from thermocline.models.sizes import lasting_bytes, measure_sizes
from thermocline.models.spec import LayerKind, NGramSpec, StreamsSpec

DEFAULT, ODD, PLAIN = (
    ToyArch("qwen4exp", **STREAMS_OPTIONS[name]) for name in ("default", "odd", "no_ngrams")
)
INDEX, STREAMS = 32, 4
IDS = [(5 * n + n * n) % 250 for n in range(60)]


def test_what_a_file_states(tmp_path):
    """In the spec, in sizes that planners use, and in the report; a table of n-grams counts apart."""
    path = write_changed(tmp_path, DEFAULT)
    with open_model_file(path) as file:
        spec = read_spec(file)
        sizes = measure_sizes(file.tensors.values(), spec, CacheType.F16)
        table = file.tensors["per_layer_token_embd.weight"].nbytes
        assert lasting_bytes(file.tensors.values(), spec) == file.total_tensor_bytes - table
        assert sizes.total == lasting_bytes(file.tensors.values(), spec)
    assert sizes.ngrams == table
    assert spec.streams == StreamsSpec(STREAMS, 24)
    assert spec.stream_size == STREAMS * spec.hidden_size
    assert spec.kv_shapes[3] == HeadShape(DEFAULT.kv_heads, DEFAULT.head_dim, index=INDEX)
    assert spec.kv_shapes[0] == HeadShape(DEFAULT.kv_heads, DEFAULT.head_dim)
    assert sizes.layers[3].kv_per_token == 2 * (2 * DEFAULT.kv_heads * DEFAULT.head_dim + INDEX)
    # Three taps at every third token, and the two tokens before the next.
    further = StateShape((9, spec.stream_size), (1, 1, 2))
    assert spec.further_states == {LayerIndex(1): further}
    assert sizes.layers[1].state == sizes.layers[0].state + further.num_bytes
    shown = " ".join(CliRunner().invoke(info, [str(path)]).output.split())
    assert "4 of width 64, 4 residual streams" in shown
    assert "a token reads 8 positions" in shown


def test_parts_that_a_file_may_lack(tmp_path):
    """N-grams, and a choice in layers whose ratio is 0; what chooses may be there all the same."""
    assert spec_of(write_changed(tmp_path, PLAIN)).ngrams is None
    path = write_changed(tmp_path, PLAIN, **{"attention.compress_ratios": [0, 0, 0, 0]})
    assert spec_of(path).indexer is None
    with open_model_file(path) as file:
        model = open_model(file, NativeKernels(threads=1))
        assert model.non_expert.layers[3].mixer.indexer is None
        assert (model.has_whole_layers, model.has_whole_steps) == (True, False)


@pytest.mark.parametrize(
    ("keys", "error", "says"),
    [
        ({"hyper_connection.count": 1}, ModelFileError, "count is 1"),
        ({"hyper_connection.low_rank": 0}, ModelFileError, "low_rank is 0"),
        ({"attention.indexer.top_k": 6}, ModelFileError, "is 6, no multiple of the 4"),
        ({"attention.indexer.key_length": 6}, ModelFileError, "key_length is 6"),
        ({"attention.indexer.head_count": None}, ModelFileError, "head_count"),
        ({"attention.compress_ratios": [0, 4]}, ModelFileError, "must have 4 entries"),
        (
            {
                "attention.compress_ratios": [0, 4, 0, 2],
                "attention.recurrent_layers": [True, False, True, False],
            },
            ModelFileError,
            "differs between layers",
        ),
        ({"attention.indexer.key_length": 1154}, UnsupportedModelError, "1154 numbers"),
        ({"ple.layers": [3]}, ModelFileError, "names layer 3"),
        ({"ple.layers": [4]}, ModelFileError, "names layer 4"),
        ({"ple.ngram_size": 1}, ModelFileError, "ngram_size is 1"),
        ({"ple.ngram_size": 17}, ModelFileError, "is 17; at most 16"),
        ({"ple.heads_per_ngram": 5}, ModelFileError, "must have 10 entries"),
        ({"ple.head_vocab_sizes": [61] * 7 + [0]}, ModelFileError, "each at least 1"),
        ({"ple.head_offsets": [0] * 7 + [2**31 - 10]}, ModelFileError, "beyond 2147483647 rows"),
        ({"ple.layer_multipliers": [3, 5]}, ModelFileError, "must have 3 entries"),
        ({"ple.layer_multipliers": [3, 5, -1]}, ModelFileError, "each at least 0"),
    ],
)
def test_files_that_can_not_be_computed_are_refused(tmp_path, keys, error, says):
    """With the key and what is wrong with it."""
    with pytest.raises(error, match=says):
        spec_of(write_changed(tmp_path, DEFAULT, **keys))


def test_a_table_that_lacks_rows_is_refused(tmp_path):
    """Hashes would look beyond it."""
    weights = toy_arch_weights(DEFAULT)
    weights["per_layer_token_embd.weight"] = weights["per_layer_token_embd.weight"][:-64]
    path = write_changed(tmp_path, DEFAULT, weights)
    with open_model_file(path) as file, pytest.raises(ModelFileError, match="per_layer_token_embd"):
        open_model(file, ReferenceKernels())


@pytest.mark.parametrize(
    "name",
    [
        *("hc_attn_norm", "hc_attn_down", "hc_attn_up", "hc_attn_inject", "hc_ffn_down"),
        *("ple_key", "ple_value", "ple_norm_key", "ple_norm_query", "ple_norm_conv", "ple_conv1d"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path, name):
    """None of them has a default."""
    path = write_without(tmp_path, DEFAULT, f"blk.1.{name}.weight")
    with open_model_file(path) as file, pytest.raises(ModelFileError, match=name):
        open_model(file, ReferenceKernels())


def test_rows_of_ngrams():
    """By the published formula in whole numbers of any size: a token ends what comes before it, and starts have none."""
    spec = NGramSpec(
        layer=LayerIndex(0),
        most_tokens=3,
        heads=2,
        width=8,
        conv_width=4,
        end_token=7,
        factors=(2**62 + 1, 35_184_372_088_831, 2**44 + 5),
        rows=(61, 67, 71, 73),
        firsts=(0, 61, 128, 199),
    )
    tokens = [3, 7, 248_319, 5, 5, 7, 7, 11, 12, 13]
    ids = np.array([-1, -1, *tokens], np.int64)
    found = hashed_rows(spec, ids)
    for at, token in enumerate(tokens):
        before, is_cut = [], False
        for back in (1, 2):
            earlier = tokens[at - back] if at >= back else None
            is_cut = is_cut or earlier is None or earlier == 7
            before.append(7 if is_cut else earlier)
        mixed = (token * spec.factors[0]) % 2**64
        expected = []
        for length, earlier in enumerate(before):
            mixed ^= (earlier * spec.factors[1 + length]) % 2**64
            heads = slice(2 * length, 2 * length + 2)
            sizes = zip(spec.rows[heads], spec.firsts[heads], strict=True)
            expected += [mixed % size + first for size, first in sizes]
        assert found[at].tolist() == expected
    assert found.dtype == np.int32


@pytest.mark.parametrize("toy", [DEFAULT, ODD], ids=["default", "odd"])
@pytest.mark.parametrize("cache_type", [CacheType.F32, CacheType.F16])
def test_how_many_tokens_go_together_changes_no_bit(tmp_path, monkeypatch, toy, cache_type):
    """Neither of a chunk, whose blocks and n-grams begin in another one, nor of those that are scored."""
    path = write_changed(tmp_path, toy)
    expected = states_in_chunks(path, IDS, [60], cache_type)
    monkeypatch.setattr(choosing, "SCORED_TOGETHER", 5)
    for cuts in ([1, 2, 3, 5, 8, 13, 21, 22, 23, 34, 55, 60], [31, 60], list(range(1, 61))):
        np.testing.assert_array_equal(states_in_chunks(path, IDS, cuts, cache_type), expected)


def test_which_positions_are_read(tmp_path):
    """The best blocks by scores that NumPy computes in double, and what is behind the last whole block; else all."""
    path = write_changed(tmp_path, PLAIN)
    with open_model_file(path) as file:
        kernels = NativeKernels(threads=1)
        model = open_model(file, kernels)
        cache = lone_cache(model.spec, len(BLOCKS), 16, CacheType.F32)
        chunk = chunk_of(IDS, 0, SegmentKind.PROMPT)
        rng = np.random.default_rng(5)
        normed = rng.standard_normal((60, PLAIN.hidden)).astype(np.float32)
        indexer = model.non_expert.layers[3].mixer.indexer
        rotary = model._rotaries[3]
        turns = rotary.at(chunk.positions), rotary.look_up
        mine = cache.kv.layer(LayerIndex(3))
        asked = block_attention.ask_blocks(kernels, indexer, normed, turns, chunk, mine)
        words = asked.chosen(kernels.dense, chunk, mine)

        x = normed.astype(np.float64)
        q_gain, k_gain = (
            model._kernels.decode_rows(weight, np.arange(weight.rows, dtype=np.int32))
            for weight in (indexer.q, indexer.k)
        )
        heads = (x @ q_gain.T).reshape(60, -1, INDEX)
        means = (x @ k_gain.T).reshape(15, 4, INDEX).mean(axis=1)
    heads = turned(normed_rows(heads) * indexer.gains[0], np.arange(60), PLAIN.rotary)
    keys = turned(normed_rows(means)[:, None] * indexer.gains[1], np.arange(15) * 4, PLAIN.rotary)
    scores = np.maximum(np.einsum("thd,bd->thb", heads, keys[:, 0]), 0).sum(axis=1)
    for position in range(60):
        whole = (position + 1) // 4
        read = np.ones(words.shape[1] * 16, bool)
        if whole > 2:
            best = np.argsort(-scores[position, :whole], kind="stable")[:2]
            read[: whole * 4] = np.repeat(np.isin(np.arange(whole), best), 4)
        bits = np.unpackbits(words[position].view(np.uint8), bitorder="little").astype(bool)
        np.testing.assert_array_equal(bits[: position + 1], read[: position + 1])
    few = replace(chunk, positions=chunk.positions[:11])
    assert asked.chosen(kernels.dense, few, mine) is None


def normed_rows(x):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)


def turned(x, positions, dims):
    """Return x [n, heads, dim] turned by halves."""
    half = dims // 2
    angles = positions[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:dims]
    rest = x[..., dims:]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin, rest), axis=-1)


def test_layers_without_a_choice_attend_as_ever(tmp_path):
    """Nothing is masked there."""
    spec = spec_of(write_changed(tmp_path, DEFAULT))
    assert [kind is LayerKind.ATTENTION for kind in spec.layer_kinds] == [False] * 3 + [True]
    assert Attending(1.0).chosen is None
