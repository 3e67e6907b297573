"""Reads attention to a window of rows and to entries: its sizes by metadata, its weights by name. Knows no architecture."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from thermocline.kernels.compressed_weights import CompressedWeights, Compressor, EntryIndexer
from thermocline.kernels.entries import entry_shape
from thermocline.kernels.whole_layer import LowRank
from thermocline.models.attention_specs import CHOSEN_RATIO, EntriesSpec
from thermocline.models.rope import RopeRule, Yarn
from thermocline.models.spec import LayerKind

if TYPE_CHECKING:
    from thermocline.models.metadata import SpecReader
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap

_RATIOS: Final = (0, CHOSEN_RATIO, 128)
"""What llama.cpp reads, and files have."""


def with_entries(read: SpecReader, spec: ModelSpec) -> ModelSpec:
    """Return the dimensions of a model whose layers all attend to a window, and most of them to entries. Raises ModelError."""
    key = "attention.compress_ratios"
    ratios = read.integers(key, spec.num_layers)
    if odd := sorted(set(ratios) - set(_RATIOS)):
        raise read.unsupported(f"{key} with {odd[0]} (one of {_RATIOS})")
    read.require_equal("attention.head_count_kv", 1)
    turned = read.rotary_dims(spec.head_dim)
    groups = read.size("attention.output_group_count")
    if spec.num_heads % groups:
        raise read.bad("attention.output_group_count", f"does not divide {spec.num_heads} heads")
    scaling = spec.rope_scaling
    if isinstance(scaling, Yarn):  # of this model no number grows by it
        scaling = replace(scaling, magnitude=1.0)
    base = read.positive_float("attention.compress_rope_freq_base")
    chooses = CHOSEN_RATIO in ratios
    index = "attention.indexer."
    entries = EntriesSpec(
        window=read.size("attention.sliding_window"),
        ratios=ratios,
        rope=RopeRule(turned, base, scaling, pairs=True),
        groups=groups,
        rank=read.size("attention.output_lora_rank"),
        query_rank=read.size("attention.q_lora_rank"),
        index_heads=read.size(f"{index}head_count") if chooses else 0,
        index_dim=read.size(f"{index}key_length", least=turned) if chooses else 0,
        most_read=read.size(f"{index}top_k") if chooses else 0,
    )
    if spec.head_dim % 2 or entries.index_dim % 2:
        raise read.bad("attention.key_length", "is odd, or that of the indexer; pairs turn")
    shapes = tuple(
        entry_shape(max(ratio, 1), spec.head_dim, entries.index_dim if entries.is_chosen(n) else 0)
        for n, ratio in enumerate(ratios)
    )
    return replace(
        spec,
        own_rotary_dims=turned,
        rope_scaling=None,
        own_layer_kinds=tuple(
            LayerKind.ATTENTION if ratio else LayerKind.RECURRENT for ratio in ratios
        ),
        own_kv_shapes=shapes,
        entries=entries,
    )


def compressed_rope(spec: ModelSpec, index: int) -> RopeRule:
    """Return what turns of each head's last numbers in layer `index`."""
    of = spec.entries
    assert of is not None, "a model without entries"
    if of.ratios[index]:
        return of.rope
    return RopeRule(spec.rotary_dims, spec.rope_base, pairs=True)


def read_compressed(weights: WeightMap, spec: ModelSpec, index: int) -> CompressedWeights:
    """Return the attention of layer `index`. Raises ModelFileError."""
    of, prefix = spec.entries, f"blk.{index}."
    assert of is not None, "a model without entries"
    heads, dim, hidden, rank = spec.num_heads, spec.head_dim, spec.hidden_size, of.query_rank
    low = LowRank(
        weights.matrix(f"{prefix}attn_q_a.weight", rank, hidden),
        weights.vector(f"{prefix}attn_q_a_norm.weight", rank),
    )
    compressor = indexer = None
    if of.ratios[index]:
        compressor = _read_compressor(weights, of, index, f"{prefix}attn_", dim, hidden)
    if of.is_chosen(index):
        own = f"{prefix}indexer"
        indexer = EntryIndexer(
            q=weights.matrix(f"{own}.attn_q_b.weight", of.index_heads * of.index_dim, rank),
            weights=weights.matrix(f"{own}.proj.weight", of.index_heads, hidden),
            scale=1 / math.sqrt(of.index_heads * of.index_dim),
            compressor=_read_compressor(weights, of, index, f"{own}_", of.index_dim, hidden),
            most_read=of.most_read,
        )
    width = heads * dim // of.groups
    return CompressedWeights(
        low=low,
        q=weights.matrix(f"{prefix}attn_q_b.weight", heads * dim, rank),
        kv=weights.matrix(f"{prefix}attn_kv.weight", dim, hidden),
        kv_gain=weights.vector(f"{prefix}attn_kv_a_norm.weight", dim),
        epsilon=spec.rms_epsilon,
        window=of.window,
        sinks=weights.vector(f"{prefix}attn_sinks.weight", heads),
        scale=spec.attention_scale,
        groups=weights.equal_matrices(f"{prefix}attn_output_a.weight", (of.groups, of.rank, width)),
        output=weights.matrix(f"{prefix}attn_output_b.weight", hidden, of.groups * of.rank),
        compressor=compressor,
        indexer=indexer,
    )


def _read_compressor(
    weights: WeightMap, of: EntriesSpec, index: int, start: str, dim: int, hidden: int
) -> Compressor:
    """Return what makes entries of `dim` numbers, by tensors whose names begin with `start`."""
    prefix, width = f"{start}compressor_", of.series(index) * dim
    return Compressor(
        weights.matrix(f"{prefix}kv.weight", width, hidden),
        weights.matrix(f"{prefix}gate.weight", width, hidden),
        weights.array(f"{prefix}ape.weight", (of.ratios[index], width)),
        weights.vector(f"{prefix}norm.weight", dim),
    )
