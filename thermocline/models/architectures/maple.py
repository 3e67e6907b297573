"""Maple: norms of heads, windows that turn and full layers that do not, every layer routed, SwiGLU with a limit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.models.blocks import read_normed_attention, routed_layer
from thermocline.models.expert_limits import ROUTED_KEY, limited_layer, with_limits
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import near_or_far, with_windows

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. The file must state which layers have a window, and the limits."""
    read = SpecReader(file)
    read.refuse_expert_scale()
    spec = read.decoder(normalize_top_k=True)
    read.required_flags("attention.sliding_window_pattern", spec.num_layers)
    if not read.has(ROUTED_KEY):
        raise read.bad(ROUTED_KEY, "is missing")
    spec = replace(with_windows(read, spec, 1, spec.rope_scaling), own_rotary_dims=0)
    return with_limits(read, file, spec, before=True)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    attention = read_normed_attention(weights, spec, f"blk.{index}.")
    attention, rope = near_or_far(spec, index, attention, None)
    layer = routed_layer(weights, spec, index, attention)
    return limited_layer(weights, spec, index, replace(layer, rope=rope))
