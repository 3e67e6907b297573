"""Nemotron_h_moe: each block is Mamba2, attention without rotary embedding, or experts of a squared ReLU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Gating
from thermocline.kernels.weight import ExpertActivation
from thermocline.kernels.whole_layer import AroundExperts, LayerParts
from thermocline.models.blocks import read_attention, read_routed, read_shared
from thermocline.models.decoder import DecoderLayer
from thermocline.models.lone_blocks import block_kinds, read_mixer_block
from thermocline.models.mamba import mamba_shape
from thermocline.models.metadata import SpecReader
from thermocline.models.spec import LayerKind, ModelSpec

if TYPE_CHECKING:
    from thermocline.kernels.weight import FloatArray
    from thermocline.kernels.whole_layer import AttentionWeights
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.weights import WeightMap

_ACTIVATION = ExpertActivation.SQUARED_RELU


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`."""
    read = SpecReader(file)
    num_blocks = read.size("block_count")
    used = read.sizes("expert_used_count", num_blocks, least=0)
    expert_widths = read.sizes("expert_feed_forward_length", num_blocks, least=0)
    kv_heads, num_kv_heads = read.attention_heads("attention.head_count_kv", num_blocks)
    spec = read.decoder(
        normalize_top_k=read.flag("expert_weights_norm"),
        num_kv_heads=num_kv_heads,
        epsilon=read.either_epsilon(),
        used=max(used),
        width=max(expert_widths),
    )
    num_layers, extra = read.decoder_layers(num_blocks)
    widths = read.sizes("feed_forward_length", num_blocks, least=0)
    kinds = block_kinds(kv_heads[:num_layers], widths[:num_layers])
    routed = [n for n, kind in enumerate(kinds) if kind is LayerKind.NONE]
    for key, counts in (("expert_used_count", used), ("expert_feed_forward_length", expert_widths)):
        if any(not counts[n] for n in routed):
            raise read.bad(key, "is 0 for a block that has a feed-forward")
    router = replace(
        spec.router,
        own_used=_own(used, routed, num_layers),
        gating=read.gating(default=Gating.SIGMOID),
        scale=read.positive_float("expert_weights_scale", zero=1.0),
    )
    return replace(
        spec,
        num_layers=num_layers,
        num_predict_layers=extra,
        next_block_centers=True,
        own_layer_kinds=kinds,
        own_dense_layers=tuple(n for n in range(num_layers) if n not in routed),
        own_expert_sizes=_own(expert_widths, routed, num_layers),
        own_rotary_dims=0,
        router=router,
        expert_activation=_ACTIVATION,
        own_expert_hidden_size=read.count("moe_latent_size", default=0),
        shared_intermediate_size=read.size("expert_shared_feed_forward_length"),
        recurrent=mamba_shape(read),
    )


def _own(counts: tuple[int, ...], routed: list[int], num_layers: int) -> tuple[int, ...]:
    """Return the layers' counts, 0 for those without experts; () where all have one (Puzzle's differ)."""
    if len({counts[n] for n in routed}) < 2:
        return ()
    return tuple(counts[n] if n in routed else 0 for n in range(num_layers))


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    prefix = f"blk.{index}."
    if spec.layer_kinds[index] is not LayerKind.NONE:
        return read_mixer_block(weights, spec, index)
    norm = weights.vector(prefix + "attn_norm.weight", spec.hidden_size)
    return _routed_layer(weights, spec.at(index), prefix, None, norm)


def read_next_block(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `DraftingArchitecture.read_next_block`. It is two of the trunk's blocks in one: attention, then experts."""
    prefix = f"blk.{index}."
    attention = read_attention(weights, spec, prefix)
    norm = weights.vector(prefix + "post_attention_norm.weight", spec.hidden_size)
    return _routed_layer(weights, spec, prefix, attention, norm)


def _routed_layer(
    weights: WeightMap,
    spec: ModelSpec,
    prefix: str,
    attention: AttentionWeights | None,
    norm: FloatArray,
) -> DecoderLayer:
    bias = weights.vector(prefix + "exp_probs_b.bias", spec.router.num_experts)
    routed, experts = read_routed(weights, spec, prefix, bias, _ACTIVATION)
    if width := spec.own_expert_hidden_size:
        around = AroundExperts(
            weights.matrix(prefix + "ffn_latent_down.weight", width, spec.hidden_size),
            weights.matrix(prefix + "ffn_latent_up.weight", spec.hidden_size, width),
        )
        routed = replace(routed, around=around)
    shared = read_shared(weights, spec, prefix, _ACTIVATION)
    parts = LayerParts(attention, norm, spec.rms_epsilon, routed, shared)
    return DecoderLayer(parts, None, experts)
