"""Mimo2: values narrower than keys, and scaled; sinks and heads of their own in layers with a window; sigmoid router."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.cache_format import HeadShape
from thermocline.kernels.dense_contract import Gating
from thermocline.models.attention_specs import WindowSpec
from thermocline.models.blocks import plain_rope, read_attention
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer, mixed_spec, near_or_far, with_own_blocks
from thermocline.models.rope import RopeRule
from thermocline.models.spec import LayerKind

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. All that the router chooses is normed, and the file says the factor on attention."""
    read = SpecReader(file, uneven=True)
    num_blocks = read.size("block_count")
    heads = read.same_size("attention.head_count", num_blocks, default=0)
    kv_heads = read.sizes("attention.head_count_kv", num_blocks)
    read.require_equal("expert_gating_func", Gating.SIGMOID)
    read.require_equal("expert_shared_count", 0)
    if not read.flag("expert_weights_norm", default=True):
        read.refuse("expert_weights_norm")
    read.refuse_expert_scale()
    read.refuse_rope_scaling()
    spec = read.decoder(normalize_top_k=True, num_heads=heads or None, num_kv_heads=max(kv_heads))
    dims = read.rotary_dims(spec.head_dim)
    value_dim = read.size("attention.value_length")
    for key, value in (
        ("attention.key_length_swa", spec.head_dim),
        ("attention.value_length_swa", value_dim),
        ("rope.dimension_count_swa", dims),
    ):
        read.require_equal(key, value)
    spec = mixed_spec(read, spec, gating=Gating.SIGMOID, shared=0, scaled=False, num_dense=0)
    windowed = read.required_flags("attention.sliding_window_pattern", num_blocks)
    own_value_dim = 0 if value_dim == spec.head_dim else value_dim
    shapes = [HeadShape(count, spec.head_dim, own_value_dim=own_value_dim) for count in kv_heads]
    near = RopeRule(dims, read.positive_float("rope.freq_base_swa"))
    kinds = [LayerKind.WINDOW if is_near else LayerKind.ATTENTION for is_near in windowed]
    spec = replace(
        spec,
        own_rotary_dims=dims,
        own_layer_kinds=tuple(kinds[: spec.num_layers]),
        own_kv_shapes=tuple(shapes[: spec.num_layers]),
        window=WindowSpec(read.size("attention.sliding_window"), near),
        attention_factor=read.positive_float("attention.value_scale", default=1.0),
    )
    spec = with_own_blocks(read, spec, [spec.num_heads] * num_blocks, shapes, windowed)
    return read.checked(spec)


def read_next_block(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `DraftingArchitecture.read_next_block`. Each of them is a dense layer with a window."""
    return read_layer(weights, spec, index)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`. Values are not scaled: what is made of them is, by attention's last matrix."""
    own, prefix = spec.at(index), f"blk.{index}."
    attention = read_attention(weights, own, prefix, value_dim=spec.kv_shapes[index].value_dim)
    sinks = prefix + "attn_sinks.weight"
    if sinks in weights:
        attention = replace(attention, sinks=weights.vector(sinks, spec.num_heads))
    factor, bias = spec.attention_factor, attention.output_bias
    attention = replace(
        attention,
        output=replace(attention.output, scale=attention.output.scale * factor),
        output_bias=None if bias is None else bias * np.float32(factor),
    )
    attention, rope = near_or_far(spec, index, attention, plain_rope(spec))
    return mixed_layer(weights, own, index, attention, rope=rope)
