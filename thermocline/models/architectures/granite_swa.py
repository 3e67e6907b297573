"""Granite_swa: Granite's factors, windows and turning heads by lists, sinks of attention, routed experts or a dense feed-forward."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Gating
from thermocline.models.blocks import plain_rope, read_attention, read_rope_factors
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer, near_or_far, with_factors
from thermocline.models.rope import RopeRule
from thermocline.models.spec import LayerKind, ModelSpec, WindowSpec

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.weights import WeightMap


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
    spec = replace(_with_windows(read, spec), unturned_layers=unturned)
    return with_factors(read, spec, logit_scale=None)


def _with_windows(read: SpecReader, spec: ModelSpec) -> ModelSpec:
    """Return `spec` with the windows that the file lists, whose heads turn as all others do."""
    flags = read.required_flags("attention.sliding_window_pattern", spec.num_layers)
    if not any(flags):
        return spec
    base = read.positive_float("rope.freq_base_swa", default=spec.rope_base)
    rope = RopeRule(spec.head_dim, base, spec.rope_scaling)
    return replace(
        spec,
        own_layer_kinds=tuple(
            LayerKind.WINDOW if is_window else LayerKind.ATTENTION for is_window in flags
        ),
        window=WindowSpec(read.size("attention.sliding_window"), rope),
    )


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
