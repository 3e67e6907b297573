"""Gemma 4: a dense and a routed feed-forward side by side, norms behind every part, windows with other heads.

The small models have embeddings of each layer, and last layers that attend to the keys and values of earlier ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.cache_format import HeadShape
from thermocline.kernels.dense_contract import Gating, PostNorm
from thermocline.kernels.weight import ExpertActivation
from thermocline.kernels.whole_layer import (
    AttentionWeights,
    BranchNorms,
    LayerEmbedding,
    LayerParts,
    MoeWeights,
    SharedExpert,
)
from thermocline.models.attention_specs import WindowSpec
from thermocline.models.blocks import read_attention, read_head_norm, read_query_norm
from thermocline.models.decoder import DecoderLayer
from thermocline.models.metadata import SpecReader
from thermocline.models.rope import RopeRule
from thermocline.models.routing import routing_rule
from thermocline.models.spec import LayerKind, ModelSpec

if TYPE_CHECKING:
    from thermocline.kernels.weight import FloatArray
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.weights import StackedExperts, WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`."""
    spec = read_own_spec(file)
    return replace(spec, own_kv_sources=_kv_sources(SpecReader(file), spec.layer_kinds))


def read_own_spec(file: ModelFile) -> ModelSpec:
    """Return a file's dimensions, but for whose keys and values layers attend to that have none. Raises ModelError."""
    read = SpecReader(file)
    read.require_alike(
        "use a file whose layers have experts of one width",
        "expert_used_count",
        "expert_feed_forward_length",
    )
    read.require_equal("expert_gating_func", Gating.SOFTMAX)
    read.refuse_expert_scale()
    read.refuse_rope_scaling()
    num_layers, hidden = read.size("block_count"), read.size("embedding_length")
    kv_heads = read.sizes("attention.head_count_kv", num_layers)
    widths = read.sizes("feed_forward_length", num_layers)
    if "blk.0.ffn_gate_inp.weight" in file.tensors:
        spec = read.decoder(normalize_top_k=True, num_kv_heads=max(kv_heads))
        spec = replace(spec, shared_intermediate_size=max(widths))
    else:
        spec = read.dense_decoder(num_kv_heads=max(kv_heads), width=max(widths))
    near_dim = read.size("attention.key_length_swa")
    read.require_equal("attention.value_length_swa", near_dim)
    kinds = tuple(
        LayerKind.WINDOW if is_window else LayerKind.ATTENTION
        for is_window in read.required_flags("attention.sliding_window_pattern", num_layers)
    )
    near = RopeRule(
        read.rotary_dims(near_dim, "rope.dimension_count_swa"),
        read.positive_float("rope.freq_base_swa"),
    )
    return read.checked(
        replace(
            spec,
            own_layer_kinds=kinds,
            own_kv_shapes=tuple(
                HeadShape(count, near_dim if kind is LayerKind.WINDOW else spec.head_dim)
                for count, kind in zip(kv_heads, kinds, strict=True)
            ),
            own_feed_forward_sizes=widths if len(set(widths)) > 1 else (),
            layer_embedding_size=read.count("embedding_length_per_layer_input", default=0),
            own_rotary_dims=read.rotary_dims(spec.head_dim),
            window=WindowSpec(read.size("attention.sliding_window"), near),
            embedding_scale=float(np.sqrt(np.float32(hidden))),
            logit_softcap=read.positive_float("final_logit_softcapping", default=0.0, zero=0.0),
        )
    )


def _kv_sources(read: SpecReader, kinds: tuple[LayerKind, ...]) -> tuple[int, ...]:
    """Return by layer whose keys and values it attends to: for the last ones, those of the last before them of their kind."""
    num_shared = read.count("attention.shared_kv_layers", default=0)
    if not num_shared:
        return ()
    own = kinds[: max(0, len(kinds) - num_shared)]
    last = {kind: index for index, kind in enumerate(own)}
    if missing := set(kinds) - set(last):
        raise read.bad(
            "attention.shared_kv_layers",
            f"is {num_shared}, of {len(kinds)} layers in all: no layer is left whose keys one with "
            f"{missing.pop()} attends to",
        )
    return (*range(len(own)), *(last[kind] for kind in kinds[len(own) :]))


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    if index in spec.kv_sources:
        return read_reader(weights, spec, index)
    return _layer(weights, spec, index, reads_others=False)


def read_reader(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """Return a layer that attends to another one's keys and values. Raises ModelError."""
    return _layer(weights, spec, index, reads_others=True)


def _layer(weights: WeightMap, spec: ModelSpec, index: int, *, reads_others: bool) -> DecoderLayer:
    prefix, hidden, epsilon = f"blk.{index}.", spec.hidden_size, spec.rms_epsilon

    def gain(name: str) -> FloatArray:
        return weights.vector(f"{prefix}{name}.weight", hidden)

    attention, rope = _attention(weights, spec, index, reads_others=reads_others)
    own = spec.at(index)
    width = own.shared_intermediate_size or own.dense_intermediate_size
    shared = SharedExpert(weights.expert(prefix, "", width, hidden, ExpertActivation.GELU), None)
    name, scale = prefix + "layer_output_scale.weight", 1.0
    if name in weights:
        scale = float(weights.vector(name, 1)[0])
    end = PostNorm(gain("post_ffw_norm"), epsilon, scale)
    routed, experts, embedding = None, None, None
    if spec.layer_embedding_size:
        # The scale is of all that the layer gives.
        end, last = replace(end, scale=1.0), PostNorm(gain("post_norm"), epsilon, scale)
        embedding = _embedding(weights, spec, prefix, last)
    if spec.has_experts:
        routed, experts = _routed(weights, spec, prefix, gain("pre_ffw_norm_2"))
        end = replace(end, parts=(gain("post_ffw_norm_1"), gain("post_ffw_norm_2")))
    parts = LayerParts(attention, gain("ffn_norm"), epsilon, routed, shared, end, embedding)
    return DecoderLayer(parts, rope, experts)


def _attention(
    weights: WeightMap, spec: ModelSpec, index: int, *, reads_others: bool
) -> tuple[AttentionWeights, RopeRule]:
    prefix, own = f"blk.{index}.", spec.at(index)
    if reads_others:
        norm = read_query_norm(weights, own, prefix)
    else:
        norm = read_head_norm(weights, own, prefix)
        norm = replace(norm, v_gain=np.ones(own.head_dim, np.float32))
    post = weights.vector(prefix + "post_attention_norm.weight", spec.hidden_size)
    attention = replace(
        read_attention(weights, own, prefix, may_lack_values=True, reads_others=reads_others),
        head_norm=norm,
        post_norm=PostNorm(post, spec.rms_epsilon),
        scale=1.0,
    )
    if spec.layer_kinds[index] is LayerKind.WINDOW and spec.window is not None:
        return replace(attention, window=spec.window.num_tokens), spec.window.rope
    factors = weights.positive("rope_freqs.weight", spec.rotary_dims // 2)
    rope = RopeRule(spec.rotary_dims, spec.rope_base, factors=tuple(factors.tolist()))
    return attention, rope


def _embedding(weights: WeightMap, spec: ModelSpec, prefix: str, norm: PostNorm) -> LayerEmbedding:
    width, hidden = spec.layer_embedding_size, spec.hidden_size
    gate = weights.matrix(prefix + "inp_gate.weight", width, hidden)
    return LayerEmbedding(gate, weights.matrix(prefix + "proj.weight", hidden, width), norm)


def _routed(
    weights: WeightMap, spec: ModelSpec, prefix: str, experts_gain: FloatArray
) -> tuple[MoeWeights, StackedExperts]:
    """Return the router, whose own norm has a gain per number of its input, and its experts."""
    router, hidden = spec.router, spec.hidden_size
    experts = weights.experts(
        prefix,
        router.num_experts,
        spec.expert_intermediate_size,
        hidden,
        ExpertActivation.GELU,
    )
    matrix = weights.table(prefix + "ffn_gate_inp.weight", router.num_experts, hidden)
    gain = weights.vector(prefix + "ffn_gate_inp.scale", hidden) / np.sqrt(np.float32(hidden))
    own = BranchNorms(gain, experts_gain)
    return MoeWeights(matrix, routing_rule(router), experts.stack, own), experts
