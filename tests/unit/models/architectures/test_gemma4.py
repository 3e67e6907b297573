"""Gemma 4: what its layers are made of, and the small models, whose layers share keys and have embeddings of their own."""

from __future__ import annotations

import pytest

from tests.support.arch_cases import ARCH_CASES
from tests.support.toy_archs import toy_arch_weights, write_toy_arch
from tests.unit.models.test_architectures import TOYS, opened, spec_of
from thermocline.cli.info import inspect
from thermocline.errors import ModelFileError
from thermocline.kernels.cache_format import CacheType, HeadShape
from thermocline.modelfile.reader import open_model_file
from thermocline.models.lone_sequence import lone_cache
from thermocline.models.registry import read_spec
from thermocline.models.rope import RopeRule
from thermocline.models.sizes import measure_sizes
from thermocline.models.spec import LayerKind


def test_gemma4_reads_what_differs_by_kind(tmp_path):
    """Heads of keys and values, windows, and how each kind turns: a quarter of the pairs without a window."""
    path = write_toy_arch(tmp_path / "m.gguf", TOYS["gemma4"])
    spec = spec_of(path)
    kinds = [LayerKind.WINDOW, LayerKind.WINDOW, LayerKind.ATTENTION]
    assert list(spec.layer_kinds) == kinds
    assert spec.kv_shapes == (HeadShape(2, 16), HeadShape(2, 16), HeadShape(1, 32))
    assert (spec.embedding_scale, spec.logit_softcap) == (8.0, 10.0)
    model = opened(path)
    near, _, far = model.non_expert.ropes
    assert near == RopeRule(16, 500.0)
    turning = far.frequencies() * 1e6 > 1
    assert turning.tolist() == [True] * 4 + [False] * 12
    assert [layer.mixer.window for layer in model.non_expert.layers] == [16, 16, 0]


def test_small_gemma4_reads_other_layers_keys(tmp_path):
    """The last layers keep nothing, attend to the last of their kind before them, and have a width of their own.

    Keys that a converter has left in the file for them are not used.
    """
    toy = next(case.toy for case in ARCH_CASES if case.name == "gemma4_small_uneven")
    weights = toy_arch_weights(toy)
    for name in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"):
        weights[f"blk.4.{name}"] = weights[f"blk.3.{name}"]
    model = opened(write_toy_arch(tmp_path / "m.gguf", toy, weights=weights))
    spec = model.spec
    assert spec.kv_sources == {4: 3, 5: 2}
    assert spec.keyless_layers == (4, 5)
    assert spec.own_feed_forward_sizes == (23, 23, 23, 23, 46, 46)
    assert spec.cpu_only == "embeddings of each layer and attention to another layer's keys"
    assert [layer.mixer.k is None for layer in model.non_expert.layers] == [False] * 4 + [True] * 2
    cache = lone_cache(spec, 2, 16, CacheType.F16).kv
    assert cache.layer(4) is cache.layer(3)
    assert cache.layer(5) is cache.layer(2)
    del weights["blk.3.proj.weight"]
    with pytest.raises(ModelFileError, match=r"blk.3.proj.weight"):
        opened(write_toy_arch(tmp_path / "n.gguf", toy, weights=weights))


def test_sizes_tell_what_is_kept_from_what_is_read(tmp_path):
    """The table of the layers' embeddings is read by the row; a layer's keys count once, and are read by all readers."""
    toy = next(case.toy for case in ARCH_CASES if case.name == "gemma4_small")
    path = write_toy_arch(tmp_path / "m.gguf", toy)
    with open_model_file(path) as file:
        tensors, spec = tuple(file.tensors.values()), read_spec(file)
        footprint = inspect(file).footprint
    sizes = measure_sizes(tensors, spec, CacheType.F16)
    table = next(t for t in tensors if t.name == "per_layer_token_embd.weight")
    assert sizes.embedding == table.nbytes
    assert sizes.total == footprint.total_bytes
    assert footprint.token_bytes == footprint.total_bytes - table.nbytes + table.row_bytes
    kept = [layer.kv_per_token for layer in sizes.layers]
    assert kept == [128, 128, 128] + [0] * 3
    assert [layer.seen_per_token for layer in sizes.layers] == [128] * 6
