"""Phimoe: norms with biases that take the mean off, biases everywhere else, experts weighed among logits near their own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from thermocline.kernels.dense_contract import Gating
from thermocline.models.attention_specs import WindowSpec
from thermocline.models.blocks import plain_rope, read_attention, read_long_factors, routed_layer
from thermocline.models.metadata import SpecReader
from thermocline.models.rope import LongRope, RopeRule
from thermocline.models.spec import LayerKind

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap

_CHOSEN: Final = 2
"""Experts of a token: the rule of their weights is of two."""
# Phi-3.5-MoE's context, the one before it was made longer, and what its configuration multiplies cosines and sines by. The
# converter does not read that, and writes what follows from the two lengths.
_LENGTHS: Final = (131072, 4096)
_MAGNITUDE: Final = 1.243163121016122


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`."""
    read = SpecReader(file)
    read.refuse_expert_scale()
    read.refuse_rope_scaling()
    read.require_equal("expert_used_count", _CHOSEN)
    read.require_equal("expert_gating_func", Gating.SOFTMAX)
    spec = read.decoder(normalize_top_k=False, width=read.size("feed_forward_length"))
    read.require_equal("rope.dimension_count", spec.head_dim)
    spec = replace(
        spec,
        router=replace(spec.router, gating=Gating.NEAR_BEST),
        norms_center=True,
        norms_have_bias=True,
        rope_scaling=_long_rope(read, spec),
    )
    size = read.count("attention.sliding_window", default=0)
    if not 0 < size < spec.context_length:
        return spec
    window = WindowSpec(size, plain_rope(spec))
    return replace(spec, window=window, own_layer_kinds=(LayerKind.WINDOW,) * spec.num_layers)


def _long_rope(read: SpecReader, spec: ModelSpec) -> LongRope | None:
    """Return how heads turn where the file has factors for it."""
    if not any(name.startswith("rope_factors_") for name in read.tensors):
        read.refuse("rope.scaling.attn_factor")
        return None
    original = read.size("rope.scaling.original_context_length")
    magnitude = read.positive_float("rope.scaling.attn_factor", default=1.0)
    if (spec.context_length, original) == _LENGTHS:
        usual = math.sqrt(1 + math.log(spec.context_length / original) / math.log(original))
        if math.isclose(magnitude, usual, rel_tol=1e-5):
            magnitude = _MAGNITUDE
    return LongRope(original, magnitude)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    attention = read_attention(weights, spec, f"blk.{index}.")
    if spec.window is not None:
        attention = replace(attention, window=spec.window.num_tokens)
    return routed_layer(weights, spec, index, attention, rope=_rope(weights, spec))


def _rope(weights: WeightMap, spec: ModelSpec) -> RopeRule:
    rope = plain_rope(spec)
    if rope.scaling is None:
        return rope
    return replace(rope, factors=read_long_factors(weights, spec))
