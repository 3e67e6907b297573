"""Ernie4_5-moe: neighbouring dimensions turn together, softmax router with a bias for the choice, shared experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Gating
from thermocline.models.feed_forwards import shared_width
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_spec, paired_layer

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`.

    The converter writes a width of shared experts that is right for published models alone. It writes every how many
    layers one is routed, and not the last of them: the tensors say both.
    """
    read = SpecReader(file)
    read.refuse_expert_scale()
    read.size("interleave_moe_layer_step")
    read.require_equal("expert_gating_func", int(Gating.SOFTMAX))
    spec = read.decoder(normalize_top_k=True)
    read.require_equal("rope.dimension_count", spec.head_dim)
    stated = read.count("expert_shared_feed_forward_length", default=0)
    shared = shared_width(read, spec.num_layers, stated)
    return mixed_spec(read, spec, gating=Gating.SOFTMAX, shared=shared, scaled=False)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    return paired_layer(weights, spec, index)
