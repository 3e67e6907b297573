"""GLM-5.3-Flash: residual streams that are mixed as wholes, delta rule with bounded decays, and latent attention to chosen blocks.

No number of a head turns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.kernels.dense_contract import Gating
from thermocline.kernels.whole_layer import NO_NORM
from thermocline.models.expert_limits import SHARED_KEY, limited_layer, with_limits
from thermocline.models.gated_delta import (
    channel_shape,
    kinds_by_heads,
    low_rank_delta,
    lower_bound,
)
from thermocline.models.indexer import read_sparse_attention, with_pooled_indexer
from thermocline.models.latent import with_latent_layers
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer, mixed_spec
from thermocline.models.spec import LayerKind
from thermocline.models.streams import balanced_streams, read_layer_streams

if TYPE_CHECKING:
    from thermocline.kernels.whole_layer import DeltaWeights
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. A layer without heads of keys keeps a state, with as many heads as attention has."""
    read = SpecReader(file, is_latent=True)
    kv_heads, _ = read.attention_heads("attention.head_count_kv", read.size("block_count"))
    normalize = read.flag("expert_weights_norm", default=False)
    spec = read.decoder(normalize_top_k=normalize, num_kv_heads=1)
    shared = read.count("expert_shared_count") * spec.expert_intermediate_size
    gating, is_scaled = read.gating(default=Gating.SIGMOID), read.has("expert_weights_scale")
    spec = mixed_spec(read, spec, gating=gating, shared=shared, scaled=is_scaled)
    shape, kinds = channel_shape(read, spec), kinds_by_heads(kv_heads[: spec.num_layers])
    if read.has("kda.gate_lower_bound"):
        shape = replace(shape, lower_bound=lower_bound(read, file))
    streams = balanced_streams(read)
    spec = with_limits(read, file, spec, before=True)
    if not read.has(SHARED_KEY):
        spec = replace(spec, shared_limits=spec.expert_limits)
    spec = with_latent_layers(read, spec, may_be_still=True)
    spec = replace(spec, own_layer_kinds=kinds, recurrent=shape, streams=streams)
    return with_pooled_indexer(read, spec)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    if spec.layer_kinds[index] is LayerKind.RECURRENT:
        layer = mixed_layer(weights, spec, index, _delta(weights, spec, f"blk.{index}."))
    else:
        layer = mixed_layer(weights, spec, index, read_sparse_attention(weights, spec, index))
    layer = limited_layer(weights, spec, index, layer)
    streams = read_layer_streams(weights, spec, index)
    return replace(layer, parts=replace(layer.parts, norm=NO_NORM, streams=streams))


def _delta(weights: WeightMap, spec: ModelSpec, prefix: str) -> DeltaWeights:
    """Return a layer's rule. Its decays are below zero in the file, with a bound too, where the rule wants them above."""
    decay = weights.vector(prefix + "ssm_a", spec.num_heads)
    delta = low_rank_delta(weights, spec, prefix, decay)
    if not delta.rule.shape.lower_bound:
        return delta
    return replace(delta, rule=replace(delta.rule, decay=-decay))
