"""Toy models with short convolutions or Mamba2, as options of `ToyArch`: LFM2, Nemotron 3 and Granite 4 in small."""

from __future__ import annotations

from typing import Any

LFM2_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {"layers": 4, "interval": 3, "conv_width": 3, "seed": 61},
    "odd": {
        "layers": 3,
        "hidden": 30,
        "heads": 3,
        "kv_heads": 3,
        "head_dim": 10,
        "experts": 5,
        "used": 3,
        "intermediate": 19,
        "shared": 23,
        "interval": 2,
        "conv_width": 2,
        "dense": 0,
        "seed": 62,
    },
    "tied_two_dense": {
        "layers": 5,
        "interval": 2,
        "conv_width": 5,
        "dense": 2,
        "tied": True,
        "seed": 63,
    },
    "one_expert": {
        "layers": 2,
        "interval": 2,
        "conv_width": 3,
        "experts": 1,
        "used": 1,
        "seed": 64,
    },
}

_DENSE = {"experts": 0, "used": 0}
_UNEVEN_DENSE = {"hidden": 30, "heads": 3, "kv_heads": 1, "head_dim": 10, "shared": 23}
LFM2_DENSE_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {**_DENSE, "layers": 4, "interval": 3, "conv_width": 3, "seed": 65},
    "odd": {
        **_DENSE,
        "layers": 5,
        **_UNEVEN_DENSE,
        "interval": 2,
        "conv_width": 2,
        "tied": True,
        "seed": 66,
    },
    "all_attend": {**_DENSE, "layers": 2, "interval": 1, "conv_width": 5, "seed": 67},
}

LFM2_MIXED: dict[str, Any] = {
    "hidden": 256,
    "layers": 3,
    "heads": 4,
    "conv_width": 3,
    "kv_heads": 2,
}
"""Over the options of every architecture's quantised case."""

NEMOTRON_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {"layers": 7, "seed": 71},
    "odd": {
        "layers": 5,
        "hidden": 30,
        "heads": 3,
        "kv_heads": 3,
        "head_dim": 10,
        "experts": 5,
        "used": 3,
        "intermediate": 19,
        "shared": 23,
        "key_heads": 3,
        "value_heads": 6,
        "state": 7,
        "conv_width": 3,
        "seed": 72,
    },
    "all_experts": {
        "layers": 4,
        "experts": 2,
        "used": 2,
        "key_heads": 1,
        "value_heads": 3,
        "conv_width": 2,
        "seed": 73,
    },
    "grouped_experts": {
        "layers": 5,
        "extra": {"expert_group_count": 4, "expert_group_used_count": 2},
        "seed": 74,
    },
    "narrow_experts": {"layers": 7, "narrow": 24, "experts": 9, "used": 3, "seed": 76},
    "puzzle": {"layers": 7, "narrow": 24, "experts": 9, "used": 3, "puzzle": True, "seed": 77},
}

NEMOTRON_DENSE_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {**_DENSE, "layers": 7, "seed": 78},
    "odd": {
        **_DENSE,
        "layers": 5,
        **_UNEVEN_DENSE,
        "key_heads": 3,
        "value_heads": 6,
        "state": 7,
        "conv_width": 3,
        "seed": 79,
    },
    "puzzle": {**_DENSE, "layers": 10, "key_heads": 1, "conv_width": 2, "puzzle": True, "seed": 80},
}

NEMOTRON_MIXED: dict[str, Any] = {
    "hidden": 256,
    "layers": 7,
    "heads": 4,
    "kv_heads": 2,
    "seed": 75,
}

GRANITE_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {"layers": 4, "interval": 3, "key_heads": 1, "seed": 91},
    "odd": {
        "layers": 3,
        "hidden": 30,
        "heads": 3,
        "kv_heads": 1,
        "head_dim": 10,
        "experts": 5,
        "used": 3,
        "intermediate": 19,
        "shared": 23,
        "interval": 2,
        "key_heads": 3,
        "value_heads": 6,
        "state": 7,
        "conv_width": 3,
        "seed": 92,
    },
    "dense": {"layers": 4, "interval": 2, "experts": 0, "used": 0, "seed": 93},
    "tied_dense": {
        "layers": 3,
        "interval": 3,
        "experts": 0,
        "used": 0,
        "key_heads": 1,
        "value_heads": 8,
        "conv_width": 2,
        "tied": True,
        "seed": 94,
    },
    "lone_layer": {"layers": 1, "interval": 1, "experts": 5, "seed": 95},
    "rotary": {
        "layers": 3,
        "interval": 2,
        "extra": {"rope.scaling.finetuned": True, "rope.dimension_count": 16},
        "seed": 96,
    },
    "one_expert": {"layers": 2, "interval": 2, "experts": 1, "used": 1, "seed": 97},
}

GRANITE_MIXED: dict[str, Any] = {"layers": 4, "heads": 4, "kv_heads": 2, "key_heads": 1, "seed": 98}
