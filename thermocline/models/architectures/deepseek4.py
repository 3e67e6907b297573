"""DeepSeek-V4: residual streams that are mixed as wholes, attention to a window and to entries, experts by token in first layers.

An entry is made of four tokens with the four before them, and chosen; or of 128, and read always.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.kernels.whole_layer import NO_NORM
from thermocline.models.compressed import compressed_rope, read_compressed, with_entries
from thermocline.models.expert_limits import SHARED_KEY, limited_layer, with_limits
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer, mixed_spec
from thermocline.models.streams import balanced_streams, read_layer_streams

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`."""
    read = SpecReader(file)
    spec = read.decoder(normalize_top_k=read.flag("expert_weights_norm"))
    shared = read.count("expert_shared_count") * spec.expert_intermediate_size
    spec = mixed_spec(read, spec, gating=read.gating(), shared=shared, num_dense=0)
    spec = with_limits(read, file, spec, before=True)
    if not read.has(SHARED_KEY):
        spec = replace(spec, shared_limits=spec.expert_limits)
    spec = replace(
        spec,
        streams=balanced_streams(read, sums=True),
        num_layers_by_token=read.count("hash_layer_count"),
    )
    return with_entries(read, spec)


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`."""
    prefix = f"blk.{index}."
    attention, rope = read_compressed(weights, spec, index), compressed_rope(spec, index)
    layer = mixed_layer(weights, spec, index, attention, rope=rope)
    layer = limited_layer(weights, spec, index, layer)
    parts = layer.parts
    weights.leave_out(f"{prefix}exp_probs_b_vl.")  # for tokens of images
    if index < spec.num_layers_by_token:
        assert parts.routed is not None, "all layers have experts"
        rule = parts.routed.rule
        table = weights.choices(
            spec.expert_tables[index],
            (spec.vocab_size, rule.chosen),
            spec.router.num_experts,
        )
        parts = replace(parts, routed=replace(parts.routed, by_token=table))
    streams = read_layer_streams(weights, spec, index)
    return replace(layer, parts=replace(parts, norm=NO_NORM, streams=streams))
