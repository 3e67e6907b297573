"""Cohere2moe: attention and experts side by side behind one norm, windows that turn, full layers that turn if they are dense."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from thermocline.kernels.dense_contract import Gating
from thermocline.kernels.whole_layer import HandedOn
from thermocline.models.blocks import plain_rope, read_attention
from thermocline.models.feed_forwards import shared_width
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import (
    mixed_layer,
    mixed_spec,
    near_or_far,
    scaled_expert,
    with_windows,
)

if TYPE_CHECKING:
    from thermocline.kernels.whole_layer import AttentionWeights, LayerParts
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.rope import RopeRule
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap

# Where the file names no pattern, layers 0, 4, 8, ... see all tokens.
_PERIOD: Final = 4
# Of what routed and shared experts give, the mean is added.
_HALF: Final = 0.5


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. Norms take the mean off, unless the file has an epsilon of others."""
    read = SpecReader(file)
    gating = read.gating(default=Gating.SIGMOID)
    # Softmax is over the chosen experts alone, which is what norming does.
    normalize = read.flag("expert_weights_norm", False) or gating is Gating.SOFTMAX
    spec = read.decoder(normalize_top_k=normalize, epsilon=read.either_epsilon())
    read.require_equal("rope.dimension_count", spec.head_dim)
    read.refuse_rope_scaling()
    spec = with_windows(read, spec, _PERIOD, full_last=False)
    shared = 0
    if count := read.count("expert_shared_count", default=0):
        usual = count * spec.expert_intermediate_size
        stated = read.count("expert_shared_feed_forward_length", default=usual)
        shared = shared_width(read, spec.num_layers, stated)
    spec = mixed_spec(read, spec, gating=gating, shared=shared, scaled=False)
    scale = read.positive_float("expert_weights_scale", default=1.0, zero=1.0)
    return replace(
        spec,
        router=replace(spec.router, scale=scale),
        logit_scale=read.positive_float("logit_scale", zero=1.0),
        norms_center=not read.has("attention.layer_norm_rms_epsilon"),
    )


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    attention = read_attention(weights, spec, f"blk.{index}.")
    far = plain_rope(spec) if index in spec.dense_layers else None
    attention, rope = near_or_far(spec, index, attention, far)
    return _parallel_layer(weights, spec, index, attention, rope)


def read_next_block(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `DraftingArchitecture.read_next_block`. It is a routed layer that sees all tokens, and turns."""
    attention = read_attention(weights, spec, f"blk.{index}.")
    return _parallel_layer(weights, spec, index, attention, plain_rope(spec))


def _parallel_layer(
    weights: WeightMap,
    spec: ModelSpec,
    index: int,
    attention: AttentionWeights,
    rope: RopeRule | None,
) -> DecoderLayer:
    layer = mixed_layer(weights, spec, index, attention, norm="attn_norm")
    own = replace(layer.parts, handed_on=HandedOn.NORMED, centering=attention.centering)
    parts = _averaged(weights, own)
    return replace(layer, parts=parts, rope=rope and replace(rope, pairs=True))


def _averaged(weights: WeightMap, parts: LayerParts) -> LayerParts:
    """Return the layer with the mean of its routed and its shared experts, where it has both."""
    routed, shared = parts.routed, parts.shared
    if routed is None or shared is None:
        return parts
    rule = replace(routed.rule, scale=routed.rule.scale * _HALF)
    shared = scaled_expert(weights, shared, _HALF)
    return replace(parts, routed=replace(routed, rule=rule), shared=shared)
