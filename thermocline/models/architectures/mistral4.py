"""Mistral4: latent attention, softmax router whose weights are divided by their sum, ungated shared experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Gating
from thermocline.models.latent import latent_rope, read_latent_attention, with_latent
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer, mixed_spec

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`.

    The converter leaves out the factor that the model's own code has on queries behind the original context.
    """
    read = SpecReader(file, is_latent=True)
    spec = read.decoder(normalize_top_k=read.flag("expert_weights_norm", default=False))
    gating = read.gating(default=Gating.SOFTMAX)
    shared = read.count("expert_shared_count") * spec.expert_intermediate_size
    is_scaled = read.has("expert_weights_scale")
    return with_latent(read, mixed_spec(read, spec, gating=gating, shared=shared, scaled=is_scaled))


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    attention = read_latent_attention(weights, spec, f"blk.{index}.")
    return mixed_layer(weights, spec, index, attention, rope=latent_rope(spec))
