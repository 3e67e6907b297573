"""transformers' model of deepseek4, filled from a GGUF file's keys and tensors by `hf_archs`."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import transformers
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

from tests.oracle.hf_latent import limits_of

if TYPE_CHECKING:
    import torch

    from tests.oracle.hf_archs import Keys, State

_NO_LIMIT = 1e30
_OVERLAPPING = 4
_KINDS = {0: "sliding_attention", _OVERLAPPING: "compressed_sparse_attention"}
_ALL_ENTRIES = "heavily_compressed_attention"
_ENTRIES = {"kv.weight": "kv_proj.weight", "gate.weight": "gate_proj.weight"} | {
    "ape.weight": "position_bias",
    "norm.weight": "kv_norm.weight",
}
_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_sinks.weight": "self_attn.sinks",
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_norm.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight",
    "attn_kv.weight": "self_attn.kv_proj.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_norm.weight",
    "attn_output_a.weight": "self_attn.o_a_proj.weight",
    "attn_output_b.weight": "self_attn.o_b_proj.weight",
    **{
        f"attn_compressor_{ours}": f"self_attn.compressor.{name}" for ours, name in _ENTRIES.items()
    },
    **{
        f"indexer_compressor_{ours}": f"self_attn.compressor.indexer.{name}"
        for ours, name in _ENTRIES.items()
    },
    "indexer.attn_q_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "indexer.proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    **{
        f"hc_{part}_{role}.weight": f"{part}_hc.{role}"
        for part in ("attn", "ffn")
        for role in ("fn", "base", "scale")
    },
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_tid2eid.weight": "mlp.gate.tid2eid",
    **{
        f"ffn_{role}_shexp.weight": f"mlp.shared_experts.{role}_proj.weight"
        for role in ("gate", "up", "down")
    },
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}


def deepseek4_config(keys: Keys, common: dict[str, Any]) -> Any:
    """Return the configuration, and what the file states otherwise: limits by layer, and several shared experts."""
    assert keys("expert_weights_norm")  # there it always is so
    ratios = keys("attention.compress_ratios")[: keys.num_layers]
    (others,) = {ratio for ratio in ratios if ratio not in _KINDS} or {128}
    hashed = keys("hash_layer_count")
    head_dim = keys("attention.key_length")
    # transformers multiplies by it and cuts off.
    fraction = (keys("rope.dimension_count") + 0.5) / head_dim
    main = {
        "rope_type": "default",
        "rope_theta": float(keys("rope.freq_base")),
        "partial_rotary_factor": fraction,
    }
    compress = main | {"rope_theta": float(keys("attention.compress_rope_freq_base"))}
    if keys("rope.scaling.type") == "yarn":
        compress |= {
            "rope_type": "yarn",
            "attention_factor": 1.0,
            "factor": keys("rope.scaling.factor"),
            "original_max_position_embeddings": keys("rope.scaling.original_context_length"),
            "beta_fast": keys("rope.scaling.yarn_beta_fast"),
            "beta_slow": keys("rope.scaling.yarn_beta_slow"),
        }
    own = {
        "n_routed_experts": keys("expert_count"),
        "n_shared_experts": keys("expert_shared_count"),
        "routed_scaling_factor": float(keys("expert_weights_scale")),
        "q_lora_rank": keys("attention.q_lora_rank"),
        "partial_rotary_factor": fraction,
        "rope_parameters": {"main": main, "compress": compress},
        "layer_types": [_KINDS.get(ratio, _ALL_ENTRIES) for ratio in ratios],
        "compress_rates": {_KINDS[_OVERLAPPING]: _OVERLAPPING, _ALL_ENTRIES: others},
        "mlp_layer_types": ["hash_moe" if n < hashed else "moe" for n in range(len(ratios))],
        "hc_mult": keys("hyper_connection.count"),
        "hc_eps": float(keys("hyper_connection.epsilon")),
        "hc_sinkhorn_iters": keys("hyper_connection.sinkhorn_iterations"),
        "sliding_window": keys("attention.sliding_window"),
        "o_groups": keys("attention.output_group_count"),
        "o_lora_rank": keys("attention.output_lora_rank"),
        "index_n_heads": keys("attention.indexer.head_count"),
        "index_head_dim": keys("attention.indexer.key_length"),
        "index_topk": keys("attention.indexer.top_k"),
    }
    settings = {name: value for name, value in common.items() if name != "num_experts"}
    config = transformers.DeepseekV4Config(**(settings | own))
    routed = "swiglu_clamp_exp"
    shared = "swiglu_clamp_shexp" if "swiglu_clamp_shexp" in keys else routed
    config.limits = [limits_of(keys, name) for name in (routed, shared)]
    return config


def deepseek4_model(config: Any) -> torch.nn.Module:
    """Return the model, with limits of each layer, and shared experts side by side in one that is wider."""
    model = transformers.DeepseekV4ForCausalLM(config)
    wide = copy(config)
    wide.moe_intermediate_size = config.n_shared_experts * config.moe_intermediate_size
    for layer, routed, shared in zip(model.model.layers, *config.limits, strict=True):
        layer.mlp.shared_experts = v4.DeepseekV4MLP(wide)
        layer.mlp.experts.limit = routed or _NO_LIMIT
        layer.mlp.shared_experts.limit = shared or _NO_LIMIT
    return model


def deepseek4_state(keys: Keys, own: State) -> State:
    """Return one layer's weights."""
    state = {_NAMES[name]: values for name, values in own.items() if name in _NAMES}
    gate, up = (own[f"ffn_{role}_exps.weight"] for role in ("gate", "up"))
    return state | {"mlp.experts.gate_up_proj": np.concatenate((gate, up), axis=1)}


def deepseek4_top(weights: State) -> State:
    """Return what sums the streams behind the last layer."""
    parts = ("fn", "base", "scale")
    return {f"model.hc_head.hc_{part}": weights[f"output_hc_{part}.weight"] for part in parts}
