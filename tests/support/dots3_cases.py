"""Toy models of dots3-note's kind, as options of `ToyArch`."""

from __future__ import annotations

from typing import Any

from tests.support.latent_cases import UNEVEN


def _reads(count: int, *windows: int, **own: Any) -> dict[str, Any]:
    """A token reads `count` positions of full layers. windows: by layer, whether it has one."""
    flags = [bool(window) for window in windows]
    keys = {f"attention.indexer.{key}": value for key, value in own.items()}
    return keys | {
        "attention.indexer.top_k": count,
        "attention.indexer.types": [not flag for flag in flags],
        "attention.sliding_window_pattern": flags,
    }


def _near(rank: int, values: int) -> dict[str, Any]:
    """Sizes of layers with a window."""
    return {"attention.kv_lora_rank_swa": rank, "attention.value_length_mla_swa": values}


_SHAPE = {
    "head_dim": 24,
    "rotary": 8,
    "query_rank": 48,
    "near_head_dim": 28,
    "near_kv_heads": 2,
    "window": 16,
}
_UNEVEN = UNEVEN | {"near_head_dim": 9, "near_kv_heads": 5, "window": 7}

DOTS3_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {**_SHAPE, "layers": 6, "extra": _reads(8, 0, 0, 1, 1, 1, 0), "seed": 261},
    "odd": {
        **_UNEVEN,
        "layers": 4,
        "dense": 2,
        "extra": _reads(5, 1, 0, 1, 0, head_count=13, key_length=18) | _near(11, 3),
        "seed": 262,
    },
    "all_positions": {
        **_SHAPE,
        "layers": 4,
        "dense": 0,
        "extra": _reads(512, 0, 1, 1, 0),
        "seed": 263,
    },
    "window_of_two": {
        **_SHAPE,
        "layers": 3,
        "heads": 1,
        "near_kv_heads": 1,
        "window": 2,
        "tied": True,
        "extra": _reads(512, 1, 1, 0) | {"expert_weights_norm": False},
        "seed": 264,
    },
    "no_windows": {**_SHAPE, "layers": 2, "used": 8, "extra": _reads(3, 0, 0), "seed": 265},
}
"""`all_positions` and `window_of_two` read all positions of full layers, `odd` begins with a window."""

DOTS3_MIXED: dict[str, Any] = {
    "layers": 3,
    "head_dim": 64,
    "rotary": 32,
    "rank": 128,
    "query_rank": 256,
    "value_dim": 64,
    "near_head_dim": 96,
    "near_kv_heads": 8,
    "window": 16,
    "extra": _reads(512, 0, 1, 1),
    "seed": 272,
}
"""For a quantised model."""
