"""What a toy file of gemma4 contains: keys, tensors of a layer, and rotary factors. Knows no oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.toy_model import byte_vocabulary

if TYPE_CHECKING:
    from tests.support.toy_archs import ToyArch
    from tests.support.toy_parts import Draw

Weights = dict[str, np.ndarray]

NO_EXPERTS = dict.fromkeys(("expert_count", "expert_used_count", "expert_feed_forward_length"))
"""Keys of experts, which a model without them lacks."""
_PERIOD = 3


def is_window(layer: int) -> bool:
    """Two layers with a window, then one without."""
    return layer % _PERIOD != _PERIOD - 1


def gemma4_keys(toy: ToyArch) -> dict[str, Any]:
    layers = range(toy.layers)
    kv_heads = [toy.near_kv_heads if is_window(n) else toy.kv_heads for n in layers]
    return ({} if toy.experts else NO_EXPERTS) | {
        "attention.head_count_kv": kv_heads,
        "attention.key_length_swa": toy.near_head_dim,
        "attention.value_length_swa": toy.near_head_dim,
        "attention.sliding_window": toy.window,
        "attention.sliding_window_pattern": [is_window(n) for n in layers],
        "attention.shared_kv_layers": toy.readers,
        "embedding_length_per_layer_input": toy.layer_embedding,
        "feed_forward_length": [_width(toy, n) for n in layers] if toy.readers else toy.shared,
        "final_logit_softcapping": 10.0,
        "rope.dimension_count": toy.head_dim,
        "rope.dimension_count_swa": toy.near_head_dim,
        "rope.freq_base_swa": 500.0,
    }


def gemma4_top(toy: ToyArch, draw: Draw) -> Weights:
    """A quarter of a head's pairs turn in layers without a window."""
    turning = max(toy.head_dim // 8, 1)
    still = toy.head_dim // 2 - turning
    weights = {"rope_freqs.weight": np.array([1.0] * turning + [1e30] * still, np.float32)}
    if width := toy.layer_embedding:
        total, num_tokens = toy.layers * width, len(byte_vocabulary()[0])
        weights |= {
            "per_layer_token_embd.weight": draw.vector(
                num_tokens, total, spread=float(1 / np.sqrt(width))
            ),
            "per_layer_model_proj.weight": draw.matrix(
                total, toy.hidden, gain=float(np.sqrt(toy.hidden))
            ),
            "per_layer_proj_norm.weight": draw.gain(width),
        }
    return weights


def _width(toy: ToyArch, layer: int) -> int:
    """Of the feed-forward that every token takes."""
    return toy.shared * (2 if layer >= toy.layers - toy.readers else 1)


def gemma4_layer(toy: ToyArch, draw: Draw, layer: int) -> Weights:
    near = is_window(layer)
    head_dim = toy.near_head_dim if near else toy.head_dim
    kv_size = (toy.near_kv_heads if near else toy.kv_heads) * head_dim
    q_size, hidden, experts = toy.heads * head_dim, toy.hidden, toy.experts
    inner, width = (experts, toy.intermediate, hidden), _width(toy, layer)
    weights = {
        # Scores are not divided by the root of the head size, so the gains keep them small.
        "attn_q_norm.weight": draw.gain(head_dim) * np.float32(1 / np.sqrt(head_dim)),
        "attn_k_norm.weight": draw.gain(head_dim),
        **{f"{name}.weight": draw.gain(hidden) for name in _NORMS[: None if experts else -3]},
        "attn_q.weight": draw.matrix(q_size, hidden),
        "attn_k.weight": draw.matrix(kv_size, hidden),
        "attn_output.weight": draw.matrix(hidden, q_size),
        "layer_output_scale.weight": draw.vector(1, spread=0.1, mean=0.8),
        "ffn_gate.weight": draw.matrix(width, hidden),
        "ffn_up.weight": draw.matrix(width, hidden),
        "ffn_down.weight": draw.matrix(hidden, width),
    }
    if toy.layer_embedding:
        weights |= {
            "inp_gate.weight": draw.matrix(toy.layer_embedding, hidden),
            "proj.weight": draw.matrix(hidden, toy.layer_embedding),
            "post_norm.weight": draw.gain(hidden),
        }
    if experts:
        weights |= {
            "ffn_gate_inp.weight": draw.matrix(experts, hidden, gain=2.0 * np.sqrt(hidden)),
            "ffn_gate_inp.scale": draw.gain(hidden),
            "ffn_down_exps.weight": draw.matrix(experts, hidden, toy.intermediate),
            "ffn_down_exps.scale": draw.vector(experts, spread=0.2, mean=1.0),
        }
    if layer >= toy.layers - toy.readers:
        for name in ("attn_k", "attn_k_norm"):
            del weights[f"{name}.weight"]
    elif near or not toy.fused:
        weights["attn_v.weight"] = draw.matrix(kv_size, hidden)
    if not experts:
        return weights
    gate, up = draw.matrix(*inner), draw.matrix(*inner)
    if toy.fused:
        return weights | {"ffn_gate_up_exps.weight": np.concatenate((gate, up), axis=1)}
    return weights | {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}


_NORMS = (
    "attn_norm",
    "post_attention_norm",
    "ffn_norm",
    "post_ffw_norm",
    "post_ffw_norm_1",
    "pre_ffw_norm_2",
    "post_ffw_norm_2",
)
