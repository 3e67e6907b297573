"""Step-3.5 and 3.7: gates of heads, windows with more heads, half of a head turns elsewhere, SwiGLU with limits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.kernels.cache_format import HeadShape
from thermocline.kernels.dense_contract import Activation, Gating
from thermocline.kernels.whole_layer import AttentionWeights, OutputGate
from thermocline.models.blocks import (
    plain_rope,
    read_attention,
    read_head_norm,
    read_rope_factors,
)
from thermocline.models.expert_limits import limited_layer, with_limits
from thermocline.models.feed_forwards import shared_width
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import (
    mixed_layer,
    mixed_spec,
    near_or_far,
    with_own_blocks,
    with_windows,
)

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.rope import RopeRule
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. The file must state which layers have a window.

    Layers that see all tokens turn half of what the file says, or of whole heads, and scale it alone.
    """
    read = SpecReader(file)
    num_blocks = read.size("block_count")
    heads = read.sizes("attention.head_count", num_blocks)
    kv_heads = read.sizes("attention.head_count_kv", num_blocks)
    windowed = read.required_flags("attention.sliding_window_pattern", num_blocks)
    normalize = read.flag("expert_weights_norm")
    spec = read.decoder(normalize_top_k=normalize, num_heads=max(heads), num_kv_heads=max(kv_heads))
    whole = read.rotary_dims(spec.head_dim, default=spec.head_dim)
    if whole % 4:
        raise read.bad("rope.dimension_count", f"is {whole}, of which no half can be paired")
    stated = read.count("expert_shared_feed_forward_length", default=0)
    spec = mixed_spec(
        read,
        with_windows(read, spec, 1),
        gating=read.gating(default=Gating.SIGMOID),
        shared=shared_width(read, num_blocks, stated),
        scaled=read.has("expert_weights_scale"),
        num_dense=0,
    )
    assert spec.window is not None, "they were read"
    near_dims = read.rotary_dims(spec.head_dim, "rope.dimension_count_swa", default=whole)
    near = replace(spec.window, rope=replace(spec.window.rope, num_dims=near_dims))
    for layer, (queries, keys) in enumerate(zip(heads, kv_heads, strict=True)):
        if queries % keys:
            raise read.bad("attention.head_count", f"is {queries} for {keys} keys in layer {layer}")
    shapes = tuple(HeadShape(count, spec.head_dim) for count in kv_heads)
    spec = replace(
        spec,
        layer_heads=heads[: spec.num_layers],
        own_kv_shapes=shapes[: spec.num_layers],
        own_rotary_dims=whole // 2,
        window=near,
    )
    spec = with_own_blocks(read, spec, heads, shapes, windowed)
    return with_limits(read, file, read.checked(spec))


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    attention, rope = near_or_far(
        spec, index, _attention(weights, spec.at(index), f"blk.{index}."), _far(weights, spec)
    )
    layer = mixed_layer(weights, spec, index, attention, rope=rope)
    return limited_layer(weights, spec, index, layer)


def read_next_block(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `DraftingArchitecture.read_next_block`. Each of them is like a layer."""
    return read_layer(weights, spec, index)


def _far(weights: WeightMap, spec: ModelSpec) -> RopeRule:
    """Return what turns in layers that see all tokens; the file has factors for all pairs of a head."""
    factors = read_rope_factors(weights, spec.head_dim)
    return replace(plain_rope(spec), factors=factors[: spec.rotary_dims // 2])


def _attention(weights: WeightMap, own: ModelSpec, prefix: str) -> AttentionWeights:
    """Return attention with the norms and the gates that the file has."""
    attention = read_attention(weights, own, prefix)
    if prefix + "attn_q_norm.weight" in weights:
        attention = replace(attention, head_norm=read_head_norm(weights, own, prefix))
    name = prefix + "attn_gate.weight"
    if name in weights:
        gate = weights.matrix(name, own.num_heads, own.hidden_size)
        attention = replace(attention, gate=OutputGate(Activation.SIGMOID, gate))
    return attention
