"""Jamba: the first Mamba and attention without rotary embedding in turns, experts behind some and dense feed-forwards behind others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Gating
from thermocline.models.blocks import read_attention
from thermocline.models.feed_forwards import with_dense_layers
from thermocline.models.mamba import read_selective, selective_shape
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer
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
    num_layers = read.size("block_count")
    kv_heads, num_kv_heads = read.attention_heads("attention.head_count_kv", num_layers)
    spec = _feed_forwards(read, num_layers, num_kv_heads)
    kinds = tuple(LayerKind.ATTENTION if heads else LayerKind.RECURRENT for heads in kv_heads)
    spec = replace(spec, own_layer_kinds=kinds, own_rotary_dims=0)
    if LayerKind.RECURRENT in kinds:
        spec = replace(spec, recurrent=selective_shape(read))
    return spec


def _feed_forwards(read: SpecReader, num_layers: int, num_kv_heads: int) -> ModelSpec:
    """Return the dimensions that all architectures share, with those of the feed-forwards, which are of one width.

    The tensors say which layers have experts. A dense model names one expert, or none.
    """
    has_routers = any(f"blk.{n}.ffn_gate_inp.weight" in read.tensors for n in range(num_layers))
    if not has_routers and read.count("expert_count", default=0) < 2:
        return read.dense_decoder(num_kv_heads=num_kv_heads, most_experts=1)
    width = read.size("feed_forward_length")
    spec = read.decoder(normalize_top_k=False, num_kv_heads=num_kv_heads, width=width)
    return with_dense_layers(read, spec)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    is_recurrent = spec.layer_kinds[index] is LayerKind.RECURRENT
    read_mixer = read_selective if is_recurrent else read_attention
    return mixed_layer(weights, spec, index, read_mixer(weights, spec, f"blk.{index}."))
