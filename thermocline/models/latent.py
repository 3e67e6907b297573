"""Reads multi-head latent attention: its dimensions by metadata, its weights by their GGUF names.

Knows no architecture. Files of old converters have one matrix, attn_kv_b, where today's have k_b and v_b.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.kernels.cache_format import HeadShape
from thermocline.kernels.dense_contract import LatentNorm, Temperature
from thermocline.kernels.reference import decode_blocks
from thermocline.kernels.weight import HeadMatrices, WeightStack
from thermocline.kernels.whole_layer import LatentWeights, LowRank
from thermocline.modelfile.formats import FORMATS_BY_NAME
from thermocline.models.attention_specs import LatentSpec, WindowSpec
from thermocline.models.blocks import read_mixer_norm
from thermocline.models.rope import RopeRule, Yarn
from thermocline.models.spec import LayerKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.kernels.weight import ByteArray
    from thermocline.models.metadata import SpecReader
    from thermocline.models.spec import ModelSpec
    from thermocline.models.weights import WeightMap

_MAX_HALF: Final = 65504.0


def with_latent(read: SpecReader, spec: ModelSpec) -> ModelSpec:
    """Return the dimensions with those of latent attention. Raises ModelError.

    Files of old converters state the heads' own sizes, and others those of a cached row beside them.
    """
    rank, is_old = read.size("attention.kv_lora_rank"), not read.has("attention.key_length_mla")
    suffix = "" if is_old else "_mla"
    turned = read.rotary_dims(read.size(f"attention.key_length{suffix}") - 1)
    if is_old:
        read.require_equal("attention.head_count_kv", spec.num_heads)
    else:
        read.require_equal("attention.head_count_kv", 1)
        read.require_equal("attention.key_length", rank + turned)
        read.require_equal("attention.value_length", rank)
    spec = _with_rows(read, spec, suffix)
    if not isinstance(spec.rope_scaling, Yarn):
        return spec
    scaling = _latent_yarn(read, spec.rope_scaling)
    scale = spec.attention_scale * scaling.score_scale
    return replace(spec, rope_scaling=scaling, own_attention_scale=scale)


def with_latent_windows(
    read: SpecReader, spec: ModelSpec, flags: Sequence[bool], base: float
) -> ModelSpec:
    """Return the dimensions with windows in the layers so flagged, whose rows and heads have other sizes. Raises ModelError.

    base: of what turns there, as many numbers as elsewhere.
    """
    latent, turned = spec.latent, spec.rotary_dims
    assert latent is not None, "a model without latent attention"
    rank = read.size("attention.kv_lora_rank_swa")
    near = replace(
        latent,
        rank=rank,
        key_dim=read.size("attention.key_length_mla_swa", least=turned + 1),
        value_dim=read.size("attention.value_length_mla_swa"),
    )
    read.require_equal("attention.key_length_swa", rank + turned)
    read.require_equal("attention.value_length_swa", rank)
    read.require_equal("rope.dimension_count_swa", turned)
    shapes = (
        HeadShape(1, latent.rank + turned, latent=latent.rank),
        HeadShape(1, rank + turned, latent=rank),
    )
    rope = RopeRule(turned, base, pairs=True)
    return replace(
        spec,
        own_layer_kinds=tuple(LayerKind.WINDOW if near else LayerKind.ATTENTION for near in flags),
        own_kv_shapes=tuple(shapes[bool(near)] for near in flags),
        window=WindowSpec(read.size("attention.sliding_window"), rope, latent=near),
    )


def with_latent_layers(
    read: SpecReader, spec: ModelSpec, *, may_be_still: bool = False
) -> ModelSpec:
    """Return the dimensions with those of latent attention in some layers, whose turn is not scaled. Raises ModelError.

    What a cached row and a layer's heads of keys are called besides has no meaning there, and converters differ in it.
    may_be_still: no number may turn.
    """
    read.refuse_rope_scaling()
    return _with_rows(read, spec, "_mla", may_be_still=may_be_still)


def _with_rows(
    read: SpecReader, spec: ModelSpec, suffix: str, *, may_be_still: bool = False
) -> ModelSpec:
    """Return the dimensions of cached rows and of heads, whose keys end with `suffix`."""
    rank, key_dim = read.size("attention.kv_lora_rank"), read.size(f"attention.key_length{suffix}")
    is_still = may_be_still and read.count("rope.dimension_count") == 0
    turned = 0 if is_still else read.rotary_dims(key_dim - 1)
    latent = LatentSpec(
        rank=rank,
        query_rank=read.count("attention.q_lora_rank", default=0),
        key_dim=key_dim,
        value_dim=read.size(f"attention.value_length{suffix}"),
        turned=turned,
    )
    shape = HeadShape(1, rank + turned, latent=rank)
    return replace(
        spec,
        num_kv_heads=1,
        head_dim=rank + turned,
        latent=latent,
        own_attention_scale=key_dim**-0.5,
        own_rotary_dims=turned,
        own_kv_shapes=(shape,) * spec.num_layers,
        temperature=_temperature(read),
    )


def _temperature(read: SpecReader) -> Temperature | None:
    """Return the factor of late queries, which files of Mistral's models have."""
    scale = read.positive_float("attention.temperature_scale", default=0.0, zero=0.0)
    return Temperature(scale, read.size("attention.temperature_length")) if scale else None


def _latent_yarn(read: SpecReader, yarn: Yarn) -> Yarn:
    """Return the scaling with its factor on scores, as transformers has it (docs/decisions/0100).

    The multiplier moves the usual factor from cosines and sines to all scores. Without it the factor stays where other
    models have it, and so does one of the file's own.
    """
    if read.positive_float("rope.scaling.attn_factor", default=1.0) != 1.0:
        read.refuse("rope.scaling.attn_factor")
    key = "rope.scaling.yarn_log_multiplier"
    multiplier = read.positive_float(key, default=0.0, zero=0.0)
    if not multiplier:
        return yarn
    scale = (1.0 + multiplier * math.log(max(yarn.factor, 1.0))) ** 2
    magnitude = yarn.magnitude if read.has("rope.scaling.yarn_attn_factor") else 1.0
    return replace(yarn, magnitude=magnitude, score_scale=scale)


def latent_rope(spec: ModelSpec) -> RopeRule:
    """Return the rotary rule of the last numbers of each head."""
    return RopeRule(spec.rotary_dims, spec.rope_base, spec.rope_scaling, pairs=True)


def still_rope(spec: ModelSpec) -> RopeRule:
    """Return the rule of heads that do not turn: every angle is 0, which leaves each number as it is."""
    slowed = (math.inf,) * (spec.rotary_dims // 2)
    return RopeRule(spec.rotary_dims, spec.rope_base, pairs=True, factors=slowed)


def read_latent_attention(weights: WeightMap, spec: ModelSpec, prefix: str) -> LatentWeights:
    """Return the layer's attention. Queries are one matrix, or two with a norm between them."""
    latent, hidden, heads = spec.latent, spec.hidden_size, spec.num_heads
    assert latent is not None, "a model without latent attention"
    low, columns, name = None, hidden, "attn_q"
    if f"{prefix}attn_q_a.weight" in weights:
        columns, name = latent.query_rank, "attn_q_b"
        gain = weights.vector(f"{prefix}attn_q_a_norm.weight", columns)
        low = LowRank(weights.matrix(f"{prefix}attn_q_a.weight", columns, hidden), gain)
    rank = latent.rank
    gain = weights.vector(f"{prefix}attn_kv_a_norm.weight", rank)
    return LatentWeights(
        norm=read_mixer_norm(weights, spec, prefix),
        low=low,
        q=weights.matrix(f"{prefix}{name}.weight", heads * latent.key_dim, columns),
        kv=weights.matrix(f"{prefix}attn_kv_a_mqa.weight", rank + spec.rotary_dims, hidden),
        kv_norm=LatentNorm(gain, spec.rms_epsilon),
        up=_head_matrices(weights, prefix, heads, latent),
        output=weights.matrix(f"{prefix}attn_output.weight", hidden, heads * latent.value_dim),
        scale=spec.attention_scale,
        temperature=spec.temperature,
    )


def _head_matrices(weights: WeightMap, prefix: str, heads: int, latent: LatentSpec) -> HeadMatrices:
    """Return k_b and v_b. Of attn_kv_b, each head's first rows are k_b's transposed, and its others are v_b's."""
    plain, values, old = latent.plain, latent.value_dim, f"{prefix}attn_kv_b.weight"
    if old not in weights or f"{prefix}attn_k_b.weight" in weights:
        return HeadMatrices(
            weights.stack(f"{prefix}attn_k_b.weight", (heads, latent.rank, plain)),
            weights.stack(f"{prefix}attn_v_b.weight", (heads, values, latent.rank)),
        )
    both = weights.matrix(old, heads * (plain + values), latent.rank)
    scales = None if both.scale == 1.0 else np.full(heads, both.scale, np.float32)
    raw = both.raw.reshape(heads, plain + values, -1)
    stack = WeightStack(old, both.format, raw[:, plain:], latent.rank, scales)
    return HeadMatrices(_transposed(stack, raw[:, :plain]), stack)


def _transposed(of: WeightStack, raw: ByteArray) -> WeightStack:
    """Return the matrices `raw`, of the same format, with rows and columns exchanged: a copy in F16, or in F32.

    Blocks lie along rows, so exchanged ones can not be a view of the file.
    """
    rows = decode_blocks(raw.reshape(-1, raw.shape[-1]), of.format.type_id)
    exchanged = rows.reshape(*raw.shape[:2], -1).transpose(0, 2, 1)
    name = "F32" if of.format.name == "F32" else "F16"
    if name == "F16" and np.abs(exchanged).max(initial=0.0) > _MAX_HALF:
        name = "F32"
    kept = np.ascontiguousarray(exchanged, np.float32 if name == "F32" else np.float16)
    return WeightStack(of.name, FORMATS_BY_NAME[name], kept.view(np.uint8), raw.shape[1], of.scales)
