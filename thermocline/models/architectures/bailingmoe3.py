"""Bailingmoe3: delta rule with a bounded decay per channel, latent attention that turns and is gated, sigmoid router."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.models.expert_limits import limited_layer, with_limits
from thermocline.models.feed_forwards import shared_width
from thermocline.models.gated_delta import (
    channel_delta,
    channel_shape,
    delta_shape,
    kinds_by_heads,
    lower_bound,
)
from thermocline.models.latent import latent_rope, read_latent_attention, with_latent_layers
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer, mixed_spec
from thermocline.models.spec import LayerKind

if TYPE_CHECKING:
    from thermocline.kernels.whole_layer import DeltaWeights
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. A layer without heads of keys keeps a state, with as many heads as attention has."""
    read = SpecReader(file, is_latent=True)
    read.refuse("rope.dimension_sections")  # of places in pictures
    if not read.flag("kda.safe_gate", default=True):
        read.refuse("kda.safe_gate")
    kv_heads, _ = read.attention_heads("attention.head_count_kv", read.size("block_count"))
    normalize = read.flag("expert_weights_norm", default=False)
    spec = read.decoder(normalize_top_k=normalize, num_kv_heads=1)
    usual = read.size("expert_shared_count") * spec.expert_intermediate_size
    stated = read.count("expert_shared_feed_forward_length", default=usual)
    shared = shared_width(read, spec.num_layers, stated)
    spec = mixed_spec(read, spec, gating=read.gating(), shared=shared)
    shape = replace(channel_shape(read, spec), lower_bound=lower_bound(read, file))
    spec = with_limits(read, file, spec)
    return replace(
        with_latent_layers(read, spec),
        own_layer_kinds=kinds_by_heads(kv_heads[: spec.num_layers]),
        recurrent=shape,
    )


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    if spec.layer_kinds[index] is LayerKind.RECURRENT:
        layer = mixed_layer(weights, spec, index, _delta(weights, spec, f"blk.{index}."))
        return limited_layer(weights, spec, index, layer)
    return read_next_block(weights, spec, index)


def read_next_block(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `DraftingArchitecture.read_next_block`. It is a layer of latent attention."""
    prefix = f"blk.{index}."
    attention = read_latent_attention(weights, spec, prefix)
    gate = weights.matrix(prefix + "attn_gate.weight", spec.num_heads, spec.hidden_size)
    attention = replace(attention, gate=gate)
    layer = mixed_layer(weights, spec, index, attention, rope=latent_rope(spec))
    return limited_layer(weights, spec, index, layer)


def _delta(weights: WeightMap, spec: ModelSpec, prefix: str) -> DeltaWeights:
    shape, hidden = delta_shape(spec), spec.hidden_size
    width = shape.value_width
    return channel_delta(
        weights,
        spec,
        prefix,
        z=weights.matrix(prefix + "ssm_g_a.weight", width, hidden),
        alpha=weights.matrix(prefix + "ssm_f_a.weight", width, hidden),
    )
