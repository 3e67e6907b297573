"""transformers' text model of minimax-m3, filled from a GGUF file's keys and tensors by `hf_archs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import transformers

if TYPE_CHECKING:
    from tests.oracle.hf_archs import Keys, State

_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    **{f"attn_{part}.weight": f"self_attn.{part}_proj.weight" for part in "qkv"},
    **{f"attn_{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"},
    **{
        f"indexer.{part}_{role}.weight": f"self_attn.indexer.{part}_{role}.weight"
        for part in "qk"
        for role in ("proj", "norm")
    },
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_experts.down_proj.weight",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
_JOINED = {
    "": "mlp.gate_up_proj.weight",
    "_shexp": "mlp.shared_experts.gate_up_proj.weight",
    "_exps": "mlp.experts.gate_up_proj",
}


def minimax_m3_config(keys: Keys, common: dict[str, Any]) -> Any:
    """Return the configuration. Limit and slope of the activation are those of the class, as llama.cpp's are fixed."""
    assert keys("expert_weights_norm")  # there it always is so
    assert keys("expert_gating_func") == 2  # sigmoid
    dense, width = keys("leading_dense_block_count", 0), keys("expert_feed_forward_length")
    routed = keys.num_layers - dense
    # transformers multiplies by it and cuts off.
    fraction = (keys("rope.dimension_count") + 0.5) / keys.head_dim
    own = {
        "bos_token_id": None,
        "num_local_experts": keys("expert_count"),
        "intermediate_size": width,
        "dense_intermediate_size": keys("feed_forward_length"),
        "shared_intermediate_size": keys("expert_shared_count") * width,
        "routed_scaling_factor": float(keys("expert_weights_scale")),
        "rotary_dim": keys("rope.dimension_count"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(keys("rope.freq_base")),
            "partial_rotary_factor": fraction,
        },
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * routed,
        "layer_types": ["full_attention"] * dense + ["minimax_m3_sparse"] * routed,
        "index_n_heads": keys("attention.indexer.head_count"),
        "index_head_dim": keys("attention.indexer.key_length"),
        "index_block_size": keys("attention.indexer.block_size"),
        "index_topk_blocks": keys("attention.indexer.top_k"),
        "index_local_blocks": keys("attention.indexer.local_blocks"),
    }
    settings = {
        name: value
        for name, value in common.items()
        if name not in ("num_experts", "moe_intermediate_size")
    }
    return transformers.MiniMaxM3VLTextConfig(**(settings | own))


def minimax_m3_state(keys: Keys, own: State) -> State:
    """Return one layer's weights; gains of norms are stored around zero there."""
    state = {
        _NAMES[name]: values - 1 if name.endswith("norm.weight") else values
        for name, values in own.items()
        if name in _NAMES
    }
    for role, name in _JOINED.items():
        if f"ffn_gate{role}.weight" in own:
            parts = [own[f"ffn_{part}{role}.weight"] for part in ("gate", "up")]
            state[name] = np.concatenate(parts, axis=-2)
    return state
