"""DeepSeek-V2 and V3, Kimi-K2, GLM-4.7-Flash, Youtu-LLM: latent attention, leading dense layers, ungated shared experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Gating
from thermocline.models.latent import latent_rope, read_latent_attention, with_latent
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer, mixed_spec

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.router_rule import RouterRule
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap

# The first files of GLM-4.7-Flash name no gating function, and their scores are sigmoids.
_FLASH_LAYERS, _FLASH_VOCABULARY = (47, 48), 154880
# Files of DeepSeek-V2 with 236B from before converters wrote groups: their layers and experts, and the model's groups.
_LARGE_V2, _LARGE_V2_GROUPS = (60, 160), (8, 3)


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`."""
    read = SpecReader(file, is_latent=True)
    num_dense = read.count("leading_dense_block_count")
    if not read.has("expert_count") and num_dense == read.size("block_count"):  # Youtu-LLM
        return with_latent(read, read.dense_decoder())
    spec = read.decoder(normalize_top_k=read.flag("expert_weights_norm", default=False))
    is_flash = spec.num_layers in _FLASH_LAYERS and spec.vocab_size == _FLASH_VOCABULARY
    gating = read.gating(default=Gating.SIGMOID if is_flash else Gating.SOFTMAX)
    if gating is Gating.SOFTMAX:
        spec = replace(spec, router=_router_of_v2(read, spec))
    shared = read.count("expert_shared_count") * spec.expert_intermediate_size
    # The converter leaves out a factor that the model's configuration does not have.
    is_scaled = f"{file.architecture}.expert_weights_scale" in file.metadata
    spec = mixed_spec(read, spec, gating=gating, shared=shared, scaled=is_scaled)
    return with_latent(read, spec)


def _router_of_v2(read: SpecReader, spec: ModelSpec) -> RouterRule:
    """Return the rule of DeepSeek-V2, which judges a group by its best expert, and V3 by its best two."""
    rule = replace(spec.router, group_best=1)
    if read.has("expert_group_count") or (spec.num_layers, rule.num_experts) != _LARGE_V2:
        return rule
    return read.grouped(rule, *_LARGE_V2_GROUPS)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    attention = read_latent_attention(weights, spec, f"blk.{index}.")
    return mixed_layer(weights, spec, index, attention, rope=latent_rope(spec))


def read_next_block(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `DraftingArchitecture.read_next_block`. It is a routed layer."""
    return read_layer(weights, spec, index)
