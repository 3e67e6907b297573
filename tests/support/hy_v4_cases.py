"""Toy models of Hunyuan 4's kind, as options of `ToyArch`."""

from __future__ import annotations

from typing import Any

from tests.support.latent_cases import UNEVEN


def _reads(count: int | None, *chooses: int, **own: Any) -> dict[str, Any]:
    """A token reads `count` positions, all of them for None. chooses: by layer, whether it has an indexer."""
    keys = {"head_count": None, "key_length": None, "types": None} if count is None else {}
    if chooses:
        keys["types"] = [bool(each) for each in chooses]
    keys = {f"attention.indexer.{key}": value for key, value in (keys | own).items()}
    return {"attention.indexer.top_k": count, **keys}


_ROUGH = {"hyper_connection.epsilon": 0.03, "hyper_connection.magnitude": 1.3}
"""So that either shows."""
_SHAPE = {"head_dim": 24, "rotary": 8, "query_rank": 48}
_FEW_INDEX_NUMBERS = {"head_count": 13, "key_length": 18}

HY_V4_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {
        **_SHAPE,
        "layers": 6,
        "extra": _reads(8, 1, 1, 0, 0, 0, 1) | {"swiglu_clamp_exp": [0.8] * 6},
        "seed": 241,
    },
    "odd": {
        **UNEVEN,
        "layers": 4,
        "dense": 2,
        "extra": _reads(5, 1, 0, 1, 0, **_FEW_INDEX_NUMBERS)
        | _ROUGH
        | {"hyper_connection.count": 3},
        "seed": 242,
    },
    "no_indexer": {
        **_SHAPE,
        "layers": 3,
        "extra": _reads(None) | {"swiglu_clamp_exp": 0.7},
        "seed": 243,
    },
    "one_position": {
        **_SHAPE,
        "layers": 3,
        "heads": 1,
        "value_dim": 64,
        "biased": False,
        "extra": _reads(1, 1, 1, 0) | {"swiglu_clamp_exp": [0.0, 0.6, 0.0]},
        "seed": 244,
    },
    "all_positions": {
        **UNEVEN,
        "layers": 3,
        "dense": 0,
        "experts": 2,  # transformers looks for a group's best two
        "used": 1,
        "extra": _reads(512, 1, 0, 1, head_count=24, key_length=18)
        | _ROUGH
        | {"expert_weights_norm": False},
        "seed": 245,
    },
    "two_streams": {
        **_SHAPE,
        "layers": 3,
        "used": 8,
        "extra": _reads(12, 1, 0, 0) | _ROUGH | {"hyper_connection.count": 2},
        "seed": 246,
    },
}
"""`default` has a layer that takes the choice of one that is not the one before it; `no_indexer` none that chooses."""

HY_V4_MIXED: dict[str, Any] = {
    "layers": 3,
    "head_dim": 64,
    "rotary": 32,
    "rank": 96,
    "query_rank": 256,
    "value_dim": 64,
    "extra": _reads(16, 1, 0, 1) | {"swiglu_clamp_exp": [1.0] * 3},
    "seed": 252,
}
"""For a quantised model."""
