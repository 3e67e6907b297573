"""Keys and random tensors of toy models of DeepSeek-V4's kind, by the GGUF convention.

A token's row is key and value at once, and layers differ by what they read beyond a window of rows: nothing, entries that
an indexer chooses, or all entries. `ToyArch.rank` is that of a group's output, and `extra` has the counts that only this
architecture has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.toy_glm5 import mixing
from tests.support.toy_latent import INDEX_DIM, INDEX_HEADS
from tests.support.toy_model import byte_vocabulary

if TYPE_CHECKING:
    from tests.support.toy_archs import ToyArch
    from tests.support.toy_parts import Draw

OVERLAPPING = 4
"""Tokens of an entry that also holds those before it, and that an indexer chooses."""
_RATIOS = (0, 4, 128)
_DEFAULTS: dict[str, Any] = {
    "attention.indexer.head_count": INDEX_HEADS,
    "attention.indexer.key_length": INDEX_DIM,
    "attention.output_group_count": 2,
    "expert_shared_count": 1,
    "hash_layer_count": 1,
    "hyper_connection.count": 4,
}


def deepseek4_keys(toy: ToyArch) -> dict[str, Any]:
    """Return the architecture's own metadata. A token reads all entries, if a case does not say otherwise."""
    own = {
        "feed_forward_length": None,
        "embedding_length_out": _read(toy, "hyper_connection.count") * toy.hidden,
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": toy.query_rank,
        "attention.sliding_window": toy.window or 8,
        "attention.output_lora_rank": toy.rank,
        # One more, which is that of the block behind the last layer, as in published files.
        "attention.compress_ratios": [*_ratios(toy), 0],
        "attention.compress_rope_freq_base": 160000.0,
        "attention.indexer.top_k": toy.context,
        "rope.dimension_count": toy.rotary,
        "expert_gating_func": 4,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "hyper_connection.epsilon": 1e-6,
        "hyper_connection.sinkhorn_iterations": 20,
        "swiglu_clamp_exp": [0.0] * toy.layers,
        "swiglu_clamp_shexp": [0.0] * toy.layers,
    }
    return _DEFAULTS | own


def deepseek4_top(toy: ToyArch, draw: Draw) -> dict[str, np.ndarray]:
    """Return what sums the streams behind the last layer."""
    count = _read(toy, "hyper_connection.count")
    return {
        "output_hc_fn.weight": draw.matrix(count, count * toy.hidden, gain=1.5),
        "output_hc_base.weight": draw.vector(count, spread=0.5),
        "output_hc_scale.weight": draw.vector(1, spread=0.4, mean=1.0),
    }


def deepseek4_layer(toy: ToyArch, draw: Draw, layer: int) -> dict[str, np.ndarray]:
    """Return one layer."""
    weights = _attention(toy, draw) | _experts(toy, draw, layer)
    for part in ("attn", "ffn"):
        weights |= {f"hc_{part}_{name}": values for name, values in mixing(toy, draw).items()}
    ratio = _ratios(toy)[layer]
    if ratio:
        weights |= _entries(toy, draw, "attn_compressor_", toy.head_dim, ratio)
    if ratio == OVERLAPPING:
        heads, dim = (
            _read(toy, f"attention.indexer.{key}") for key in ("head_count", "key_length")
        )
        weights |= _entries(toy, draw, "indexer_compressor_", dim, ratio) | {
            "indexer.attn_q_b.weight": draw.matrix(heads * dim, toy.query_rank),
            "indexer.proj.weight": draw.matrix(heads, toy.hidden),
        }
    return weights


def _attention(toy: ToyArch, draw: Draw) -> dict[str, np.ndarray]:
    groups = _read(toy, "attention.output_group_count")
    return {
        "attn_norm.weight": draw.gain(toy.hidden),
        "attn_sinks.weight": draw.vector(toy.heads, spread=1.0),
        "attn_q_a.weight": draw.matrix(toy.query_rank, toy.hidden),
        "attn_q_a_norm.weight": draw.gain(toy.query_rank),
        "attn_q_b.weight": draw.matrix(toy.heads * toy.head_dim, toy.query_rank),
        "attn_kv.weight": draw.matrix(toy.head_dim, toy.hidden),
        "attn_kv_a_norm.weight": draw.gain(toy.head_dim),
        # Of each group its rows, for the numbers of its heads alone.
        "attn_output_a.weight": draw.matrix(
            groups * toy.rank, toy.heads * toy.head_dim // groups, gain=1.5
        ),
        "attn_output_b.weight": draw.matrix(toy.hidden, groups * toy.rank),
    }


def _entries(toy: ToyArch, draw: Draw, prefix: str, dim: int, ratio: int) -> dict[str, np.ndarray]:
    """Return what makes one entry of `ratio` tokens; one that overlaps has numbers for the next entry, then its own."""
    width = dim * (2 if ratio == OVERLAPPING else 1)
    return {
        f"{prefix}kv.weight": draw.matrix(width, toy.hidden),
        f"{prefix}gate.weight": draw.matrix(width, toy.hidden, gain=1.5),
        f"{prefix}ape.weight": draw.vector(ratio, width, spread=1.0),
        f"{prefix}norm.weight": draw.gain(dim),
    }


def _experts(toy: ToyArch, draw: Draw, layer: int) -> dict[str, np.ndarray]:
    shared = toy.intermediate * _read(toy, "expert_shared_count")
    weights = {
        "ffn_norm.weight": draw.gain(toy.hidden),
        "ffn_gate_inp.weight": draw.matrix(toy.experts, toy.hidden, gain=2.0),
    }
    for role, suffix, width in (("exps", (toy.experts,), toy.intermediate), ("shexp", (), shared)):
        for part in ("gate", "up"):
            weights[f"ffn_{part}_{role}.weight"] = draw.matrix(*suffix, width, toy.hidden)
        weights[f"ffn_down_{role}.weight"] = draw.matrix(*suffix, toy.hidden, width)
    if layer >= _read(toy, "hash_layer_count"):
        return weights | {"exp_probs_b.bias": draw.vector(toy.experts, spread=0.2)}
    # Which experts a token has, in any order.
    order = np.argsort(draw.vector(len(byte_vocabulary()[0]), toy.experts, spread=1.0), axis=1)
    return weights | {"ffn_gate_tid2eid.weight": order[:, : toy.used].astype(np.int32)}


def _ratios(toy: ToyArch) -> list[int]:
    """Return the tokens of an entry by layer, without what is behind the layers."""
    given = toy.extra.get("attention.compress_ratios")
    return list(given[: toy.layers]) if given else [_RATIOS[n % 3] for n in range(toy.layers)]


def _read(toy: ToyArch, key: str) -> Any:
    return toy.extra.get(key, _DEFAULTS[key])
