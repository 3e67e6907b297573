"""Nemotron_h: each block is Mamba2, attention without rotary embedding, or a dense feed-forward of a squared ReLU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.kernels.weight import ExpertActivation
from thermocline.kernels.whole_layer import LayerParts, SharedExpert
from thermocline.models.decoder import DecoderLayer
from thermocline.models.lone_blocks import block_kinds, read_mixer_block
from thermocline.models.mamba import mamba_shape
from thermocline.models.metadata import SpecReader
from thermocline.models.spec import LayerKind, ModelSpec

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`."""
    read = SpecReader(file)
    read.refuse_other_attention()
    num_blocks = read.size("block_count")
    kv_heads, num_kv_heads = read.attention_heads("attention.head_count_kv", num_blocks)
    widths = read.sizes("feed_forward_length", num_blocks, least=0)
    spec = read.dense_decoder(
        num_kv_heads=num_kv_heads, width=max(widths), epsilon=read.either_epsilon()
    )
    return replace(
        spec,
        own_layer_kinds=block_kinds(kv_heads, widths),
        own_feed_forward_sizes=widths if len(set(widths) - {0}) > 1 else (),
        own_rotary_dims=0,
        recurrent=mamba_shape(read),
    )


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    prefix, hidden = f"blk.{index}.", spec.hidden_size
    if spec.layer_kinds[index] is not LayerKind.NONE:
        return read_mixer_block(weights, spec, index)
    norm = weights.vector(prefix + "attn_norm.weight", hidden)
    width, activation = spec.at(index).dense_intermediate_size, ExpertActivation.SQUARED_RELU
    dense = SharedExpert(weights.expert(prefix, "", width, hidden, activation), None)
    return DecoderLayer(LayerParts(None, norm, spec.rms_epsilon, None, dense), None, None)
