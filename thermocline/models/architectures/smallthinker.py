"""Smallthinker: a router before attention, which takes the layer's input, experts with a ReLU, windows or none at all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from thermocline.kernels.weight import ExpertActivation
from thermocline.kernels.whole_layer import HandedOn, LayerParts
from thermocline.models.blocks import plain_rope, read_attention, read_routed
from thermocline.models.decoder import DecoderLayer
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import near_or_far, with_windows

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap

# Where there are windows, layers 0, 4, 8, ... see all tokens, and do not turn.
_PERIOD: Final = 4


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. Files name no pattern of windows; one that does would leave open what turns."""
    read = SpecReader(file)
    read.refuse("attention.sliding_window_pattern")
    spec = read.decoder(normalize_top_k=True)
    read.require_equal("rope.dimension_count", spec.head_dim)
    scale = read.positive_float("expert_weights_scale", default=1.0, zero=1.0)
    router = replace(spec.router, gating=read.gating(), scale=scale)
    spec = replace(spec, router=router)
    if not read.count("attention.sliding_window", default=0):
        return spec
    return with_windows(read, spec, _PERIOD, spec.rope_scaling, full_last=False)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    prefix = f"blk.{index}."
    far = plain_rope(spec) if spec.window is None else None
    attention, rope = near_or_far(spec, index, read_attention(weights, spec, prefix), far)
    routed, experts = read_routed(weights, spec, prefix, activation=ExpertActivation.RELU)
    norm = weights.vector(prefix + "ffn_norm.weight", spec.hidden_size)
    parts = LayerParts(attention, norm, spec.rms_epsilon, routed, None, handed_on=HandedOn.INPUT)
    return DecoderLayer(parts, rope, experts)
