"""Bailingmoe: neighbouring dimensions turn together, softmax router, shared experts without a gate (Ling of the first generation)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Gating
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_spec, paired_layer

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`."""
    read = SpecReader(file)
    read.require_equal("expert_gating_func", int(Gating.SOFTMAX))
    spec = read.decoder(normalize_top_k=read.flag("expert_weights_norm"))
    read.require_equal("rope.dimension_count", spec.head_dim)
    shared = read.size("expert_shared_count") * spec.expert_intermediate_size
    return mixed_spec(read, spec, gating=Gating.SOFTMAX, shared=shared)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    return paired_layer(weights, spec, index)
