"""Names of tensors in a file and in transformers' models."""

from __future__ import annotations

import numpy as np

State = dict[str, np.ndarray]
ATTENTION = {
    "attn_q.": "self_attn.q_proj.",
    "attn_k.": "self_attn.k_proj.",
    "attn_v.": "self_attn.v_proj.",
    "attn_output.": "self_attn.o_proj.",
    "attn_q_norm.": "self_attn.q_norm.",
    "attn_k_norm.": "self_attn.k_norm.",
    "attn_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
    "post_attention_norm.": "post_attention_layernorm.",
    "ffn_gate_inp.": "mlp.gate.",
}
MLP = {f"ffn_{role}.": f"mlp.{role}_proj." for role in ("gate", "up", "down")}


def renamed(own: State, names: dict[str, str]) -> State:
    """Return the tensors whose names begin with one of ours, by their names."""
    return {
        theirs + name.removeprefix(ours): values
        for name, values in own.items()
        for ours, theirs in names.items()
        if name.startswith(ours)
    }
