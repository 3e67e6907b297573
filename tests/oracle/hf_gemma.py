"""transformers' configuration and weights of gemma4 from a GGUF file's keys and tensors, for `hf_archs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import transformers

if TYPE_CHECKING:
    from tests.oracle.hf_archs import Keys

State = dict[str, np.ndarray]
_NAMES = {
    **{f"attn_{part}.weight": f"self_attn.{part}_proj.weight" for part in ("q", "k", "v")},
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    "layer_output_scale.weight": "layer_scalar",
    **{f"ffn_{role}.weight": f"mlp.{role}_proj.weight" for role in ("gate", "up", "down")},
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
}
LAYER_EMBEDDINGS = {
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
}
"""Tensors of no layer that the small models have."""


def gemma4_config(keys: Keys, common: dict[str, Any]) -> Any:
    windows = keys("attention.sliding_window_pattern")
    kv_heads = np.broadcast_to(keys("attention.head_count_kv"), len(windows)).tolist()
    full = [n for n, is_window in enumerate(windows) if not is_window]
    near = [n for n, is_window in enumerate(windows) if is_window]
    heads = {
        n: {"head_dim": keys("attention.key_length"), "num_key_value_heads": kv_heads[n]}
        for n in full
    }
    widths = np.broadcast_to(keys("feed_forward_length"), len(windows)).tolist()
    own = {
        "num_key_value_heads": kv_heads[near[0]],
        "head_dim": keys("attention.key_length_swa"),
        "per_layer_config": heads,
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] > widths[0],
        "top_k_experts": common["num_experts_per_tok"],
        "enable_moe_block": bool(common["num_experts"]),
        "hidden_size_per_layer_input": keys("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": common["vocab_size"],
        "num_kv_shared_layers": keys("attention.shared_kv_layers"),
        "attention_k_eq_v": f"blk.{full[0]}.attn_v.weight" not in keys.shapes,
        "final_logit_softcapping": float(keys("final_logit_softcapping")),
        "sliding_window": keys("attention.sliding_window"),
        "layer_types": ["sliding_attention" if near else "full_attention" for near in windows],
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": float(keys("rope.freq_base_swa")),
            },
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": float(keys("rope.freq_base")),
            },
        },
    }
    return transformers.Gemma4TextConfig(**(common | own))


def gemma4_state(keys: Keys, own: State) -> State:
    own = dict(own)
    if "ffn_gate_exps.weight" in own:
        parts = [own.pop(f"ffn_{role}_exps.weight") for role in ("gate", "up")]
        own["ffn_gate_up_exps.weight"] = np.concatenate(parts, axis=1)
    state = {_NAMES[name]: values for name, values in own.items()}
    if experts := keys("expert_count", 0):
        # The experts' scales are in ffn_down_exps already.
        state["router.per_expert_scale"] = np.ones(experts, np.float32)
    return state
