"""Keys and random tensors of toy models of GLM-5.3-Flash's kind, by the GGUF convention.

Layers keep a state or attend to chosen pools of positions, between several residual streams. Counts that only this
architecture has come from `ToyArch.extra`, where `attention.head_count_kv` may say which layers attend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.toy_latent import chooses, deepseek32_indexer, kimi_linear_keys
from tests.support.toy_latent import kimi_linear_layer as mixer_and_experts

if TYPE_CHECKING:
    from tests.support.toy_archs import ToyArch
    from tests.support.toy_parts import Draw

STREAMS = 4
"""llama.cpp opens no other number."""
_DEFAULTS: dict[str, Any] = {
    "attention.indexer.head_count": 16,
    "attention.indexer.key_length": 32,
    "attention.indexer.kpool": 4,
    "hyper_connection.count": STREAMS,
    "kda.gate_lower_bound": -5.0,
}


def glm5_keys(toy: ToyArch) -> dict[str, Any]:
    """Return the architecture's own metadata. A token reads all positions, if a case does not say otherwise."""
    pool = _read(toy, "attention.indexer.kpool")
    own = {
        "attention.value_length": toy.rank,
        "attention.layer_norm_epsilon": 1e-6,
        "attention.indexer.top_k": -(-toy.context // pool) * pool,
        "attention.indexer.kpool_select_tail": True,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "hyper_connection.epsilon": 1e-6,
        "hyper_connection.sinkhorn_iterations": 20,
        "rope.freq_base": None,  # nothing turns
    }
    return kimi_linear_keys(toy) | _DEFAULTS | own


def glm5_layer(toy: ToyArch, draw: Draw, layer: int) -> dict[str, np.ndarray]:
    """Return one layer, which is that of Kimi Linear with what mixes the streams and chooses positions."""
    weights = mixer_and_experts(toy, draw, layer)
    for part in ("attn", "ffn"):
        weights |= {f"hc_{part}_{name}": values for name, values in mixing(toy, draw).items()}
    if "ssm_a" in weights:
        weights["ssm_a"] = weights["ssm_a"].reshape(-1)
        for part in ("q", "k", "v"):
            name = f"ssm_conv1d_{part}.weight"
            weights[name] = weights[name][None]  # as the converter writes it
        if _read(toy, "kda.gate_lower_bound") is not None:
            # Near the bound as well as near none.
            weights["ssm_a"] = -np.exp(draw.vector(toy.heads, spread=0.5))
            weights["ssm_dt.bias"] = draw.vector(toy.heads * toy.state, spread=1.0, mean=-2.5)
    elif chooses(toy, layer):
        heads, dim, pool = (
            _read(toy, f"attention.indexer.{key}") for key in ("head_count", "key_length", "kpool")
        )
        weights |= deepseek32_indexer(toy, draw, heads, dim) | {
            "indexer_compressor_gate.weight": draw.matrix(dim, toy.hidden, gain=1.5),
            "indexer_compressor_ape.weight": draw.vector(pool, dim, spread=1.0),
        }
    return weights


def mixing(toy: ToyArch, draw: Draw) -> dict[str, np.ndarray]:
    """Return what reads one stream of several, spreads over them and mixes them, none of it nearly constant."""
    count = toy.extra.get("hyper_connection.count", STREAMS)
    rows = (2 + count) * count
    return {
        "fn.weight": draw.matrix(rows, count * toy.hidden, gain=1.5),
        "base.weight": draw.vector(rows, spread=0.5),
        "scale.weight": draw.vector(3, spread=0.4, mean=1.0),
    }


def _read(toy: ToyArch, key: str) -> Any:
    return toy.extra.get(key, _DEFAULTS[key])
