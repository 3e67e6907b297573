"""Granitehybrid: Mamba2 and attention in turns, routed experts or a dense feed-forward in all layers, Granite's factors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Gating
from thermocline.models.mamba import mamba_shape, read_mamba
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer, paired_layer, with_factors
from thermocline.models.spec import LayerKind, ModelSpec

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`."""
    read = SpecReader(file)
    read.refuse_expert_scale()
    read.require_equal("expert_gating_func", int(Gating.SOFTMAX))
    key = "attention.head_count_kv"
    kv_heads, num_kv_heads = read.attention_heads(key, read.size("block_count"))
    spec = _feed_forward(read, num_kv_heads)
    kinds = tuple(LayerKind.ATTENTION if heads else LayerKind.RECURRENT for heads in kv_heads)
    spec = replace(spec, own_layer_kinds=kinds, own_rotary_dims=_rotary_dims(read, spec))
    if LayerKind.RECURRENT in kinds:
        spec = replace(spec, recurrent=mamba_shape(read))
    return with_factors(read, spec, logit_scale=1.0)


def _feed_forward(read: SpecReader, num_kv_heads: int) -> ModelSpec:
    """Return the dimensions that all architectures share, with those of the feed-forward.

    Without experts it is the shared one, whose width the file may name besides the usual one, which then counts less.
    """
    shared = read.count("expert_shared_feed_forward_length", default=0)
    if not read.count("expert_count", default=0):
        return read.dense_decoder(num_kv_heads=num_kv_heads, width=shared or None)
    spec = read.decoder(
        normalize_top_k=True, num_kv_heads=num_kv_heads, width=read.size("feed_forward_length")
    )
    return replace(spec, shared_intermediate_size=shared)


def _rotary_dims(read: SpecReader, spec: ModelSpec) -> int:
    """Return how many dimensions of a head turn: all, or none where the file says so by this flag.

    Bamba's heads turn in part, and are refused: the converter pairs their rows as those of whole heads.
    """
    if not read.flag("rope.scaling.finetuned"):
        return 0
    read.require_equal("rope.dimension_count", spec.head_dim)
    return spec.head_dim


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    prefix = f"blk.{index}."
    if spec.layer_kinds[index] is LayerKind.RECURRENT:
        return mixed_layer(weights, spec, index, read_mamba(weights, spec, prefix))
    return paired_layer(weights, spec, index)
