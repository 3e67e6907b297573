"""Toy models as converters with options write them: q, k and v in one tensor, biases, stretched contexts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tests.support.toy_parts import Weights

SCALED_ROPES = {
    "linear": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    "factor_alone": {"rope.scaling.factor": 2.0},
    "yarn": {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    },
}
"""Keys of stretched contexts, by name."""


def fused(weights: Weights) -> Weights:
    """Return the same model with attention's q, k and v, and their biases, in one tensor each."""
    result = dict(weights)
    for name in weights:
        prefix, found, suffix = name.partition("attn_q.")
        if found and f"{prefix}attn_k.{suffix}" in weights:
            parts = [result.pop(f"{prefix}attn_{part}.{suffix}") for part in ("q", "k", "v")]
            result[f"{prefix}attn_qkv.{suffix}"] = np.concatenate(parts)
    return result


def biased(weights: Weights, parts: tuple[str, ...] = ("q", "k", "v")) -> Weights:
    """Return the model with biases of those projections of every layer."""
    rng = np.random.default_rng(5)
    result = dict(weights)
    for name, matrix in weights.items():
        prefix, _, part = name.removesuffix(".weight").rpartition("attn_")
        if part in parts and name.endswith(".weight"):
            size = len(matrix)
            result[f"{prefix}attn_{part}.bias"] = (0.3 * rng.standard_normal(size)).astype("f4")
    return result
