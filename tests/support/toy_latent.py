"""Keys and random tensors of toy models with latent attention, by the GGUF convention.

`ToyArch.head_dim` is a head's with what is turned, and `extra` says how a case routes and scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tests.support.toy_archs import ToyArch
    from tests.support.toy_parts import Draw

SHARED_EXPERTS = 2
INDEX_HEADS, INDEX_DIM = 16, 64
"""llama.cpp turns rows of multiples of 64 numbers alone. Of few heads none may speak for some positions, and the oracles break
ties otherwise.
"""


def deepseek2_keys(toy: ToyArch) -> dict[str, Any]:
    """Return the architecture's own metadata."""
    row = {
        "attention.head_count_kv": 1,
        "attention.key_length": toy.rank + toy.rotary,
        "attention.value_length": toy.rank,
        "attention.key_length_mla": toy.head_dim,
        "attention.value_length_mla": toy.value_dim,
    }
    heads = {
        "attention.head_count_kv": toy.heads,
        "attention.key_length": toy.head_dim,
        "attention.value_length": toy.value_dim,
    }
    return (
        (heads if toy.joined else row)
        | {
            "attention.kv_lora_rank": toy.rank,
            "attention.q_lora_rank": toy.query_rank,  # llama.cpp wants the key of models of other than 27 layers
            "rope.dimension_count": toy.rotary,
            "expert_shared_count": SHARED_EXPERTS,
            "leading_dense_block_count": toy.dense,
            "feed_forward_length": 2 * toy.shared,
        }
    )


def deepseek32_keys(toy: ToyArch) -> dict[str, Any]:
    """Return the architecture's own metadata. A token reads all positions, if a case does not say otherwise in `extra`."""
    return deepseek2_keys(toy) | {
        "expert_gating_func": 2,
        "attention.indexer.top_k": toy.context,
        "attention.indexer.head_count": INDEX_HEADS,
        "attention.indexer.key_length": INDEX_DIM,
    }


def deepseek32_layer(toy: ToyArch, draw: Draw, layer: int) -> dict[str, np.ndarray]:
    """Return one layer, with what chooses positions where the case does not say that it takes an earlier choice."""
    own = deepseek2_layer(toy, draw, layer)
    if not chooses(toy, layer):
        return own
    heads = toy.extra.get("attention.indexer.head_count", INDEX_HEADS)
    dim = toy.extra.get("attention.indexer.key_length", INDEX_DIM)
    return own | deepseek32_indexer(toy, draw, heads, dim)


def chooses(toy: ToyArch, layer: int) -> bool:
    """Whether an attending layer chooses positions itself, where others take an earlier layer's choice."""
    kinds = toy.extra.get("attention.indexer.types", [])
    return layer >= len(kinds) or bool(kinds[layer])


def deepseek32_indexer(toy: ToyArch, draw: Draw, heads: int, dim: int) -> dict[str, np.ndarray]:
    """Return what chooses positions: heads of queries, and one of keys."""
    return {
        "indexer.attn_q_b.weight": draw.matrix(heads * dim, toy.query_rank),
        "indexer.attn_k.weight": draw.matrix(dim, toy.hidden),
        "indexer.k_norm.weight": draw.gain(dim),
        "indexer.k_norm.bias": draw.vector(dim, spread=0.2),
        "indexer.proj.weight": draw.matrix(heads, toy.hidden),
    }


def kimi_linear_keys(toy: ToyArch) -> dict[str, Any]:
    """Return the architecture's own metadata. A layer's state has as many heads as its attention."""
    heads = toy.heads if toy.joined else 1
    kv_heads = [heads if _attends(toy, layer) else 0 for layer in range(toy.layers)]
    own = {
        "attention.head_count_kv": kv_heads,
        "attention.key_length": toy.rank + toy.rotary,
        "attention.value_length": toy.hidden // toy.heads,  # says nothing, as in published files
        "attention.key_length_mla": toy.head_dim,
        "attention.value_length_mla": toy.value_dim,
        "attention.q_lora_rank": toy.query_rank or None,
        "expert_gating_func": 2,
        "expert_weights_scale": 2.446,
        "kda.head_dim": toy.state,
        "ssm.conv_kernel": toy.conv_width,
    }
    return deepseek2_keys(toy) | own


def kimi_linear_layer(toy: ToyArch, draw: Draw, layer: int) -> dict[str, np.ndarray]:
    """Return one layer."""
    mixer = _latent(toy, draw) if _attends(toy, layer) else _channel_delta(toy, draw)
    return mixer | _behind(toy, draw, layer)


def bailingmoe3_keys(toy: ToyArch) -> dict[str, Any]:
    """Return the architecture's own metadata. Layers behind the last whole interval attend, too."""
    attends = [int(_attends_in_bailing(toy, layer)) for layer in range(toy.layers)]
    own = {
        "attention.head_count_kv": attends,
        "attention.value_length": toy.state,  # says nothing, as the converter writes it
        "attention.q_lora_rank": toy.query_rank or None,
        "expert_shared_feed_forward_length": SHARED_EXPERTS * toy.intermediate,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "kda.head_dim": toy.state,
        "kda.safe_gate": True,
        "kda.gate_lower_bound": -5.0,
        "ssm.conv_kernel": toy.conv_width,
    }
    return deepseek2_keys(toy) | own


def bailingmoe3_layer(toy: ToyArch, draw: Draw, layer: int) -> dict[str, np.ndarray]:
    """Return one layer. Its gates are one matrix: a number for each of a state's, or for each latent head."""
    if _attends_in_bailing(toy, layer):
        gate = {"attn_gate.weight": draw.matrix(toy.heads, toy.hidden)}
        return _latent(toy, draw) | gate | _behind(toy, draw, layer)
    return _bounded_delta(toy, draw) | _behind(toy, draw, layer)


def _attends_in_bailing(toy: ToyArch, layer: int) -> bool:
    return _attends(toy, layer) or layer >= toy.layers // toy.interval * toy.interval


def _attends(toy: ToyArch, layer: int) -> bool:
    given = toy.extra.get("attention.head_count_kv")
    return bool(given[layer]) if given else (layer + 1) % toy.interval == 0


def _channel_delta(toy: ToyArch, draw: Draw) -> dict[str, np.ndarray]:
    heads, rank = toy.heads, toy.state
    width = heads * toy.state
    weights = {
        "attn_norm.weight": draw.gain(toy.hidden),
        "attn_output.weight": draw.matrix(toy.hidden, width),
        "ssm_beta.weight": draw.matrix(heads, toy.hidden),
        "ssm_a": -np.exp(draw.vector(1, 1, heads, 1, spread=1.0, mean=-1.0)),
        "ssm_dt.bias": draw.vector(width, spread=0.5, mean=-1.0),
        "ssm_norm.weight": draw.gain(toy.state),
    }
    for part in ("q", "k", "v"):
        weights[f"attn_{part}.weight"] = draw.matrix(width, toy.hidden)
        weights[f"ssm_conv1d_{part}.weight"] = draw.vector(width, 1, toy.conv_width, spread=0.5)
    for part in ("f", "g"):
        weights[f"ssm_{part}_a.weight"] = draw.matrix(rank, toy.hidden)
        weights[f"ssm_{part}_b.weight"] = draw.matrix(width, rank)
    return weights


def _bounded_delta(toy: ToyArch, draw: Draw) -> dict[str, np.ndarray]:
    heads, width = toy.heads, toy.heads * toy.state
    weights = {
        "attn_norm.weight": draw.gain(toy.hidden),
        "attn_output.weight": draw.matrix(toy.hidden, width),
        "ssm_beta.weight": draw.matrix(heads, toy.hidden),
        # As the converter leaves it: the exponential of what was learnt, above zero.
        "ssm_a": np.exp(draw.vector(heads, 1, spread=0.5)),
        "ssm_dt.bias": draw.vector(width, spread=1.0, mean=-2.5),
        "ssm_norm.weight": draw.gain(toy.state),
    }
    for part in ("q", "k", "v"):
        weights[f"attn_{part}.weight"] = draw.matrix(width, toy.hidden)
        weights[f"ssm_conv1d_{part}.weight"] = draw.vector(1, width, 1, toy.conv_width, spread=0.5)
    for part in ("f", "g"):
        weights[f"ssm_{part}_a.weight"] = draw.matrix(width, toy.hidden)
    return weights


def deepseek2_layer(toy: ToyArch, draw: Draw, layer: int) -> dict[str, np.ndarray]:
    """Return one layer. biased: the choice of experts is."""
    return _latent(toy, draw) | _behind(toy, draw, layer)


def _behind(toy: ToyArch, draw: Draw, layer: int) -> dict[str, np.ndarray]:
    """Return the norm and the feed-forward behind a layer's mixer."""
    weights = {"ffn_norm.weight": draw.gain(toy.hidden)}
    if layer < toy.dense:
        return weights | _feed_forward(toy, draw, 2 * toy.shared, "")
    experts, width = (toy.experts,), toy.intermediate
    weights |= {
        "ffn_gate_inp.weight": draw.matrix(toy.experts, toy.hidden, gain=2.0),
        "ffn_gate_exps.weight": draw.matrix(*experts, width, toy.hidden),
        "ffn_up_exps.weight": draw.matrix(*experts, width, toy.hidden),
        "ffn_down_exps.weight": draw.matrix(*experts, toy.hidden, width),
    }
    if toy.fused:
        parts = [weights.pop(f"ffn_{role}_exps.weight") for role in ("gate", "up")]
        weights["ffn_gate_up_exps.weight"] = np.concatenate(parts, axis=1)
    if toy.biased:
        weights["exp_probs_b.bias"] = draw.vector(toy.experts, spread=0.2)
    return weights | _feed_forward(toy, draw, SHARED_EXPERTS * width, "_shexp")


def _latent(toy: ToyArch, draw: Draw) -> dict[str, np.ndarray]:
    rows, plain = toy.heads * toy.head_dim, toy.head_dim - toy.rotary
    weights = {
        "attn_norm.weight": draw.gain(toy.hidden),
        "attn_kv_a_mqa.weight": draw.matrix(toy.rank + toy.rotary, toy.hidden),
        "attn_kv_a_norm.weight": draw.gain(toy.rank),
        # Rows and columns are exchanged: each column keeps the power of what it multiplies.
        "attn_k_b.weight": draw.vector(toy.heads, toy.rank, plain, spread=toy.rank**-0.5),
        "attn_v_b.weight": draw.matrix(toy.heads, toy.value_dim, toy.rank),
        "attn_output.weight": draw.matrix(toy.hidden, toy.heads * toy.value_dim),
    }
    if toy.joined:
        keys, values = weights.pop("attn_k_b.weight"), weights.pop("attn_v_b.weight")
        both = np.concatenate((keys.transpose(0, 2, 1), values), axis=1)
        weights["attn_kv_b.weight"] = np.ascontiguousarray(both).reshape(-1, toy.rank)
    if not toy.query_rank:
        return weights | {"attn_q.weight": draw.matrix(rows, toy.hidden)}
    return weights | {
        "attn_q_a.weight": draw.matrix(toy.query_rank, toy.hidden),
        "attn_q_a_norm.weight": draw.gain(toy.query_rank),
        "attn_q_b.weight": draw.matrix(rows, toy.query_rank),
    }


def _feed_forward(toy: ToyArch, draw: Draw, width: int, suffix: str) -> dict[str, np.ndarray]:
    return {
        f"ffn_gate{suffix}.weight": draw.matrix(width, toy.hidden),
        f"ffn_up{suffix}.weight": draw.matrix(width, toy.hidden),
        f"ffn_down{suffix}.weight": draw.matrix(toy.hidden, width),
    }
