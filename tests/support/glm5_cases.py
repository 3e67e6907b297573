"""Toy models of GLM-5.3-Flash's kind, as options of `ToyArch`."""

from __future__ import annotations

from typing import Any


def _reads(count: int, **own: Any) -> dict[str, Any]:
    """A token reads `count` positions in whole pools, and what is behind the last whole pool."""
    return {"attention.indexer.top_k": count} | {
        f"attention.indexer.{key}": value for key, value in own.items()
    }


def _limits(*limits: float) -> dict[str, Any]:
    """Limits by layer, of routed experts, and of shared ones and dense layers."""
    return {
        "swiglu_clamp_exp": list(limits),
        "swiglu_clamp_shexp": [1.25 * limit for limit in limits],
    }


_NO_BOUND = {"kda.gate_lower_bound": None}
_ROUGH = {"hyper_connection.sinkhorn_iterations": 3, "hyper_connection.epsilon": 1e-3}
"""Of more steps, and of less in their denominators, one more or less would not show."""
_SHAPE = {"head_dim": 24, "rotary": 0, "query_rank": 48}
_UNEVEN = {
    "hidden": 30,
    "heads": 3,
    "head_dim": 13,
    "rotary": 0,
    "rank": 21,
    "query_rank": 17,
    "value_dim": 5,
    "experts": 5,
    "used": 3,
    "intermediate": 19,
    "state": 7,
    "conv_width": 3,
}
_FEW_INDEX_NUMBERS = {"head_count": 13, "key_length": 18, "kpool": 3}

GLM5_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {**_SHAPE, "layers": 5, "extra": _reads(8) | _limits(*[0.8] * 5), "seed": 201},
    "all_positions": {
        **_SHAPE,
        "layers": 4,
        "interval": 2,
        "dense": 2,
        "extra": _reads(4096) | _limits(0.5, 0.6, 0.7, 0.0),
        "seed": 202,
    },
    "odd": {
        **_UNEVEN,
        "layers": 5,
        "interval": 2,
        "extra": _reads(6, **_FEW_INDEX_NUMBERS)
        | _NO_BOUND
        | _ROUGH
        | {"expert_gating_func": None},
        "seed": 203,
    },
    "odd_all_positions": {
        **_UNEVEN,
        "layers": 4,
        "interval": 2,
        "dense": 0,
        "extra": _reads(513, **_FEW_INDEX_NUMBERS) | _NO_BOUND | {"expert_weights_norm": False},
        "seed": 204,
    },
    "shared": {
        **_SHAPE,
        "layers": 5,
        "extra": _reads(12, types=[True, True, False, True, False])
        | {"attention.head_count_kv": [0, 1, 1, 0, 1], "swiglu_clamp_exp": 0.7},
        "seed": 205,
    },
    "lone_pool": {
        **_SHAPE,
        "layers": 4,
        "interval": 2,
        "state": 80,
        "dense": 0,
        "extra": _reads(7, kpool=7, head_count=24) | {"swiglu_clamp_shexp": 0.5},
        "seed": 206,
    },
    "two_streams": {
        **_SHAPE,
        "layers": 3,
        "interval": 2,
        "extra": _reads(8) | _ROUGH | {"hyper_connection.count": 2},
        "seed": 208,
    },
}
"""A token reads whole pools of positions and the incomplete one behind them, at most; `all_positions` reads all.

`shared` has layers that take an earlier one's choice, the next one and one behind a state.
"""

GLM5_MIXED: dict[str, Any] = {
    "layers": 3,
    "head_dim": 64,
    "rotary": 0,
    "rank": 96,
    "query_rank": 256,
    "value_dim": 64,
    "extra": _reads(24) | _limits(*[1.0] * 3),
    "seed": 212,
}
"""For a quantised model. llama.cpp's perplexity is 0.24 % above that of exact arithmetic, of four layers up to 0.8 %."""
