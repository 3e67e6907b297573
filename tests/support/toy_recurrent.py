"""Keys and random tensors of toy models with short convolutions or Mamba2, by the GGUF convention.

`ToyArch.interval` says which layers attend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.toy_gemma import NO_EXPERTS

if TYPE_CHECKING:
    from tests.support.toy_archs import ToyArch
    from tests.support.toy_parts import Draw


def lfm2moe_keys(toy: ToyArch) -> dict[str, Any]:
    """Return the architecture's own metadata."""
    return {
        "attention.head_count_kv": [
            toy.kv_heads if _attends(toy, layer) else 0 for layer in range(toy.layers)
        ],
        "leading_dense_block_count": toy.dense,
        "feed_forward_length": 2 * toy.shared,
        "expert_gating_func": 2,
        "shortconv.l_cache": toy.conv_width,
    }


def lfm2_keys(toy: ToyArch) -> dict[str, Any]:
    """Return the metadata of the same without experts."""
    left_out = dict.fromkeys(("leading_dense_block_count", "expert_gating_func"))
    return lfm2moe_keys(toy) | NO_EXPERTS | left_out | {"feed_forward_length": toy.shared}


def lfm2moe_layer(toy: ToyArch, draw: Draw, layer: int) -> dict[str, np.ndarray]:
    """Return one layer."""
    weights = {"attn_norm.weight": draw.gain(toy.hidden), "ffn_norm.weight": draw.gain(toy.hidden)}
    if _attends(toy, layer):
        weights |= _attention(toy, draw)
        for part in ("q", "k"):
            weights[f"attn_{part}_norm.weight"] = draw.gain(toy.head_dim)
    else:
        weights |= {
            "shortconv.in_proj.weight": draw.matrix(3 * toy.hidden, toy.hidden),
            "shortconv.conv.weight": draw.vector(toy.hidden, toy.conv_width, spread=0.5),
            "shortconv.out_proj.weight": draw.matrix(toy.hidden, toy.hidden),
        }
    if not toy.experts:
        return weights | _feed_forward(toy, draw, (toy.shared,), "")
    if layer < toy.dense:
        return weights | _feed_forward(toy, draw, (2 * toy.shared,), "")
    return {
        **weights,
        "ffn_gate_inp.weight": draw.matrix(toy.experts, toy.hidden, gain=2.0),
        "exp_probs_b.bias": draw.vector(toy.experts, spread=0.2),
        **_feed_forward(toy, draw, (toy.experts, toy.intermediate), "_exps"),
    }


def nemotron_h_moe_keys(toy: ToyArch) -> dict[str, Any]:
    """Return the architecture's own metadata."""
    kinds = [nemotron_kind(toy, layer) for layer in range(toy.layers)]
    widths, used = ([n and n[part] for n in _routed(toy, kinds)] for part in (0, 1))
    return {
        "attention.head_count_kv": [toy.kv_heads if kind == "*" else 0 for kind in kinds],
        "attention.layer_norm_rms_epsilon": None,
        "attention.layer_norm_epsilon": toy.rms_epsilon,
        "feed_forward_length": widths,
        **({"expert_feed_forward_length": widths, "expert_used_count": used} if toy.puzzle else {}),
        "expert_shared_feed_forward_length": toy.shared,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "moe_latent_size": toy.narrow or None,
        "ssm.conv_kernel": toy.conv_width,
        "ssm.state_size": toy.state,
        "ssm.group_count": toy.key_heads,
        "ssm.time_step_rank": toy.value_heads,
        "ssm.inner_size": toy.value_heads * toy.head_dim,
    }


def nemotron_h_keys(toy: ToyArch) -> dict[str, Any]:
    """Return the metadata of the same without experts: what has them has a dense feed-forward."""
    own = nemotron_h_moe_keys(toy)
    kept = {key: value for key, value in own.items() if "expert" not in key}
    widths = [
        dense_width(toy, layer) if width else 0
        for layer, width in enumerate(own["feed_forward_length"])
    ]
    return kept | NO_EXPERTS | {"feed_forward_length": widths}


def dense_width(toy: ToyArch, layer: int) -> int:
    """Return the width of a block's dense feed-forward, which differ in a puzzle."""
    return 2 * toy.shared if toy.puzzle and layer % 5 == 1 else toy.shared


def _routed(toy: ToyArch, kinds: list[str]) -> list[tuple[int, int] | int]:
    """Return by layer the width of its experts, and how many a token uses; 0 without."""
    return [routed_shape(toy, layer) if kind == "E" else 0 for layer, kind in enumerate(kinds)]


def routed_shape(toy: ToyArch, layer: int) -> tuple[int, int]:
    """Return the width of a layer's experts, and how many a token uses."""
    if not toy.puzzle or layer % 5 == 1:
        return toy.intermediate, toy.used
    return 2 * toy.intermediate, toy.used - 1


def nemotron_kind(toy: ToyArch, layer: int) -> str:
    """Return "*" for attention, "E" for experts, "M" for Mamba2: M E M * E M E M * E ..., as the model's own pattern."""
    place = layer % 5
    return "*" if place == 3 else "E" if place in (1, 4) else "M"


def nemotron_h_moe_layer(toy: ToyArch, draw: Draw, layer: int) -> dict[str, np.ndarray]:
    """Return one block."""
    weights = {"attn_norm.weight": draw.gain(toy.hidden)}
    match nemotron_kind(toy, layer):
        case "*":
            return weights | _attention(toy, draw)
        case "M":
            return weights | _mamba(toy, draw, toy.value_heads * toy.head_dim)
    if not toy.experts:
        weights |= _feed_forward(toy, draw, (dense_width(toy, layer),), "")
        return {name: values for name, values in weights.items() if "ffn_gate" not in name}
    weights |= {
        "ffn_gate_inp.weight": draw.matrix(toy.experts, toy.hidden, gain=2.0),
        "exp_probs_b.bias": draw.vector(toy.experts, spread=0.2),
        **_feed_forward(toy, draw, (toy.experts, routed_shape(toy, layer)[0]), "_exps", toy.narrow),
        **_feed_forward(toy, draw, (toy.shared,), "_shexp"),
    }
    if toy.narrow:
        weights["ffn_latent_down.weight"] = draw.matrix(toy.narrow, toy.hidden)
        weights["ffn_latent_up.weight"] = draw.matrix(toy.hidden, toy.narrow)
    return {
        name: values for name, values in weights.items() if "ffn_gate_" not in name or "inp" in name
    }


def granitehybrid_keys(toy: ToyArch) -> dict[str, Any]:
    """Return the architecture's own metadata. Its Mamba2 is twice as wide as the layer."""
    without: dict[str, Any] = {} if toy.experts else dict(NO_EXPERTS)
    return without | {
        "attention.head_count_kv": [
            toy.kv_heads if _attends(toy, layer) else 0 for layer in range(toy.layers)
        ],
        "feed_forward_length": toy.intermediate if toy.experts else toy.shared,
        "expert_feed_forward_length": None,
        "expert_shared_feed_forward_length": toy.shared,
        "rope.scaling.finetuned": False,
        "attention.scale": 0.3,
        "embedding_scale": 2.5,
        "residual_scale": 0.4,
        "logit_scale": 0.75,
        "ssm.conv_kernel": toy.conv_width,
        "ssm.state_size": toy.state,
        "ssm.group_count": toy.key_heads,
        "ssm.time_step_rank": toy.value_heads,
        "ssm.inner_size": 2 * toy.hidden,
    }


def granitehybrid_layer(toy: ToyArch, draw: Draw, layer: int) -> dict[str, np.ndarray]:
    """Return one layer."""
    weights = {"attn_norm.weight": draw.gain(toy.hidden), "ffn_norm.weight": draw.gain(toy.hidden)}
    if _attends(toy, layer):
        weights |= _attention(toy, draw)
    else:
        weights |= _mamba(toy, draw, 2 * toy.hidden)
    if not toy.experts:
        return weights | _feed_forward(toy, draw, (toy.shared,), "")
    weights["ffn_gate_inp.weight"] = draw.matrix(toy.experts, toy.hidden, gain=2.0)
    weights |= _feed_forward(toy, draw, (toy.experts, toy.intermediate), "_exps")
    return weights | _feed_forward(toy, draw, (toy.shared,), "_shexp")


def _mamba(toy: ToyArch, draw: Draw, width: int) -> dict[str, np.ndarray]:
    heads, groups = toy.value_heads, toy.key_heads
    channels = width + 2 * groups * toy.state
    return {
        "ssm_in.weight": draw.matrix(width + channels + heads, toy.hidden),
        "ssm_conv1d.weight": draw.vector(channels, toy.conv_width, spread=0.5),
        "ssm_conv1d.bias": draw.vector(channels, spread=0.3),
        "ssm_dt.bias": draw.vector(heads, spread=0.5, mean=-1.0),
        "ssm_a": -np.exp(draw.vector(heads, 1, spread=1.0, mean=-1.0)),
        "ssm_d": draw.vector(heads, 1, spread=0.3, mean=1.0),
        "ssm_norm.weight": draw.gain(width).reshape(groups, -1),
        "ssm_out.weight": draw.matrix(toy.hidden, width),
    }


def _attends(toy: ToyArch, layer: int) -> bool:
    return (layer + 1) % toy.interval == 0


def _attention(toy: ToyArch, draw: Draw) -> dict[str, np.ndarray]:
    q_size, kv_size = toy.heads * toy.head_dim, toy.kv_heads * toy.head_dim
    return {
        "attn_q.weight": draw.matrix(q_size, toy.hidden),
        "attn_k.weight": draw.matrix(kv_size, toy.hidden),
        "attn_v.weight": draw.matrix(kv_size, toy.hidden),
        "attn_output.weight": draw.matrix(toy.hidden, q_size),
    }


def _feed_forward(
    toy: ToyArch, draw: Draw, rows: tuple[int, ...], suffix: str, outer: int = 0
) -> dict[str, np.ndarray]:
    *stack, width = rows
    outer = outer or toy.hidden
    return {
        f"ffn_gate{suffix}.weight": draw.matrix(*stack, width, outer),
        f"ffn_up{suffix}.weight": draw.matrix(*stack, width, outer),
        f"ffn_down{suffix}.weight": draw.matrix(*stack, outer, width),
    }


KEYS = {
    "granitehybrid": granitehybrid_keys,
    "lfm2": lfm2_keys,
    "lfm2moe": lfm2moe_keys,
    "nemotron_h": nemotron_h_keys,
    "nemotron_h_moe": nemotron_h_moe_keys,
}
LAYERS = {
    "granitehybrid": granitehybrid_layer,
    "lfm2": lfm2moe_layer,
    "lfm2moe": lfm2moe_layer,
    "nemotron_h": nemotron_h_moe_layer,
    "nemotron_h_moe": nemotron_h_moe_layer,
}
