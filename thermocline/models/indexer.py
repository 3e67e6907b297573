"""Reads what chooses the positions that tokens of sparse latent attention read: its sizes by metadata, its weights by name.

Knows no architecture. Blocks behind the last layer read all positions, so that the tensors of theirs are left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from thermocline.kernels.whole_layer import Indexer, KeyPool
from thermocline.models.attention_specs import IndexerSpec
from thermocline.models.choosing import most_read_of, with_choosing_layers
from thermocline.models.latent import latent_rope, read_latent_attention, with_latent
from thermocline.models.mixed_layers import mixed_layer, mixed_spec
from thermocline.models.spec import LayerKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.kernels.dense_contract import Gating
    from thermocline.kernels.whole_layer import LatentWeights
    from thermocline.models.decoder import DecoderLayer
    from thermocline.models.metadata import SpecReader
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap

_KEYS: Final = "attention.indexer."
TYPES_KEY: Final = f"{_KEYS}types"
"""By layer, whether it chooses, or takes the choice of an earlier one."""


def sparse_spec(read: SpecReader, *, gating: Gating, pairs: bool) -> ModelSpec:
    """Return the dimensions of a model of latent attention whose layers all have an indexer. Raises ModelError.

    pairs: neighbours turn together in the indexer's heads, which in attention's they always do.
    """
    return with_indexer(read, routed_spec(read, gating=gating), pairs=pairs)


def routed_spec(read: SpecReader, *, gating: Gating, num_heads: int | None = None) -> ModelSpec:
    """Return the dimensions of a model of latent attention with routed and shared experts. Raises ModelError.

    num_heads: the most, where layers differ.
    """
    read.size("attention.key_length_mla")  # files of old converters know no indexer
    normalize = read.flag("expert_weights_norm", default=False)
    spec = read.decoder(normalize_top_k=normalize, num_heads=num_heads, num_kv_heads=1)
    shared = read.count("expert_shared_count") * spec.expert_intermediate_size
    # Converters leave out a factor that the model's configuration does not have.
    is_scaled = read.has("expert_weights_scale")
    spec = mixed_spec(read, spec, gating=gating, shared=shared, scaled=is_scaled)
    return with_latent(read, spec)


def with_indexer(read: SpecReader, spec: ModelSpec, *, pairs: bool) -> ModelSpec:
    """Return the dimensions with an indexer in each layer. Raises ModelError. pairs: as for `sparse_spec`."""
    # Chosen positions do not say how late the token is that reads them.
    read.refuse("attention.temperature_scale")
    read.size("attention.q_lora_rank")  # of what the indexer's queries are made
    indexer = IndexerSpec(
        num_heads=read.size(f"{_KEYS}head_count"),
        dim=read.size(f"{_KEYS}key_length", least=spec.rotary_dims),
        most_read=read.size(f"{_KEYS}top_k"),
        pairs=pairs,
        layers=(),
    )
    return with_choosing_layers(replace(spec, indexer=indexer), range(spec.num_layers))


def with_flagged_layers(read: SpecReader, spec: ModelSpec, flags: Sequence[bool]) -> ModelSpec:
    """Return the dimensions with an indexer in the layers that the file flags. Raises ModelFileError."""
    if not flags[0]:
        what = "the first layer has no earlier one whose choice it could take"
        raise read.bad(TYPES_KEY, what)
    return with_choosing_layers(spec, (n for n, chooses in enumerate(flags) if chooses))


def with_pooled_indexer(read: SpecReader, spec: ModelSpec) -> ModelSpec:
    """Return the dimensions with an indexer that chooses blocks, in layers of latent attention. Raises ModelError.

    The file may say which of these choose; by itself each does.
    """
    key = f"{_KEYS}kpool_select_tail"
    if not read.flag(key, default=True):
        raise read.unsupported(f"{key} = false, by which a token may not read itself")
    read.size("attention.q_lora_rank")  # of what the indexer's queries are made
    block = read.size(f"{_KEYS}kpool", least=2)
    indexer = IndexerSpec(
        num_heads=read.size(f"{_KEYS}head_count"),
        dim=read.size(f"{_KEYS}key_length"),
        most_read=most_read_of(read, block),
        pairs=False,
        layers=(),
        block=block,
        weighs_keys=True,
        epsilon=read.positive_float("attention.layer_norm_epsilon", default=1e-6),
    )
    attending = [n for n, kind in enumerate(spec.layer_kinds) if kind is LayerKind.ATTENTION]
    flags = read.layer_flags(TYPES_KEY, spec.num_layers) or (True,) * spec.num_layers
    if attending and not flags[attending[0]]:
        what = "the first layer that attends has no earlier one whose choice it could take"
        raise read.bad(TYPES_KEY, what)
    return with_choosing_layers(replace(spec, indexer=indexer), (n for n in attending if flags[n]))


def sparse_layer(weights: WeightMap, spec: ModelSpec, index: int) -> DecoderLayer:
    """Return a layer of latent attention to chosen positions, or a block behind the last layer, which reads all."""
    attention = read_sparse_attention(weights, spec, index)
    return mixed_layer(weights, spec, index, attention, rope=latent_rope(spec))


def read_sparse_attention(weights: WeightMap, spec: ModelSpec, index: int) -> LatentWeights:
    """Return latent attention to chosen positions, or to all behind the last layer. Raises ModelFileError."""
    prefix, of = f"blk.{index}.", spec.indexer
    assert of is not None, "a model without an indexer"
    attention = read_latent_attention(weights, spec, prefix)
    if index not in of.layers:
        weights.leave_out(f"{prefix}indexer.")
        weights.leave_out(f"{prefix}indexer_compressor_")
        most_read = of.most_read if index < spec.num_layers else 0
        return replace(attention, most_read=most_read, block=of.block)
    latent, hidden, own = spec.latent, spec.hidden_size, f"{prefix}indexer."
    assert latent is not None, "an indexer is of latent attention"
    indexer = Indexer(
        q=weights.matrix(f"{own}attn_q_b.weight", of.num_heads * of.dim, latent.query_rank),
        k=weights.matrix(f"{own}attn_k.weight", of.dim, hidden),
        gain=weights.vector(f"{own}k_norm.weight", of.dim),
        bias=weights.vector(f"{own}k_norm.bias", of.dim),
        epsilon=of.epsilon,
        weights=weights.matrix(f"{own}proj.weight", of.num_heads, hidden),
        scale=(of.num_heads * of.dim) ** -0.5,
        pairs=of.pairs,
        pool=_read_pool(weights, of, prefix, hidden) if of.weighs_keys else None,
        turns_last=of.turns_last,
    )
    return replace(attention, most_read=of.most_read, indexer=indexer, block=of.block)


def _read_pool(weights: WeightMap, of: IndexerSpec, prefix: str, hidden: int) -> KeyPool:
    own = f"{prefix}indexer_compressor_"
    gate = weights.matrix(f"{own}gate.weight", of.dim, hidden)
    return KeyPool(gate, weights.array(f"{own}ape.weight", (of.block, of.dim)))
