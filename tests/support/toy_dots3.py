"""Keys and random tensors of toy models of dots3-note's kind, by the GGUF convention.

Full layers are those of DeepSeek-V3.2; layers with a window have `ToyArch.near_kv_heads` heads of `near_head_dim`, and a rank and
values of their own, which `ToyArch.extra` may state. Which layers have a window is in `attention.sliding_window_pattern` there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.support.toy_latent import deepseek2_layer, deepseek32_keys, deepseek32_layer

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from tests.support.toy_archs import ToyArch
    from tests.support.toy_parts import Draw


def _keys(toy: ToyArch) -> dict[str, Any]:
    """Return the architecture's own metadata. A token reads all positions, if a case does not say otherwise."""
    near, windows = _near(toy), _windows(toy)
    return deepseek32_keys(toy) | {
        "attention.head_count": [near.heads if window else toy.heads for window in windows],
        "attention.sliding_window": toy.window or 16,
        "attention.sliding_window_pattern": windows,
        "attention.kv_lora_rank_swa": near.rank,
        "attention.key_length_swa": near.rank + toy.rotary,
        "attention.value_length_swa": near.rank,
        "attention.key_length_mla_swa": near.head_dim,
        "attention.value_length_mla_swa": near.value_dim,
        "attention.indexer.types": [not window for window in windows],
        "rope.freq_base_swa": 500.0,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
    }


def _layer(toy: ToyArch, draw: Draw, layer: int) -> dict[str, np.ndarray]:
    """Return one layer."""
    own = _near(toy) if _windows(toy)[layer] else toy
    weights = (deepseek32_layer if own is toy else deepseek2_layer)(own, draw, layer)
    return weights | {
        "attn_gate.weight": draw.matrix(own.heads, toy.hidden, gain=1.5),
        "attn_k_norm.weight": draw.gain(toy.rotary),
    }


def _near(toy: ToyArch) -> ToyArch:
    """Return the toy with the sizes of layers with a window as everyone's."""
    return replace(
        toy,
        heads=toy.near_kv_heads,
        head_dim=toy.near_head_dim,
        rank=toy.extra.get("attention.kv_lora_rank_swa", 5 * toy.rank // 4),
        value_dim=toy.extra.get("attention.value_length_mla_swa", 3 * toy.value_dim // 2),
    )


def _windows(toy: ToyArch) -> list[bool]:
    given = toy.extra.get("attention.sliding_window_pattern")
    return given or [layer >= 2 and layer % 4 != 1 for layer in range(toy.layers)]


KEYS: dict[str, Callable[[ToyArch], dict[str, Any]]] = {"dots3note": _keys}
LAYERS: dict[str, Callable[[ToyArch, Draw, int], dict[str, np.ndarray]]] = {"dots3note": _layer}
