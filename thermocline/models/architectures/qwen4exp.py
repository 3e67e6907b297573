"""Qwen4exp (Qwen3.8-Flash-Next): a hybrid as Qwen3.5's with several residual streams in place of norms.

Its full attention reads chosen blocks of positions, and one layer begins with embeddings of n-grams.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.kernels.whole_layer import NO_NORM, AttentionWeights, DeltaWeights, LayerParts
from thermocline.models.block_attention import read_block_indexer, with_block_indexer
from thermocline.models.blocks import plain_rope, read_routed
from thermocline.models.decoder import DecoderLayer
from thermocline.models.gated_delta import (
    read_alpha_beta,
    read_delta,
    read_gated_attention,
    read_gated_shared,
    read_hybrid_spec,
)
from thermocline.models.metadata import SpecReader
from thermocline.models.ngrams import read_ngram_spec, read_ngrams
from thermocline.models.spec import LayerKind, StreamsSpec
from thermocline.models.streams import read_layer_streams

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`."""
    read, spec = SpecReader(file), read_hybrid_spec(file, tiled=True)
    count = read.size("hyper_connection.count", least=2)
    spec = replace(spec, streams=StreamsSpec(count, read.size("hyper_connection.low_rank")))
    spec = with_block_indexer(read, spec)
    return replace(spec, ngrams=read_ngram_spec(read, spec))


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    prefix, streams = f"blk.{index}.", read_layer_streams(weights, spec, index)
    if spec.ngrams is not None and spec.ngrams.layer == index:
        streams = replace(streams, ngrams=read_ngrams(weights, spec))
    mixer: AttentionWeights | DeltaWeights
    rope = None
    if spec.layer_kinds[index] is LayerKind.RECURRENT:
        both = read_alpha_beta(weights, spec, index)
        mixer = read_delta(weights, spec, prefix, *both, sigmoid_gate=True)
    else:
        rope, indexer = plain_rope(spec), read_block_indexer(weights, spec, index)
        mixer = replace(read_gated_attention(weights, spec, prefix), indexer=indexer)
    routed, experts = read_routed(weights, spec, prefix)
    shared = read_gated_shared(weights, spec, prefix)
    parts = LayerParts(mixer, NO_NORM, spec.rms_epsilon, routed, shared, streams=streams)
    return DecoderLayer(parts, rope, experts)
