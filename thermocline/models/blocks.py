"""Reads the parts of a layer that several architectures have alike, by their GGUF names.

Knows the names and shapes of tensors, not which architecture has which part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import HeadNorm
from thermocline.kernels.whole_layer import (
    AttentionWeights,
    LayerParts,
    RoutedExperts,
    SharedExpert,
)
from thermocline.models.decoder import DecoderLayer
from thermocline.models.rope import RopeRule
from thermocline.models.routing import routing_rule

if TYPE_CHECKING:
    from thermocline.kernels.weight import FloatArray
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import StackedExperts, WeightMap


def plain_rope(spec: ModelSpec) -> RopeRule:
    """Return the rule by which all heads turn."""
    return RopeRule(spec.rotary_dims, spec.rope_base)


def read_attention(
    weights: WeightMap, spec: ModelSpec, prefix: str, *, gated: bool = False
) -> AttentionWeights:
    """Return grouped-query attention without norms of its heads. gated: q has rows for gates, too."""
    hidden = spec.hidden_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return AttentionWeights(
        norm=weights.vector(prefix + "attn_norm.weight", hidden),
        q=weights.matrix(prefix + "attn_q.weight", q_size * (2 if gated else 1), hidden),
        k=weights.matrix(prefix + "attn_k.weight", kv_size, hidden),
        v=weights.matrix(prefix + "attn_v.weight", kv_size, hidden),
        output=weights.matrix(prefix + "attn_output.weight", hidden, q_size),
        head_norm=HeadNorm(None, None, spec.rms_epsilon),
        scale=spec.attention_scale,
    )


def read_head_norm(weights: WeightMap, spec: ModelSpec, prefix: str) -> HeadNorm:
    """Return the norms of each head of queries and keys."""
    q_gain, k_gain = (
        weights.vector(f"{prefix}attn_{part}_norm.weight", spec.head_dim) for part in ("q", "k")
    )
    return HeadNorm(q_gain, k_gain, spec.rms_epsilon)


def read_routed(
    weights: WeightMap, spec: ModelSpec, prefix: str, bias: FloatArray | None = None
) -> tuple[RoutedExperts, StackedExperts]:
    """Return the router with its experts, and where they lie. bias: see `RoutingRule`."""
    router, hidden = spec.router, spec.hidden_size
    experts = weights.experts(prefix, router.num_experts, spec.expert_intermediate_size, hidden)
    matrix = weights.matrix(prefix + "ffn_gate_inp.weight", router.num_experts, hidden)
    return RoutedExperts(matrix, routing_rule(router, bias), experts.stack), experts


def read_shared(weights: WeightMap, spec: ModelSpec, prefix: str) -> SharedExpert:
    """Return the shared expert without a gate."""
    width = spec.shared_intermediate_size
    return SharedExpert(weights.expert(prefix, "_shexp", width, spec.hidden_size), None)


def routed_layer(
    weights: WeightMap,
    spec: ModelSpec,
    index: int,
    attention: AttentionWeights,
    shared: SharedExpert | None = None,
) -> DecoderLayer:
    """Return a layer of attention and routed experts, whose heads turn as a whole."""
    prefix = f"blk.{index}."
    routed, experts = read_routed(weights, spec, prefix)
    norm = weights.vector(prefix + "ffn_norm.weight", spec.hidden_size)
    parts = LayerParts(attention, norm, spec.rms_epsilon, routed, shared)
    return DecoderLayer(parts, plain_rope(spec), experts)
