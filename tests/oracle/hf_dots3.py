"""transformers' model of dots3note, filled from a GGUF file's keys and tensors by `hf_archs`.

It multiplies what norms of low ranks give, of which the converter has made gains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers

from tests.oracle.hf_latent import STATES, sparse_settings

if TYPE_CHECKING:
    import torch

    from tests.oracle.hf_archs import Keys, State

_NAMES = {
    "attn_gate.weight": "self_attn.g_proj.weight",
    "attn_k_norm.weight": "self_attn.k_rope_only_layernorm.weight",
}


def dots3_config(keys: Keys, common: dict[str, Any]) -> Any:
    """Return the configuration."""
    windows = keys("attention.sliding_window_pattern")
    heads, turned = keys("attention.head_count"), keys("rope.dimension_count")
    settings = sparse_settings(keys, common)
    for name in ("head_dim", "first_k_dense_replace", "rope_parameters"):
        del settings[name]
    full = [count for count, window in zip(heads, windows, strict=True) if not window]
    near = [count for count, window in zip(heads, windows, strict=True) if window] or full
    key_dim, near_dim = (keys(f"attention.key_length_mla{end}") for end in ("", "_swa"))
    settings |= {
        "num_attention_heads": full[0],
        "num_key_value_heads": full[0],
        "head_dim": key_dim,
        "layer_types": ["sliding_attention" if n else "indexed_attention" for n in windows],
        "sliding_window": keys("attention.sliding_window"),
        "shared_experts_intermediate_size": keys("expert_feed_forward_length"),
        "rope_theta": float(keys("rope.freq_base")),
        "swa_rope_theta": float(keys("rope.freq_base_swa")),
        "swa_num_attention_heads": near[0],
        "swa_num_key_value_heads": near[0],
        "swa_q_lora_rank": keys("attention.q_lora_rank"),
        "swa_kv_lora_rank": keys("attention.kv_lora_rank_swa"),
        "swa_head_dim": near_dim,
        "swa_qk_nope_head_dim": near_dim - turned,
        "swa_v_head_dim": keys("attention.value_length_mla_swa"),
    }
    return transformers.Dots3NoteTextConfig(**settings)


def dots3_model(config: Any) -> torch.nn.Module:
    """Return the model, whose norms' gains have all factors in them."""
    model = transformers.Dots3NoteForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.q_lora_scale = layer.self_attn.kv_lora_scale = 1.0
    return model


def dots3_state(keys: Keys, own: State) -> State:
    """Return one layer's weights."""
    return STATES["glm-dsa"](keys, own) | {theirs: own[ours] for ours, theirs in _NAMES.items()}
