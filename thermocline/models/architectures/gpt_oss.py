"""gpt-oss: windows in every other layer, sinks of attention, biases everywhere, and a clamped SwiGLU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Gating
from thermocline.kernels.weight import ExpertActivation
from thermocline.kernels.whole_layer import LayerParts
from thermocline.models.attention_specs import WindowSpec
from thermocline.models.blocks import plain_rope, read_attention, read_routed
from thermocline.models.decoder import DecoderLayer
from thermocline.models.metadata import SpecReader
from thermocline.models.rope import RopeRule, Yarn
from thermocline.models.spec import LayerKind, ModelSpec

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.weights import WeightMap

# Where the file names no pattern, layers 1, 3, 5, ... have full attention.
_PERIOD = 2


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`.

    The models were trained with a YaRN ramp whose ends are not rounded, and files do not say so.
    """
    read = SpecReader(file)
    read.require_equal("expert_gating_func", Gating.SOFTMAX_CHOSEN)
    read.refuse_expert_scale()
    spec = read.decoder(normalize_top_k=False)
    read.require_equal("rope.dimension_count", spec.head_dim)
    scaling = spec.rope_scaling
    if isinstance(scaling, Yarn):
        scaling = replace(scaling, is_rounded=False)
    base = read.positive_float("rope.freq_base_swa", default=spec.rope_base)
    pattern = read.window_pattern(spec.num_layers, _PERIOD, full_last=True)
    return replace(
        spec,
        router=replace(spec.router, gating=Gating.SOFTMAX_CHOSEN),
        rope_scaling=scaling,
        own_layer_kinds=tuple(
            LayerKind.WINDOW if is_window else LayerKind.ATTENTION for is_window in pattern
        ),
        window=WindowSpec(
            read.size("attention.sliding_window"), RopeRule(spec.head_dim, base, scaling)
        ),
    )


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    prefix = f"blk.{index}."
    attention, rope = read_attention(weights, spec, prefix), plain_rope(spec)
    attention = replace(
        attention,
        sinks=weights.vector(prefix + "attn_sinks.weight", spec.num_heads),
        output_bias=weights.vector(prefix + "attn_output.bias", spec.hidden_size),
    )
    if spec.window is not None and spec.layer_kinds[index] is LayerKind.WINDOW:
        attention, rope = replace(attention, window=spec.window.num_tokens), spec.window.rope
    routed, experts = read_routed(weights, spec, prefix, activation=ExpertActivation.CLAMPED_SILU)
    norm = weights.vector(prefix + "post_attention_norm.weight", spec.hidden_size)
    return DecoderLayer(LayerParts(attention, norm, spec.rms_epsilon, routed), rope, experts)
