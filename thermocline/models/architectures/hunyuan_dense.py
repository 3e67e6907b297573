"""Hunyuan-dense: per-head q/k norm behind the rotary embedding, and no routed experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.models.blocks import dense_layer, read_turned_normed_attention
from thermocline.models.mixed_layers import dense_spec

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. A configuration that names one expert means the feed-forward."""
    return dense_spec(file, most_experts=1)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    attention, rope = read_turned_normed_attention(weights, spec, f"blk.{index}.")
    return dense_layer(weights, spec, index, attention, rope)
