"""Afmoe: norms before and behind every part, gated attention, windows that turn and full layers that do not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.dense_contract import Activation, Gating, PostNorm
from thermocline.kernels.whole_layer import AttentionWeights, OutputGate
from thermocline.models.blocks import read_attention, read_head_norm
from thermocline.models.feed_forwards import shared_width
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer, mixed_spec, near_or_far, with_windows

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.rope import RopeRule
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap

# Where the file names no pattern, layers 3, 7, 11, ... have full attention.
_PERIOD = 4


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`.

    No key says whether embeddings are scaled, and the converter writes no pattern: both are as in the published models.
    Weights are normalised by the model's own code, where the configuration does not say so, either.
    """
    read = SpecReader(file)
    spec = read.decoder(normalize_top_k=read.flag("expert_weights_norm", default=True))
    stated = read.count("expert_shared_count") * spec.expert_intermediate_size
    shared = shared_width(read, spec.num_layers, stated)
    gating = read.gating(default=Gating.SIGMOID)
    spec = replace(
        with_windows(read, spec, _PERIOD, spec.rope_scaling),
        own_rotary_dims=0,
        embedding_scale=float(np.sqrt(np.float32(spec.hidden_size))),
    )
    return mixed_spec(read, spec, gating=gating, shared=shared)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    prefix = f"blk.{index}."
    attention, rope = _attention(weights, spec, index)
    layer = mixed_layer(weights, spec, index, attention)
    end = _post_norm(weights, spec, prefix + "post_ffw_norm.weight")
    return replace(layer, parts=replace(layer.parts, end=end), rope=rope)


def _attention(
    weights: WeightMap, spec: ModelSpec, index: int
) -> tuple[AttentionWeights, RopeRule | None]:
    prefix, q_size = f"blk.{index}.", spec.num_heads * spec.head_dim
    gate = weights.matrix(prefix + "attn_gate.weight", q_size, spec.hidden_size)
    attention = replace(
        read_attention(weights, spec, prefix),
        head_norm=read_head_norm(weights, spec, prefix),
        gate=OutputGate(Activation.SIGMOID, gate),
        post_norm=_post_norm(weights, spec, prefix + "post_attention_norm.weight"),
    )
    return near_or_far(spec, index, attention, None)


def _post_norm(weights: WeightMap, spec: ModelSpec, name: str) -> PostNorm:
    return PostNorm(weights.vector(name, spec.hidden_size), spec.rms_epsilon)
