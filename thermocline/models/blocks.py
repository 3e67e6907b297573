"""Reads the parts of a layer that architectures share, by their GGUF names.

Knows the names and shapes of tensors, not which architecture has which part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.kernels.dense_contract import HeadNorm
from thermocline.kernels.weight import ExpertActivation
from thermocline.kernels.whole_layer import (
    NO_NORM,
    AttentionWeights,
    LayerParts,
    MoeWeights,
    SharedExpert,
)
from thermocline.models.decoder import DecoderLayer
from thermocline.models.norms import read_centering
from thermocline.models.rope import RopeRule
from thermocline.models.routing import routing_rule

if TYPE_CHECKING:
    from thermocline.kernels.weight import FloatArray, Weight
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import StackedExperts, WeightMap

_QKV: Final = ("q", "k", "v")


def plain_rope(spec: ModelSpec) -> RopeRule:
    """Return the rotary rule of all heads."""
    return RopeRule(spec.rotary_dims, spec.rope_base, spec.rope_scaling)


def read_mixer_norm(weights: WeightMap, spec: ModelSpec, prefix: str) -> FloatArray:
    """Return the gains of the norm before a mixer; `NO_NORM` of a model with several residual streams."""
    if spec.streams is not None:
        return NO_NORM
    return weights.vector(prefix + "attn_norm.weight", spec.hidden_size)


def read_rope_factors(weights: WeightMap, num_dims: int) -> tuple[float, ...]:
    """Return by how much each pair of dimensions turns slower, as `RopeRule` takes it; () where the file lacks it."""
    name = "rope_freqs.weight"
    return tuple(weights.positive(name, num_dims // 2).tolist()) if name in weights else ()


def read_long_factors(weights: WeightMap, spec: ModelSpec) -> tuple[float, ...]:
    """Return the factors of `LongRope` for the context that the model is opened for. The file must have both lists."""
    short, far = (
        tuple(weights.positive(f"rope_factors_{which}.weight", spec.rotary_dims // 2).tolist())
        for which in ("short", "long")
    )
    return far if spec.turns_far else short


def read_attention(
    weights: WeightMap,
    spec: ModelSpec,
    prefix: str,
    *,
    gated: bool = False,
    may_lack_values: bool = False,
    reads_others: bool = False,
    value_dim: int | None = None,
) -> AttentionWeights:
    """Return grouped-query attention without norms of its heads. gated: q has rows for gates, too.

    q, k and v may be one tensor, attn_qkv, in this order; those without gates may have biases, and so may the output.
    may_lack_values: values are the keys where there is no attn_v. reads_others: keys and values are another layer's, and
    tensors of its own, which converters leave in the file, are not used. value_dim: numbers of a head's value, where they are
    not as many as a key's.
    """
    hidden, value_dim = spec.hidden_size, value_dim or spec.head_dim
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    rows = (q_size * (2 if gated else 1), kv_size, spec.num_kv_heads * value_dim)
    q, k, v = _query_key_value(weights, prefix, rows, hidden, may_lack_values, reads_others)
    output_bias, name = None, prefix + "attn_output.bias"
    if name in weights and not gated:
        output_bias = weights.vector(name, hidden)
    return AttentionWeights(
        norm=read_mixer_norm(weights, spec, prefix),
        q=q,
        k=k,
        v=v,
        biases=None if gated or reads_others else _biases(weights, prefix, rows),
        output=weights.matrix(prefix + "attn_output.weight", hidden, spec.num_heads * value_dim),
        head_norm=HeadNorm(None, None, spec.rms_epsilon),
        scale=spec.attention_scale,
        output_bias=output_bias,
        centering=read_centering(weights, spec, prefix + "attn_norm.weight"),
    )


def _query_key_value(
    weights: WeightMap,
    prefix: str,
    rows: tuple[int, int, int],
    hidden: int,
    may_lack_values: bool,
    reads_others: bool,
) -> tuple[Weight, Weight | None, Weight | None]:
    name = prefix + "attn_qkv.weight"
    if name in weights:
        q, k, v = weights.matrices(name, rows, hidden)
        return (q, None, None) if reads_others else (q, k, v)
    q = weights.matrix(prefix + "attn_q.weight", rows[0], hidden)
    if reads_others:
        for part in ("k.", "k_norm.", "v."):
            weights.leave_out(f"{prefix}attn_{part}")
        return q, None, None
    k = weights.matrix(prefix + "attn_k.weight", rows[1], hidden)
    if may_lack_values and prefix + "attn_v.weight" not in weights:
        return q, k, k
    return q, k, weights.matrix(prefix + "attn_v.weight", rows[2], hidden)


def _biases(
    weights: WeightMap, prefix: str, rows: tuple[int, int, int]
) -> tuple[FloatArray, FloatArray, FloatArray] | None:
    """Return the biases of q, k and v, zeros for one that the file lacks; None if it lacks all."""
    whole, names = prefix + "attn_qkv.bias", [f"{prefix}attn_{part}.bias" for part in _QKV]
    if whole in weights:
        q, k, v = np.split(weights.vector(whole, sum(rows)), np.cumsum(rows)[:-1])
        return q, k, v
    if not any(name in weights for name in names):
        return None
    q, k, v = (
        weights.vector(name, count) if name in weights else np.zeros(count, np.float32)
        for name, count in zip(names, rows, strict=True)
    )
    return q, k, v


def read_wide_norm(
    weights: WeightMap, spec: ModelSpec, prefix: str
) -> tuple[FloatArray, FloatArray]:
    """Return the gains of norms over all heads of queries, and of keys."""
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return (
        weights.vector(prefix + "attn_q_norm.weight", q_size),
        weights.vector(prefix + "attn_k_norm.weight", kv_size),
    )


def read_query_norm(weights: WeightMap, spec: ModelSpec, prefix: str) -> HeadNorm:
    """Return the norm of each head of queries alone."""
    gain = weights.vector(prefix + "attn_q_norm.weight", spec.head_dim)
    return HeadNorm(gain, None, spec.rms_epsilon)


def read_head_norm(weights: WeightMap, spec: ModelSpec, prefix: str) -> HeadNorm:
    """Return the norms of each head of queries and keys."""
    q_gain, k_gain = (
        weights.vector(f"{prefix}attn_{part}_norm.weight", spec.head_dim) for part in ("q", "k")
    )
    return HeadNorm(q_gain, k_gain, spec.rms_epsilon)


def read_normed_attention(weights: WeightMap, spec: ModelSpec, prefix: str) -> AttentionWeights:
    """Return grouped-query attention with norms of each head of queries and keys before they turn."""
    attention = read_attention(weights, spec, prefix)
    return replace(attention, head_norm=read_head_norm(weights, spec, prefix))


def read_turned_normed_attention(
    weights: WeightMap, spec: ModelSpec, prefix: str
) -> tuple[AttentionWeights, RopeRule]:
    """Return the same with the norms behind the turn, and the rule of that turn, with the file's factors."""
    attention = read_normed_attention(weights, spec, prefix)
    head_norm = replace(attention.head_norm, last=True)
    rope = replace(plain_rope(spec), factors=read_rope_factors(weights, spec.head_dim))
    return replace(attention, head_norm=head_norm), rope


def read_routed(
    weights: WeightMap,
    spec: ModelSpec,
    prefix: str,
    bias: FloatArray | None = None,
    activation: ExpertActivation = ExpertActivation.SILU,
) -> tuple[MoeWeights, StackedExperts]:
    """Return the router with its experts, and where they lie. bias: see `RoutingRule`.

    The router's own bias, ffn_gate_inp.bias, is added to its logits where the file has one.
    """
    router, hidden = spec.router, spec.hidden_size
    width, outer = spec.expert_intermediate_size, spec.expert_hidden_size
    experts = weights.experts(prefix, router.num_experts, width, outer, activation)
    matrix = weights.matrix(prefix + "ffn_gate_inp.weight", router.num_experts, hidden)
    logit_bias, name = None, prefix + "ffn_gate_inp.bias"
    if name in weights:
        logit_bias = weights.vector(name, router.num_experts)
    return MoeWeights(matrix, routing_rule(router, bias, logit_bias), experts.stack), experts


def read_shared(
    weights: WeightMap,
    spec: ModelSpec,
    prefix: str,
    activation: ExpertActivation = ExpertActivation.SILU,
) -> SharedExpert:
    """Return the shared expert without a gate."""
    width = spec.shared_intermediate_size
    stack = weights.expert(prefix, "_shexp", width, spec.hidden_size, activation)
    return SharedExpert(stack, None)


def routed_layer(
    weights: WeightMap,
    spec: ModelSpec,
    index: int,
    attention: AttentionWeights,
    shared: SharedExpert | None = None,
    rope: RopeRule | None = None,
    norm: str = "ffn_norm",
) -> DecoderLayer:
    """Return a layer of attention and routed experts. rope: that of whole heads, unless it is given.

    norm: the name of the tensor of the norm before the experts.
    """
    prefix = f"blk.{index}."
    routed, experts = read_routed(weights, spec, prefix)
    gain = weights.vector(f"{prefix}{norm}.weight", spec.hidden_size)
    centering = read_centering(weights, spec, f"{prefix}{norm}.weight")
    parts = LayerParts(attention, gain, spec.rms_epsilon, routed, shared, centering=centering)
    return DecoderLayer(parts, rope or plain_rope(spec), experts)


def dense_layer(
    weights: WeightMap,
    spec: ModelSpec,
    index: int,
    attention: AttentionWeights,
    rope: RopeRule | None = None,
) -> DecoderLayer:
    """Return a layer of attention and a feed-forward for every token. rope: as in `routed_layer`."""
    prefix, hidden = f"blk.{index}.", spec.hidden_size
    norm = weights.vector(prefix + "ffn_norm.weight", hidden)
    dense = SharedExpert(weights.expert(prefix, "", spec.dense_intermediate_size, hidden), None)
    parts = LayerParts(attention, norm, spec.rms_epsilon, None, dense)
    return DecoderLayer(parts, rope or plain_rope(spec), None)
