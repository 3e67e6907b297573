"""What drafters from files of their own share: dimensions, how one of another model is refused, and rows that stand alone.

Knows the keys and shapes, and no drafter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thermocline.errors import UnsupportedModelError
from thermocline.models.router_rule import NO_EXPERTS
from thermocline.models.spec import ModelSpec

if TYPE_CHECKING:
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.dense_contract import LayerCache, RopeTable
    from thermocline.kernels.weight import FloatArray, IntArray
    from thermocline.kernels.whole_layer import AttentionWeights
    from thermocline.modelfile.reader import ModelFile
    from thermocline.models.metadata import SpecReader


def not_for(file: ModelFile, what: str, target: ModelFile, choose: str) -> UnsupportedModelError:
    """Return the error of a drafter that was made for another model. choose: what to take instead, before the model's name."""
    return UnsupportedModelError(
        file.path,
        "this drafter was made for another model",
        unsupported=(what,),
        fix=f"choose {choose} {target.paths[0].name}",
    )


def read_dense_drafter(
    read: SpecReader,
    target: ModelSpec,
    architecture: str,
    num_layers: int,
    *,
    rope_base: float | None = None,
    epsilon: float | None = None,
) -> ModelSpec:
    """Return the dimensions of a drafter's dense layers, with the drafted model's vocabulary and context. Raises ModelError.

    rope_base, epsilon: what they are where the file does not say it; None requires that it does.
    """
    hidden, heads = read.size("embedding_length"), read.size("attention.head_count")
    head_dim = read.size("attention.key_length", default=hidden // heads)
    read.require_equal("attention.value_length", head_dim)
    spec = ModelSpec(
        architecture=architecture,
        name=read.model_name(),
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=read.same_size("attention.head_count_kv", num_layers, heads),
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        context_length=target.context_length,
        rope_base=read.positive_float("rope.freq_base", default=rope_base),
        rms_epsilon=read.positive_float("attention.layer_norm_rms_epsilon", default=epsilon),
        expert_intermediate_size=0,
        router=NO_EXPERTS,
        num_dense_layers=num_layers,
        dense_intermediate_size=read.size("feed_forward_length"),
        own_rotary_dims=read.rotary_dims(head_dim, default=head_dim),
        rope_scaling=read.rope_scaling(),
    )
    return read.checked(spec)


def store_pairs(
    kernels: Kernels,
    mixer: AttentionWeights,
    normed: FloatArray,
    rope: RopeTable,
    cache: LayerCache,
    slots: IntArray,
    *,
    prompt: bool,
) -> None:
    """Put the keys and values of rows [T, D], which nobody asks yet, into their slots of a layer's cache."""
    assert mixer.k is not None, "a drafter's layer has keys"
    assert mixer.v is not None, "and values"
    k, v = kernels.multiply_all((mixer.k, mixer.v), normed, prompt=prompt)
    shape = len(normed), cache.shape.kv_heads, cache.shape.head_dim
    nobody = np.zeros(shape, np.float32)
    kernels.dense.prepare_heads(
        nobody, k.reshape(shape), v.reshape(shape), mixer.head_norm, rope, cache, slots
    )


def split_heads(
    kernels: Kernels, mixer: AttentionWeights, normed: FloatArray, head_dim: int, *, prompt: bool
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the queries, keys and values of rows [T, D], each [T, heads, head_dim]."""
    assert mixer.k is not None, "a drafter's layer has keys"
    assert mixer.v is not None, "and values"
    products = kernels.multiply_all((mixer.q, mixer.k, mixer.v), normed, prompt=prompt)
    q, k, v = (each.reshape(len(normed), -1, head_dim) for each in products)
    return q, k, v


@dataclass(frozen=True, slots=True, eq=False)
class LoneRow:
    """A `TokenRun` of one row."""

    block_table: IntArray
    start: int = 0
    length: int = 1
    num_expanded: int = 0
