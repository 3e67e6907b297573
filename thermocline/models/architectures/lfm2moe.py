"""Lfm2moe: short convolutions and attention in turns, sigmoid router with a bias for the choice, leading dense layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Gating
from thermocline.kernels.whole_layer import LayerParts, SharedExpert
from thermocline.models.blocks import read_routed
from thermocline.models.decoder import DecoderLayer
from thermocline.models.metadata import SpecReader
from thermocline.models.short_convolutions import key_heads, read_mixer, with_convolutions

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`."""
    read = SpecReader(file)
    read.refuse_expert_scale()
    kv_heads, num_kv_heads = key_heads(read)
    spec = read.decoder(normalize_top_k=True, num_kv_heads=num_kv_heads)
    spec = replace(
        spec,
        router=replace(spec.router, gating=read.gating(default=Gating.SIGMOID)),
        num_dense_layers=read.count("leading_dense_block_count"),
        dense_intermediate_size=read.size("feed_forward_length"),
    )
    return with_convolutions(read, spec, kv_heads)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    prefix, hidden = f"blk.{index}.", spec.hidden_size
    mixer, rope = read_mixer(weights, spec, index)
    norm = weights.vector(prefix + "ffn_norm.weight", hidden)
    if index < spec.num_dense_layers:
        dense = SharedExpert(weights.expert(prefix, "", spec.dense_intermediate_size, hidden), None)
        return DecoderLayer(LayerParts(mixer, norm, spec.rms_epsilon, None, dense), rope, None)
    bias = weights.vector(prefix + "exp_probs_b.bias", spec.router.num_experts)
    routed, experts = read_routed(weights, spec, prefix, bias)
    return DecoderLayer(LayerParts(mixer, norm, spec.rms_epsilon, routed), rope, experts)
