"""Kimi Linear: delta rule with a decay per channel, every fourth layer latent attention that does not turn."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.models.gated_delta import channel_shape, kinds_by_heads, low_rank_delta
from thermocline.models.latent import read_latent_attention, still_rope, with_latent_layers
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer, mixed_spec
from thermocline.models.spec import LayerKind

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. A layer without heads of keys keeps a state, with as many heads as attention has.

    llama.cpp divides the chosen experts' weights by their sum whatever a file says, and its converter says nothing.
    """
    read = SpecReader(file, is_latent=True)
    read.refuse("kda.safe_gate", "kda.gate_lower_bound")
    kv_heads, _ = read.attention_heads("attention.head_count_kv", read.size("block_count"))
    normalize = read.flag("expert_weights_norm", default=True)
    spec = read.decoder(normalize_top_k=normalize, num_kv_heads=1)
    shared = read.count("expert_shared_count") * spec.expert_intermediate_size
    spec = mixed_spec(read, spec, gating=read.gating(), shared=shared)
    shape = channel_shape(read, spec)
    kinds = kinds_by_heads(kv_heads[: spec.num_layers])
    return replace(with_latent_layers(read, spec), own_layer_kinds=kinds, recurrent=shape)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    prefix = f"blk.{index}."
    if spec.layer_kinds[index] is LayerKind.RECURRENT:
        return mixed_layer(weights, spec, index, low_rank_delta(weights, spec, prefix))
    attention = read_latent_attention(weights, spec, prefix)
    return mixed_layer(weights, spec, index, attention, rope=still_rope(spec))
