"""transformers' models with latent attention, as `hf_archs` fills them from a GGUF file."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import transformers
from torch import nn

from tests.oracle.hf_formulas import limit_layers
from tests.oracle.hf_names import renamed

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tests.oracle.hf_archs import Keys, State

_NAMES = {
    "attn_norm.": "input_layernorm.",
    "attn_q.": "self_attn.q_proj.",
    "attn_q_a.": "self_attn.q_a_proj.",
    "attn_q_a_norm.": "self_attn.q_a_layernorm.",
    "attn_q_b.": "self_attn.q_b_proj.",
    "attn_kv_a_mqa.": "self_attn.kv_a_proj_with_mqa.",
    "attn_kv_a_norm.": "self_attn.kv_a_layernorm.",
    "attn_output.": "self_attn.o_proj.",
    "ffn_norm.": "post_attention_layernorm.",
    "ffn_gate_inp.": "mlp.gate.",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{role}.": f"mlp.{role}_proj." for role in ("gate", "up", "down")},
    "indexer.attn_q_b.": "self_attn.indexer.wq_b.",
    "indexer.attn_k.": "self_attn.indexer.wk.",
    "indexer.k_norm.": "self_attn.indexer.k_norm.",
    "indexer.proj.": "self_attn.indexer.weights_proj.",
    **{f"ffn_{role}_shexp.": f"mlp.shared_experts.{role}_proj." for role in ("gate", "up", "down")},
}


def _settings(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    rope = common["rope_parameters"]
    if keys("rope.scaling.type") == "yarn":
        mscale = keys("rope.scaling.yarn_log_multiplier") / 0.1
        rope = rope | {
            "rope_type": "yarn",
            "factor": keys("rope.scaling.factor"),
            "original_max_position_embeddings": keys("rope.scaling.original_context_length"),
            "beta_fast": keys("rope.scaling.yarn_beta_fast"),
            "beta_slow": keys("rope.scaling.yarn_beta_slow"),
            "mscale": mscale,
            "mscale_all_dim": mscale,
        }
    num_dense, turned = keys("leading_dense_block_count"), keys("rope.dimension_count")
    # Files of old converters state the heads' own sizes where others state a cached row's.
    suffix = "_mla" if "attention.key_length_mla" in keys else ""
    kinds = ["dense"] * num_dense + ["sparse"] * (keys.num_layers - num_dense)
    own = {
        "rope_parameters": rope,
        "head_dim": turned,
        "num_key_value_heads": keys("attention.head_count"),
        "q_lora_rank": keys("attention.q_lora_rank") or None,
        "kv_lora_rank": keys("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": keys(f"attention.key_length{suffix}") - turned,
        "v_head_dim": keys(f"attention.value_length{suffix}"),
        "intermediate_size": keys("feed_forward_length"),
        "n_routed_experts": keys("expert_count"),
        "n_shared_experts": keys("expert_shared_count"),
        "first_k_dense_replace": num_dense,
        "mlp_layer_types": kinds,
        "routed_scaling_factor": float(keys("expert_weights_scale", 1.0)),
        "norm_topk_prob": bool(keys("expert_weights_norm", False)),
        "n_group": keys("expert_group_count", 1),
        "topk_group": keys("expert_group_used_count", 1),
    }
    settings = common | own
    del settings["num_experts"]
    return settings


def _mistral4_config(keys: Keys, common: dict[str, Any]):
    """Queries behind the original context have a factor of their own where the file says so, for that very length."""
    beta = keys("attention.temperature_scale", 0.0)
    assert not beta or keys("attention.temperature_length") == keys(
        "rope.scaling.original_context_length"
    )
    settings = _settings(keys, common)
    turned = settings["qk_rope_head_dim"]
    # transformers multiplies by it and cuts off.
    own = {"partial_rotary_factor": (turned + 0.5) / (settings["qk_nope_head_dim"] + turned)}
    rope = {"original_max_position_embeddings": keys("context_length")}
    rope |= settings["rope_parameters"] | own | {"llama_4_scaling_beta": float(beta)}
    del settings["head_dim"]
    return transformers.Mistral4Config(**(settings | {"rope_parameters": rope}))


def _config(keys: Keys, common: dict[str, Any]):
    """The class depends on the router: V2 knows softmax alone, and GLM's no scaled rotary embedding."""
    settings = _settings(keys, common)
    if keys("expert_gating_func", 1) == 1:
        method = "group_limited_greedy" if settings["n_group"] > 1 else "greedy"
        return transformers.DeepseekV2Config(**settings, topk_method=method)
    if keys("rope.scaling.type") == "yarn" or "expert_group_count" in keys:
        return transformers.DeepseekV3Config(**settings)
    return transformers.Glm4MoeLiteConfig(**settings)


def sparse_settings(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of models whose tokens read chosen positions."""
    return _settings(keys, common) | {
        "index_n_heads": keys("attention.indexer.head_count"),
        "index_head_dim": keys("attention.indexer.key_length"),
        "index_topk": keys("attention.indexer.top_k"),
    }


def _deepseek32_config(keys: Keys, common: dict[str, Any]):
    return transformers.DeepseekV32Config(**sparse_settings(keys, common))


def _glm_dsa_config(keys: Keys, common: dict[str, Any]):
    chooses = keys("attention.indexer.types", [True] * keys.num_layers)
    kinds = ["full" if flag else "shared" for flag in chooses]
    return transformers.GlmMoeDsaConfig(**sparse_settings(keys, common), indexer_types=kinds)


def _kimi_linear_config(keys: Keys, common: dict[str, Any]):
    settings = _settings(keys, common)
    # Its classes know neither rotary embedding nor these names.
    for name in ("rope_parameters", "n_routed_experts", "first_k_dense_replace", "head_dim"):
        del settings[name]
    attends = keys("attention.head_count_kv")
    own = {
        "num_local_experts": keys("expert_count"),
        "layer_types": ["full_attention" if n else "linear_attention" for n in attends],
        "norm_topk_prob": True,
        "linear_head_dim": keys("kda.head_dim"),
        "linear_num_heads": keys("attention.head_count"),
        "linear_conv_kernel_dim": keys("ssm.conv_kernel"),
    }
    return transformers.KimiLinearConfig(**(settings | own))


_KIMI_LINEAR = {
    **{f"attn_{part}.": f"self_attn.{part}_proj." for part in ("k", "v")},
    **{f"ssm_f_{part}.": f"self_attn.forget_gate.f_{part}_proj." for part in ("a", "b")},
    **{f"ssm_g_{part}.": f"self_attn.g_{part}_proj." for part in ("a", "b")},
    "ssm_beta.": "self_attn.b_proj.",
    "ssm_dt.bias": "self_attn.forget_gate.dt_bias",
    "ssm_norm.": "self_attn.o_norm.",
}


def kimi_linear_state(keys: Keys, own: State) -> State:
    """Return one layer's weights."""
    if "ssm_a" not in own:
        return _state(keys, own)
    return (
        _feed_forward(own)
        | renamed(own, _NAMES | _KIMI_LINEAR)
        | {
            "self_attn.conv1d.weight": _joined_convolutions(own),
            "self_attn.forget_gate.A_log": np.log(-own["ssm_a"]).reshape(1, 1, -1, 1),
        }
    )


def _bailingmoe3_config(keys: Keys, common: dict[str, Any]):
    settings = _settings(keys, common)
    del settings["n_routed_experts"]
    attends = keys("attention.head_count_kv")[: keys.num_layers]
    width, count = keys("expert_shared_feed_forward_length"), keys("expert_shared_count")
    assert width in (None, count * keys("expert_feed_forward_length"))
    own = {
        "num_local_experts": keys("expert_count"),
        "layer_types": ["full_attention" if n else "linear_attention" for n in attends],
        "head_dim": keys("kda.head_dim"),
        "short_conv_kernel_size": keys("ssm.conv_kernel"),
        "kda_safe_gate": bool(keys("kda.safe_gate", True)),
        "kda_lower_bound": float(keys("kda.gate_lower_bound")),
        "num_mtp_layers": 0,
    }
    config = transformers.BailingHybridConfig(**(settings | own))
    config.limits = [limits_of(keys, f"swiglu_clamp_{part}") for part in ("exp", "shexp")]
    return config


def limits_of(keys: Keys, name: str) -> list[float]:
    """Return what the file says by layer, or of all layers; zeros are none."""
    found = keys(name, 0.0)
    values = found if isinstance(found, list) else [found] * keys.num_layers
    return [float(value) for value in values][: keys.num_layers]


def _bailingmoe3(config: Any) -> torch.nn.Module:
    """transformers' class, with two matrices of queries, a tied head or limits, where it knows none of these."""
    model = transformers.BailingHybridForCausalLM(config)
    if any(map(any, config.limits)):
        limit_layers(model.model.layers, *config.limits)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    for layer in model.model.layers if config.q_lora_rank else ():
        if layer.block_type == "full_attention":
            mixer = layer.self_attn
            inner, rows = config.q_lora_rank, mixer.q_proj.out_features
            parts = {
                "a_proj": nn.Linear(config.hidden_size, inner, bias=False),
                "a_layernorm": type(mixer.kv_a_layernorm)(inner),
                "b_proj": nn.Linear(inner, rows, bias=False),
            }
            mixer.q_proj = nn.Sequential(OrderedDict(parts))
    return model


_BAILINGMOE3 = _NAMES | {
    **{f"attn_{part}.": f"self_attn.{part}_proj." for part in ("k", "v")},
    "attn_gate.": "self_attn.g_proj.",
    "attn_q_a.": "self_attn.q_proj.a_proj.",
    "attn_q_a_norm.": "self_attn.q_proj.a_layernorm.",
    "attn_q_b.": "self_attn.q_proj.b_proj.",
    "ssm_f_a.": "self_attn.forget_gate.f_proj.",
    "ssm_g_a.": "self_attn.g_proj.",
    "ssm_beta.": "self_attn.b_proj.",
    "ssm_dt.bias": "self_attn.forget_gate.dt_bias",
    "ssm_norm.": "self_attn.o_norm.",
}


def _bailingmoe3_state(keys: Keys, own: State) -> State:
    state = renamed(own, _BAILINGMOE3) | _feed_forward(own)
    if "ssm_a" not in own:
        return state | _joined_up(own)
    return state | {
        "self_attn.conv1d.weight": _joined_convolutions(own),
        "self_attn.forget_gate.A_log": np.log(own["ssm_a"]).reshape(-1),
    }


def _joined_convolutions(own: State) -> np.ndarray:
    parts = (own[f"ssm_conv1d_{part}.weight"] for part in ("q", "k", "v"))
    return np.concatenate([values.reshape(-1, 1, values.shape[-1]) for values in parts])


def _feed_forward(own: State) -> State:
    """Return the routed experts, whose gate and up are one tensor there."""
    state = {}
    if "ffn_gate_exps.weight" in own:
        gate, up = (own[f"ffn_{role}_exps.weight"] for role in ("gate", "up"))
        state["mlp.experts.gate_up_proj"] = np.concatenate((gate, up), axis=1)
    if "ffn_gate_up_exps.weight" in own:
        state["mlp.experts.gate_up_proj"] = own["ffn_gate_up_exps.weight"]
    if "ffn_down_exps.weight" in own:
        state["mlp.experts.down_proj"] = own["ffn_down_exps.weight"]
    return state


def _state(keys: Keys, own: State) -> State:
    return renamed(own, _NAMES) | _feed_forward(own) | _joined_up(own)


def _joined_up(own: State) -> State:
    # One matrix there, as in files of old converters: of each head the rows of its keys, then those of its values.
    if "attn_kv_b.weight" in own:
        return {"self_attn.kv_b_proj.weight": own["attn_kv_b.weight"]}
    keys_up, values_up = own["attn_k_b.weight"].transpose(0, 2, 1), own["attn_v_b.weight"]
    both = np.concatenate((keys_up, values_up), axis=1)
    return {"self_attn.kv_b_proj.weight": both.reshape(-1, both.shape[-1])}


def _model(config: Any) -> torch.nn.Module:
    return getattr(transformers, type(config).__name__.replace("Config", "ForCausalLM"))(config)


CLASSES: dict[str, Callable[[Any], torch.nn.Module]] = {
    "deepseek2": _model,
    "deepseek32": _model,
    "glm-dsa": _model,
    "mistral4": transformers.Mistral4ForCausalLM,
    "kimi-linear": transformers.KimiLinearForCausalLM,
    "bailingmoe3": _bailingmoe3,
}
CONFIGS: dict[str, Callable[[Keys, dict[str, Any]], Any]] = {
    "deepseek2": _config,
    "deepseek32": _deepseek32_config,
    "glm-dsa": _glm_dsa_config,
    "mistral4": _mistral4_config,
    "kimi-linear": _kimi_linear_config,
    "bailingmoe3": _bailingmoe3_config,
}
STATES: dict[str, Callable[[Keys, State], State]] = {
    "deepseek2": _state,
    "deepseek32": _state,
    "glm-dsa": _state,
    "mistral4": _state,
    "kimi-linear": kimi_linear_state,
    "bailingmoe3": _bailingmoe3_state,
}
