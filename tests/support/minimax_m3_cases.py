"""Toy models of MiniMax-M3's kind, as options of `ToyArch`."""

from __future__ import annotations

from typing import Any


def _reads(count: int, size: int, local: int = 1, *, key_length: int = 16) -> dict[str, Any]:
    """Each head of keys reads `count` blocks of `size` positions, the last `local` among them."""
    return {
        "attention.indexer.top_k": count,
        "attention.indexer.block_size": size,
        "attention.indexer.local_blocks": local,
        "attention.indexer.key_length": key_length,
    }


_SHAPE = {"heads": 8, "kv_heads": 4, "rotary": 8}
_UNEVEN = {
    "hidden": 30,
    "heads": 9,
    "kv_heads": 3,
    "head_dim": 10,
    "rotary": 6,
    "experts": 5,
    "used": 3,
    "intermediate": 19,
}

MINIMAX_M3_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {**_SHAPE, "layers": 4, "extra": _reads(3, 8), "seed": 241},
    "all_positions": {**_SHAPE, "layers": 3, "extra": _reads(16, 128), "seed": 242},
    "odd": {
        **_UNEVEN,
        "layers": 5,
        "dense": 2,
        "extra": _reads(4, 7, key_length=18) | {"expert_shared_count": 2},
        "seed": 263,
    },
    "local_blocks": {
        **_SHAPE,
        "kv_heads": 2,
        "layers": 3,
        "dense": 0,
        "extra": _reads(5, 4, 3),
        "seed": 244,
    },
    "one_kv_head": {
        **_SHAPE,
        "kv_heads": 1,
        "layers": 3,
        "dense": 0,
        "head_dim": 32,
        "extra": _reads(2, 16, key_length=64),
        "seed": 245,
    },
    "one_expert": {
        **_SHAPE,
        "layers": 2,
        "dense": 0,
        "rotary": 16,
        "experts": 1,
        "used": 1,
        "extra": _reads(2, 8),
        "seed": 246,
    },
    "no_local": {
        **_SHAPE,
        "kv_heads": 8,
        "layers": 3,
        "dense": 0,
        "extra": _reads(6, 3, 0),
        "seed": 247,
    },
}
"""Each head of keys reads its own blocks; in `all_positions`, where they are as large as published, all of them."""

MINIMAX_M3_MIXED: dict[str, Any] = {
    "layers": 3,
    "head_dim": 64,
    "rotary": 32,
    "kv_heads": 2,
    "extra": _reads(3, 8, key_length=64),
    "seed": 255,
}
"""For a quantised model. llama.cpp's perplexity is 0.15 % above that of exact arithmetic, of other seeds up to 0.6 %."""
