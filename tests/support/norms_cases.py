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

_ORIGINAL = {"rope.scaling.original_context_length": 64}

PHIMOE_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {"stretched": True, "extra": _ORIGINAL, "rms_epsilon": 1e-5, "seed": 321},
    "short": {"stretched": True, "seed": 322},
    "odd": {**_ODD | {"experts": 7, "used": 2}, "layers": 4, "stretched": True, "seed": 323},
    "window": {"window": 9, "layers": 4, "seed": 324},
    "unbiased": {"kv_heads": 1, "layers": 2, "biased": False, "window": 512, "seed": 325},
    "two_experts": {"experts": 2, "tied": True, "layers": 2, "seed": 326},
}
"""`default` turns by the factors of long contexts, `short` and `odd` by those of short ones, the others by none. `window` slides
in every layer, `unbiased` has a window as long as its context. Most have logits of experts near each other."""
