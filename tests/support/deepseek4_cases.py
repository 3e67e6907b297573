"""Toy models of DeepSeek-V4's kind, as options of `ToyArch`."""

from __future__ import annotations

from typing import Any


def _reads(count: int, *ratios: int, **own: Any) -> dict[str, Any]:
    """A token reads `count` chosen entries. ratios: tokens of an entry by layer, and of the block behind the last."""
    return {
        "attention.indexer.top_k": count,
        "attention.compress_ratios": list(ratios),
        **{f"attention.indexer.{key}": value for key, value in own.items()},
    }


def _limits(*limits: float) -> dict[str, Any]:
    """Limits by layer, of routed experts and of shared ones."""
    return {
        "swiglu_clamp_exp": list(limits),
        "swiglu_clamp_shexp": [1.25 * limit for limit in limits],
    }


_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
_NEAR_BASE = {"attention.compress_rope_freq_base": 700.0, "rope.freq_base": 100.0}
"""Which of the two turns what shows in few tokens, too."""
_ROUGH = {"hyper_connection.sinkhorn_iterations": 3, "hyper_connection.epsilon": 1e-3}
"""Of more steps, and of less in their denominators, one more or less would not show."""
_SHAPE = {"head_dim": 24, "rotary": 8, "query_rank": 48, "window": 8}
_UNEVEN = {
    "hidden": 30,
    "heads": 6,  # three for each group
    "head_dim": 22,
    "rotary": 6,
    "rank": 11,
    "query_rank": 17,
    "experts": 5,
    "used": 3,
    "intermediate": 19,
    "window": 7,
}
_TWO_SHARED = {"expert_shared_count": 2, "hash_layer_count": 2}

DEEPSEEK4_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {
        **_SHAPE,
        "layers": 5,
        "extra": _reads(4, 0, 4, 128, 4, 128, 0) | _limits(*[0.8] * 5) | _YARN,
        "seed": 221,
    },
    "all_entries": {
        **_SHAPE,
        "layers": 4,
        "extra": _reads(512, 128, 4, 0, 4) | _limits(0.5, 0.6, 0.7, 0.0) | _NEAR_BASE,
        "seed": 222,
    },
    "odd": {
        **_UNEVEN,
        "layers": 5,
        "extra": _reads(3, 4, 0, 128, 4, 0, 0, head_count=13, key_length=18)
        | _ROUGH
        | _TWO_SHARED
        | _YARN
        | _NEAR_BASE,
        "seed": 223,
    },
    "odd_groups": {
        **_UNEVEN,
        "layers": 4,
        "extra": _reads(5, 128, 4, 4, 0)
        | _ROUGH
        | _TWO_SHARED
        | {"attention.output_group_count": 3, "swiglu_clamp_exp": 0.7},
        "seed": 224,
    },
    "windows_alone": {
        **_SHAPE,
        "layers": 3,
        "window": 3,
        "extra": _reads(4, 0, 0, 0, 0) | _limits(*[0.9] * 3) | _YARN | {"hash_layer_count": 3},
        "seed": 225,
    },
    "one_expert": {
        **_SHAPE,
        "layers": 3,
        "heads": 2,
        "experts": 1,
        "used": 1,
        "window": 2,
        "extra": _reads(1, 4, 128, 4) | _NEAR_BASE | {"hash_layer_count": 0},
        "seed": 226,
    },
    "whole_heads": {
        **_SHAPE,
        "layers": 2,
        "head_dim": 16,
        "rotary": 16,
        "window": 130,
        "extra": _reads(2, 4, 128) | _YARN | {"attention.output_group_count": 1},
        "seed": 227,
    },
    "two_streams": {
        **_SHAPE,
        "layers": 3,
        "extra": _reads(4, 4, 128, 0) | _ROUGH | {"hyper_connection.count": 2},
        "seed": 228,
    },
}
"""A token reads a window of rows, its own among them, and chosen entries of four tokens or all of 128; `all_entries` all."""

LONG_PROMPT = 300
"""Tokens of which a layer has two entries of 128 and an incomplete one."""

DEEPSEEK4_MIXED: dict[str, Any] = {
    "layers": 3,
    "head_dim": 64,
    "rotary": 32,
    "rank": 128,
    "query_rank": 256,
    "extra": _reads(6, 0, 4, 128) | _limits(*[1.0] * 3),
    "seed": 233,
}
"""For a quantised model. llama.cpp's perplexity is 0.13 to 0.26 % above that of exact arithmetic, of other seeds up to 0.48 %."""
