"""Laguna: sigmoid router with a bias for the choice, gated attention, sliding windows, leading dense layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Activation, Gating
from thermocline.kernels.whole_layer import AttentionWeights, LayerParts, OutputGate, SharedExpert
from thermocline.models.attention_specs import WindowSpec
from thermocline.models.blocks import read_attention, read_head_norm, read_routed, read_shared
from thermocline.models.decoder import DecoderLayer
from thermocline.models.feed_forwards import with_dense_layers
from thermocline.models.metadata import SpecReader
from thermocline.models.rope import RopeRule
from thermocline.models.spec import LayerKind, ModelSpec

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.weights import WeightMap

# Where the file names no pattern, layers 0, 4, 8, ... have full attention.
_PERIOD = 4


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`."""
    read = SpecReader(file)
    read.require_equal("expert_shared_count", 1)
    heads = read.sizes("attention.head_count", read.size("block_count"))
    spec = read.decoder(normalize_top_k=read.flag("expert_weights_norm"), num_heads=max(heads))
    rule = replace(
        spec.router,
        gating=read.gating(default=Gating.SIGMOID),
        scale=read.positive_float("expert_weights_scale"),
    )
    dims = read.rotary_dims(spec.head_dim)
    window = None
    kinds: tuple[LayerKind, ...] = ()
    if size := read.count("attention.sliding_window", default=0):
        kinds = tuple(
            LayerKind.WINDOW if is_window else LayerKind.ATTENTION
            for is_window in read.window_pattern(spec.num_layers, _PERIOD)
        )
        window_dims = read.rotary_dims(spec.head_dim, "rope.dimension_count_swa", default=dims)
        base = read.positive_float("rope.freq_base_swa", default=spec.rope_base)
        window = WindowSpec(size, RopeRule(window_dims, base))
    spec = replace(
        spec,
        router=rule,
        layer_heads=heads,
        own_layer_kinds=kinds,
        num_dense_layers=read.count("leading_dense_block_count"),
        dense_intermediate_size=read.size("feed_forward_length"),
        shared_intermediate_size=read.size("expert_shared_feed_forward_length"),
        own_rotary_dims=dims,
        window=window,
    )
    return with_dense_layers(read, spec)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    prefix, hidden = f"blk.{index}.", spec.hidden_size
    attention, rope = _attention(weights, spec, index)
    norm = weights.vector(prefix + "ffn_norm.weight", hidden)
    if index in spec.dense_layers:
        dense = SharedExpert(weights.expert(prefix, "", spec.dense_intermediate_size, hidden), None)
        return DecoderLayer(LayerParts(attention, norm, spec.rms_epsilon, None, dense), rope, None)
    bias = None
    if spec.router.gating is Gating.SIGMOID:
        bias = weights.vector(prefix + "exp_probs_b.bias", spec.router.num_experts)
    routed, experts = read_routed(weights, spec, prefix, bias)
    shared = read_shared(weights, spec, prefix)
    return DecoderLayer(
        LayerParts(attention, norm, spec.rms_epsilon, routed, shared), rope, experts
    )


def _attention(
    weights: WeightMap, spec: ModelSpec, index: int
) -> tuple[AttentionWeights, RopeRule]:
    prefix, own = f"blk.{index}.", spec.at(index)
    num_heads = own.num_heads
    # The tensor's shape says whether there is a gate per head or per row of q.
    name, q_size = prefix + "attn_gate.weight", num_heads * spec.head_dim
    rows = num_heads if weights.num_rows(name, spec.hidden_size) == num_heads else q_size
    attention = replace(
        read_attention(weights, own, prefix),
        head_norm=read_head_norm(weights, own, prefix),
        gate=OutputGate(Activation.SOFTPLUS, weights.matrix(name, rows, spec.hidden_size)),
    )
    if spec.window is None or spec.layer_kinds[index] is not LayerKind.WINDOW:
        return attention, RopeRule(spec.rotary_dims, spec.rope_base, spec.rope_scaling)
    return replace(attention, window=spec.window.num_tokens), spec.window.rope
