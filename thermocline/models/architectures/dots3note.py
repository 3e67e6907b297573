"""dots3-note: latent attention to chosen positions, or to a window of rows of other sizes, each head with a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.models.choosing import with_choosing_layers
from thermocline.models.indexer import (
    TYPES_KEY,
    read_sparse_attention,
    routed_spec,
    with_indexer,
)
from thermocline.models.latent import latent_rope, read_latent_attention, with_latent_windows
from thermocline.models.metadata import SpecReader
from thermocline.models.mixed_layers import mixed_layer
from thermocline.models.spec import LayerKind

if TYPE_CHECKING:
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap

_PATTERN = "attention.sliding_window_pattern"


def read_spec(file: ModelFile) -> ModelSpec:
    """See `Architecture.read_spec`. Just the layers without a window choose."""
    read = SpecReader(file, is_latent=True)
    read.refuse_rope_scaling()
    heads = read.sizes("attention.head_count", read.size("block_count"))
    spec = routed_spec(read, gating=read.gating(), num_heads=max(heads))
    flags = read.required_flags(_PATTERN, spec.num_layers)
    if read.required_flags(TYPES_KEY, spec.num_layers) != tuple(not near for near in flags):
        raise read.bad(TYPES_KEY, f"must name the layers that {_PATTERN} does not")
    if all(flags):
        raise read.unsupported(f"{_PATTERN} with a window in each layer")
    base = read.positive_float("rope.freq_base_swa")
    spec = with_latent_windows(read, spec, flags, base)
    spec = with_indexer(read, spec, pairs=True)
    chosen = (n for n, near in enumerate(flags) if not near)
    spec = with_choosing_layers(spec, chosen)
    return read.checked(replace(spec, layer_heads=heads[: spec.num_layers]))


def read_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """See `Architecture.read_layer`. What turns of a row is normed."""
    own, prefix, window = spec.at(index), f"blk.{index}.", spec.window
    assert window is not None, "some layers have a window"
    if spec.layer_kinds[index] is LayerKind.WINDOW:
        attention = read_latent_attention(weights, own, prefix)
        attention, rope = replace(attention, window=window.num_tokens), window.rope
    else:
        attention, rope = read_sparse_attention(weights, own, index), latent_rope(spec)
    attention = replace(
        attention,
        gate=weights.matrix(f"{prefix}attn_gate.weight", own.num_heads, spec.hidden_size),
        turned_gain=weights.vector(f"{prefix}attn_k_norm.weight", spec.rotary_dims),
    )
    return mixed_layer(weights, own, index, attention, rope=rope)
