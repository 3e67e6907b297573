"""Configurations and weights of transformers' models with short convolutions or Mamba2, from a GGUF file's."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import transformers

from tests.oracle.hf_names import renamed

if TYPE_CHECKING:
    import torch

    from tests.oracle.hf_archs import Keys, State

TOP = {
    "lfm2": {"token_embd": "embed_tokens", "token_embd_norm": "embedding_norm"},
    "lfm2moe": {"token_embd": "embed_tokens", "token_embd_norm": "embedding_norm"},
    "nemotron_h": {"token_embd": "embeddings", "output_norm": "norm_f"},
    "nemotron_h_moe": {"token_embd": "embeddings", "output_norm": "norm_f"},
}
"""By architecture, the tensors of no layer whose names are others than usual."""

_LFM2 = {
    "attn_norm.": "operator_norm.",
    "ffn_norm.": "ffn_norm.",
    "attn_q.": "self_attn.q_proj.",
    "attn_k.": "self_attn.k_proj.",
    "attn_v.": "self_attn.v_proj.",
    "attn_output.": "self_attn.out_proj.",
    "attn_q_norm.": "self_attn.q_layernorm.",
    "attn_k_norm.": "self_attn.k_layernorm.",
    "shortconv.in_proj.": "conv.in_proj.",
    "shortconv.out_proj.": "conv.out_proj.",
    "ffn_gate.": "feed_forward.w1.",
    "ffn_up.": "feed_forward.w3.",
    "ffn_down.": "feed_forward.w2.",
    "ffn_gate_inp.": "feed_forward.gate.",
}


_NEMOTRON = {
    "attn_norm.": "norm.",
    "attn_q.": "mixer.q_proj.",
    "attn_k.": "mixer.k_proj.",
    "attn_v.": "mixer.v_proj.",
    "attn_output.": "mixer.o_proj.",
    "ssm_in.": "mixer.in_proj.",
    "ssm_out.": "mixer.out_proj.",
    "ssm_conv1d.bias": "mixer.conv1d.bias",
    "ssm_dt.bias": "mixer.dt_bias",
    "ffn_gate_inp.": "mixer.gate.",
    "ffn_up.": "mixer.up_proj.",
    "ffn_down.": "mixer.down_proj.",
    "ffn_up_shexp.": "mixer.shared_experts.up_proj.",
    "ffn_down_shexp.": "mixer.shared_experts.down_proj.",
    "ffn_up_exps.weight": "mixer.experts.up_proj",
    "ffn_down_exps.weight": "mixer.experts.down_proj",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_latent_down.": "mixer.fc1_latent_proj.",
    "ffn_latent_up.": "mixer.fc2_latent_proj.",
}

_GRANITE = {
    "attn_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
    "attn_q.": "self_attn.q_proj.",
    "attn_k.": "self_attn.k_proj.",
    "attn_v.": "self_attn.v_proj.",
    "attn_output.": "self_attn.o_proj.",
    "ssm_in.": "mamba.in_proj.",
    "ssm_out.": "mamba.out_proj.",
    "ssm_conv1d.bias": "mamba.conv1d.bias",
    "ssm_dt.bias": "mamba.dt_bias",
    "ffn_gate_inp.": "block_sparse_moe.router.",
    "ffn_down_exps.weight": "block_sparse_moe.experts.down_proj",
}


def lfm2_config(keys: Keys, common: dict[str, Any]):
    """Return the configuration. The width of the feed-forward stays what it is."""
    for name in ("head_dim", "hidden_act", "num_experts", "num_experts_per_tok"):
        del common[name]
    del common["moe_intermediate_size"], common["experts_implementation"]
    heads = keys("attention.head_count_kv")
    own = {
        "num_key_value_heads": max(heads),
        "norm_eps": common.pop("rms_norm_eps"),
        "intermediate_size": keys("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": keys("shortconv.l_cache"),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
    }
    return transformers.Lfm2Config(**(common | own))


def lfm2moe_config(keys: Keys, common: dict[str, Any]):
    """Return the configuration."""
    del common["head_dim"], common["hidden_act"]
    heads = keys("attention.head_count_kv")
    own = {
        "num_key_value_heads": max(heads),
        "norm_eps": common.pop("rms_norm_eps"),
        "intermediate_size": keys("feed_forward_length"),
        "num_dense_layers": keys("leading_dense_block_count"),
        "conv_L_cache": keys("shortconv.l_cache"),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
    }
    return transformers.Lfm2MoeConfig(**(common | own))


def lfm2moe_state(keys: Keys, own: State) -> State:
    """Return one layer's weights."""
    state = renamed(own, _LFM2)
    if "shortconv.conv.weight" in own:
        state["conv.conv.weight"] = own["shortconv.conv.weight"][:, None]
    if "exp_probs_b.bias" in own:
        gate, up, down = (own[f"ffn_{role}_exps.weight"] for role in ("gate", "up", "down"))
        state["feed_forward.experts.gate_up_proj"] = np.concatenate((gate, up), axis=1)
        state["feed_forward.experts.down_proj"] = down
        state["feed_forward.expert_bias"] = own["exp_probs_b.bias"]
    return state


def _nemotron_blocks(keys: Keys, common: dict[str, Any], wide: str) -> dict[str, Any]:
    """Return the settings of both kinds. wide: what blocks with a feed-forward are called.

    Steps have no lower limit, which decoded tokens would not have there.
    """
    for name in (
        "num_experts",
        "num_hidden_layers",
        "rope_parameters",
        "hidden_act",
        "rms_norm_eps",
    ):
        del common[name]
    kv_heads, widths = keys("attention.head_count_kv"), keys("feed_forward_length")
    heads = keys("ssm.time_step_rank")
    return common | {
        "num_key_value_heads": max(kv_heads),
        "layers_block_type": [
            wide if width else "full_attention" if count else "linear_attention"
            for count, width in zip(kv_heads, widths, strict=True)
        ],
        "layer_norm_epsilon": float(keys("attention.layer_norm_epsilon")),
        "time_step_min": 1e-9,
        "ssm_state_size": keys("ssm.state_size"),
        "mamba_num_heads": heads,
        "mamba_head_dim": keys("ssm.inner_size") // heads,
        "n_groups": keys("ssm.group_count"),
        "conv_kernel": keys("ssm.conv_kernel"),
    }


def nemotron_h_config(keys: Keys, common: dict[str, Any]):
    """Return the configuration."""
    settings = _nemotron_blocks(keys, common, "mlp")
    for name in ("num_experts_per_tok", "moe_intermediate_size", "experts_implementation"):
        del settings[name]
    config = transformers.NemotronHConfig(**settings)
    config.widths = keys("feed_forward_length")
    return config


def nemotron_h_model(config: Any) -> torch.nn.Module:
    """Return the model, whose blocks with a feed-forward have each its own width."""
    model = transformers.NemotronHForCausalLM(config)
    for block, width in zip(model.model.layers, config.widths, strict=True):
        if width:
            block.mixer = type(block.mixer)(config, width)
    return model


def nemotron_h_moe_config(keys: Keys, common: dict[str, Any]):
    """Return the configuration."""
    common = _nemotron_blocks(keys, common, "moe")
    used, expert_widths = common["num_experts_per_tok"], common["moe_intermediate_size"]
    if isinstance(used, list):
        common |= {"num_experts_per_tok": max(used), "moe_intermediate_size": max(expert_widths)}
    own = {
        "n_routed_experts": keys("expert_count"),
        "moe_shared_expert_intermediate_size": keys("expert_shared_feed_forward_length"),
        "routed_scaling_factor": float(keys("expert_weights_scale")),
        "norm_topk_prob": bool(keys("expert_weights_norm")),
        "n_group": keys("expert_group_count", 1),
        "topk_group": keys("expert_group_used_count", 1),
        "moe_latent_size": keys("moe_latent_size"),
    }
    config = transformers.NemotronHConfig(**(common | own))
    config.puzzle = list(zip(used, expert_widths, strict=True)) if isinstance(used, list) else []
    return config


def nemotron_h_moe_model(config: Any) -> torch.nn.Module:
    """Return the model, with a feed-forward of its own in each block whose experts have another shape."""
    model = transformers.NemotronHForCausalLM(config)
    for index, (used, width) in enumerate(config.puzzle):
        if width:
            own, block = copy.copy(config), model.model.layers[index]
            own.num_experts_per_tok, own.moe_intermediate_size = used, width
            block.mixer = type(block.mixer)(own, index)
    return model


def nemotron_h_moe_state(keys: Keys, own: State) -> State:
    """Return one block's weights."""
    state = renamed(own, _NEMOTRON)
    return state | _mamba_state(own, "mixer.") if "ssm_a" in own else state


def granitehybrid_config(keys: Keys, common: dict[str, Any]):
    """Return the configuration."""
    for name in ("num_experts", "moe_intermediate_size", "head_dim"):
        del common[name]
    kv_heads, heads = keys("attention.head_count_kv"), keys("ssm.time_step_rank")
    width, hidden = keys("ssm.inner_size"), keys("embedding_length")
    own = {
        "num_key_value_heads": max(kv_heads),
        "num_local_experts": keys("expert_count", 0),
        "num_experts_per_tok": keys("expert_used_count", 0),
        "intermediate_size": keys("feed_forward_length"),
        "shared_intermediate_size": keys("expert_shared_feed_forward_length"),
        "attention_multiplier": keys("attention.scale"),
        "embedding_multiplier": keys("embedding_scale"),
        "residual_multiplier": keys("residual_scale"),
        "logits_scaling": keys("logit_scale"),
        "position_embedding_type": "rope" if keys("rope.scaling.finetuned") else None,
        "attention_bias": any(name.endswith("attn_q.bias") for name in keys.shapes),
        "layer_types": ["full_attention" if n else "linear_attention" for n in kv_heads],
        "mamba_n_heads": heads,
        "mamba_n_groups": keys("ssm.group_count"),
        "mamba_d_state": keys("ssm.state_size"),
        "mamba_d_head": width // heads,
        "mamba_d_conv": keys("ssm.conv_kernel"),
        "mamba_expand": width // hidden,
    }
    return transformers.GraniteMoeHybridConfig(**(common | own))


def granitehybrid_state(keys: Keys, own: State) -> State:
    """Return one layer's weights. A head's halves lie one after the other there, and its pairs in the file."""
    own = dict(own)
    for name, values in own.items():
        if name.startswith(("attn_q.", "attn_k.")):
            pairs = values.reshape(-1, keys.head_dim // 2, 2, *values.shape[1:])
            own[name] = pairs.swapaxes(1, 2).reshape(values.shape)
    state = renamed(own, _GRANITE)
    if "ssm_a" in own:
        state |= _mamba_state(own, "mamba.")
    suffix = ""
    if "ffn_gate_inp.weight" in own:
        gate_up = [own[f"ffn_{role}_exps.weight"] for role in ("gate", "up")]
        state["block_sparse_moe.experts.gate_up_proj"] = np.concatenate(gate_up, axis=1)
        suffix = "_shexp"
    gate, up, down = (own[f"ffn_{role}{suffix}.weight"] for role in ("gate", "up", "down"))
    state["shared_mlp.input_linear.weight"] = np.concatenate((gate, up))
    state["shared_mlp.output_linear.weight"] = down
    return state


def _mamba_state(own: State, prefix: str) -> State:
    """Return what of Mamba2 has another shape in the file."""
    return {
        prefix + "A_log": np.log(-own["ssm_a"]).reshape(-1),
        prefix + "D": own["ssm_d"].reshape(-1),
        prefix + "conv1d.weight": own["ssm_conv1d.weight"][:, None],
        prefix + "norm.weight": own["ssm_norm.weight"].reshape(-1),
    }


CLASSES = {
    "granitehybrid": "GraniteMoeHybridForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
    "nemotron_h": nemotron_h_model,
    "nemotron_h_moe": nemotron_h_moe_model,
}
CONFIGS = {
    "granitehybrid": granitehybrid_config,
    "lfm2": lfm2_config,
    "lfm2moe": lfm2moe_config,
    "nemotron_h": nemotron_h_config,
    "nemotron_h_moe": nemotron_h_moe_config,
}
STATES = {
    "granitehybrid": granitehybrid_state,
    "lfm2": lfm2moe_state,
    "lfm2moe": lfm2moe_state,
    "nemotron_h": nemotron_h_moe_state,
    "nemotron_h_moe": nemotron_h_moe_state,
}
