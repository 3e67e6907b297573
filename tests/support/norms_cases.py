"""Toy models whose norms take the mean off, as options of `ToyArch`."""

from __future__ import annotations

from typing import Any

_ODD = {
    "hidden": 30,
    "heads": 3,
    "kv_heads": 3,
    "head_dim": 10,
    "experts": 5,
    "used": 3,
    "intermediate": 19,
}
_LOOSE = {"attention.clamp_kqv": 8.0}

DBRX_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {"used": 4, "seed": 311},
    "odd": {**_ODD, "layers": 4, "seed": 312},
    "one_kv_head": {"kv_heads": 1, "used": 1, "layers": 2, "seed": 313},
    "all_experts": {"experts": 5, "used": 5, "extra": _LOOSE, "seed": 314},
    "one_expert": {"experts": 1, "used": 1, "layers": 2, "seed": 315},
}
"""Of most, a quarter of the numbers of q, k and v reach their limit; of `all_experts`, none."""
