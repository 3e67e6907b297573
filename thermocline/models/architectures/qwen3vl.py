"""Qwen3vl: the text part of Qwen3-VL without experts, which is qwen3 with positions of several axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.models.blocks import dense_layer, read_normed_attention
from thermocline.models.mixed_layers import dense_spec

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. Text stands at the same position on every axis, and adds nothing to deep layers."""
    return dense_spec(file)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    attention = read_normed_attention(weights, spec, f"blk.{index}.")
    return dense_layer(weights, spec, index, attention)
