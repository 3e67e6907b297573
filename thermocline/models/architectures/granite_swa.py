"""Granite_swa: Granite's factors, windows and turning heads by lists, sinks of attention, routed experts or a dense feed-forward."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Gating
from thermocline.models.blocks import plain_rope, read_attention, read_rope_factors
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer, near_or_far, with_factors, with_windows

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap

# Of no meaning: files list which layers have a window.
_PERIOD = 1


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`.

    What Granite 4 Vision adds to some layers (`deepstack_mapping`) is zero for text. `rope.scaling.finetuned`, by which
    heads of Granite's other files do not turn, says nothing here.
    """
    read = SpecReader(file)
    read.refuse_expert_scale()
    read.require_equal("expert_gating_func", int(Gating.SOFTMAX))
    if read.count("expert_count", default=0):
        spec = read.decoder(normalize_top_k=True, width=read.size("feed_forward_length"))
        shared = read.count("expert_shared_feed_forward_length", default=0)
        spec = replace(spec, shared_intermediate_size=shared)
    else:
        spec = read.dense_decoder()
    read.require_equal("rope.dimension_count", spec.head_dim)
    turning = read.layer_flags("attention.rope_pattern", spec.num_layers)
    unturned = tuple(n for n, turns in enumerate(turning) if not turns)
    spec = replace(spec, unturned_layers=unturned)
    if any(read.required_flags("attention.sliding_window_pattern", spec.num_layers)):
        spec = with_windows(read, spec, _PERIOD, spec.rope_scaling)
    return with_factors(read, spec, logit_scale=None)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    prefix = f"blk.{index}."
    sinks = weights.vector(prefix + "attn_sinks.weight", spec.num_heads)
    attention = replace(read_attention(weights, spec, prefix), sinks=sinks)
    attention, rope = near_or_far(spec, index, attention, plain_rope(spec))
    factors = read_rope_factors(weights, spec.head_dim)
    if rope is not None:
        rope = replace(rope, pairs=True, factors=factors)
    layer = mixed_layer(weights, spec, index, attention)
    return replace(layer, rope=None if index in spec.unturned_layers else rope)
