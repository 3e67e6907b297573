"""transformers' own model of each architecture, filled from a GGUF file by the gguf package.

Reads the file without a line of thermocline. Needs `torch` and `transformers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
import transformers

from tests.oracle import (
    hf_deepseek4,
    hf_dense,
    hf_dots3,
    hf_formulas,
    hf_glm5,
    hf_granite,
    hf_hy_v4,
    hf_jamba,
    hf_latent,
    hf_minimax_m3,
    hf_norms,
    hf_recurrent,
    hf_routers,
    hf_streams,
)
from tests.oracle.decoded import decoded_weights
from tests.oracle.hf_dense import dense_settings, fused_experts
from tests.oracle.hf_gemma import LAYER_EMBEDDINGS, gemma4_config, gemma4_state
from tests.oracle.hf_model import HfModel
from tests.oracle.hf_names import ATTENTION, MLP, renamed
from tests.oracle.hf_routers import attention_factor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

State = dict[str, np.ndarray]
_SHARED = {
    "ffn_gate_shexp.": "mlp.shared_expert.gate_proj.",
    "ffn_up_shexp.": "mlp.shared_expert.up_proj.",
    "ffn_down_shexp.": "mlp.shared_expert.down_proj.",
}


_SLOWED = {"step35": "full_attention_inv_freq"}
"""Which pairs the file's factors are of, where not of all layers'."""


class Keys:
    """The metadata of one file under its architecture's prefix."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._path = path
        self.fields = reader.fields
        self.shapes = {tensor.name: tensor.shape[::-1].tolist() for tensor in reader.tensors}
        self.arch = self.fields["general.architecture"].contents()

    def __call__(self, key: str, default: Any = None) -> Any:
        """The value of a key, or the default."""
        found = self.fields.get(f"{self.arch}.{key}")
        return default if found is None else found.contents()

    def values(self, tensor: str) -> np.ndarray:
        """The numbers of a tensor that is a setting."""
        return decoded_weights(self._path)[tensor]

    def __contains__(self, key: str) -> bool:
        """Whether the file has a key."""
        return f"{self.arch}.{key}" in self.fields

    @property
    def num_layers(self) -> int:
        """The trunk's layers."""
        return self("block_count") - self("nextn_predict_layers", 0)

    @property
    def head_dim(self) -> int:
        """The size of a head; files leave it out where it is the usual one."""
        usual = self("embedding_length") // np.max(self("attention.head_count"))
        return self("attention.key_length", int(usual))

    def common(self, *, tied: bool) -> dict[str, Any]:
        """The settings that all configurations have."""
        return {
            "vocab_size": len(self.fields["tokenizer.ggml.tokens"].data),
            "hidden_size": self("embedding_length"),
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self("attention.head_count"),
            "num_key_value_heads": self("attention.head_count_kv"),
            "head_dim": self.head_dim,
            "num_experts": self("expert_count"),
            "num_experts_per_tok": self("expert_used_count"),
            "moe_intermediate_size": self("expert_feed_forward_length"),
            "rms_norm_eps": float(self("attention.layer_norm_rms_epsilon", 0.0)),
            "rope_parameters": {"rope_type": "default", "rope_theta": self("rope.freq_base")},
            "max_position_embeddings": self("context_length"),
            "tie_word_embeddings": tied,
            "hidden_act": "silu",
            "attn_implementation": "eager",
            "experts_implementation": "eager",
            "dtype": "float32",
            "pad_token_id": None,
            "eos_token_id": None,
        }


def open_hf(path: Path) -> HfModel:
    """Return transformers' model of the file."""
    keys, weights = Keys(path), decoded_weights(path)
    tied = "output.weight" not in weights
    config = _CONFIGS[keys.arch](keys, keys.common(tied=tied))
    make: Any = _CLASSES[keys.arch]
    if keys.arch == "llama" and keys("expert_count"):
        make = "MixtralForCausalLM"
    model = getattr(transformers, make)(config) if isinstance(make, str) else make(config)
    # gemma4's configuration says which pairs turn.
    if "rope_freqs.weight" in weights and keys.arch != "gemma4":
        turned = getattr(model.model.rotary_emb, _SLOWED.get(keys.arch, "inv_freq"))
        turned /= torch.from_numpy(weights["rope_freqs.weight"][: len(turned)])
    top = _TOP_NAMES.get(keys.arch, {"token_embd": "embed_tokens", "output_norm": "norm"})
    if keys.arch == "qwen4exp":
        top = hf_streams.top_names(keys)
    elif keys("embedding_length_per_layer_input"):
        top = top | LAYER_EMBEDDINGS
    # The hybrids store the norm's gains around zero, and so do Step and MiniMax-M3.
    zero = 1 if "full_attention_interval" in keys or keys.arch in ("step35", "minimax-m3") else 0
    state = {
        f"model.{theirs}.weight": weights[f"{ours}.weight"] - (zero if "norm" in ours else 0)
        for ours, theirs in top.items()
    }
    if keys.arch in _TOPS:
        state |= _TOPS[keys.arch](weights)
    if not tied:
        state["lm_head.weight"] = weights["output.weight"]
    biases = {"output_norm.bias": "model.norm.bias", "output.bias": "lm_head.bias"}
    state |= {theirs: weights[ours] for ours, theirs in biases.items() if ours in weights}
    for layer in range(config.num_hidden_layers):
        prefix = f"blk.{layer}."
        own = {n.removeprefix(prefix): v for n, v in weights.items() if n.startswith(prefix)}
        for name, values in _STATES[keys.arch](keys, own).items():
            state[f"model.layers.{layer}.{name}"] = values
    tensors = {n: torch.from_numpy(np.ascontiguousarray(v)) for n, v in state.items()}
    return HfModel(model, tensors, tied=tied)


def _row(values: np.ndarray) -> np.ndarray:
    """A matrix of one row, which some writers store as a vector."""
    return values.reshape(1, -1)


def _olmoe_config(keys: Keys, common: dict[str, Any]):
    # Its configuration has no head size of its own: it is hidden / heads, and shapes keep to that.
    own = {"intermediate_size": keys("feed_forward_length"), "norm_topk_prob": False}
    return transformers.OlmoeConfig(**(common | own))


def _olmoe_state(keys: Keys, own: State) -> State:
    return renamed(own, ATTENTION) | fused_experts(own)


def _qwen2moe_config(keys: Keys, common: dict[str, Any]):
    return transformers.Qwen2MoeConfig(
        **common,
        intermediate_size=keys("feed_forward_length"),
        shared_expert_intermediate_size=keys("expert_shared_feed_forward_length"),
        norm_topk_prob=False,
        qkv_bias=any(".attn_q.bias" in name for name in keys.shapes),
    )


def _qwen2moe_state(keys: Keys, own: State) -> State:
    state = renamed(own, ATTENTION | _SHARED) | fused_experts(own)
    return state | {"mlp.shared_expert_gate.weight": _row(own["ffn_gate_inp_shexp.weight"])}


def _hybrid_settings(keys: Keys) -> dict[str, Any]:
    fraction = keys("rope.dimension_count") / keys.head_dim
    interval = keys("full_attention_interval")
    return {
        "shared_expert_intermediate_size": keys("expert_shared_feed_forward_length", 0),
        "linear_conv_kernel_dim": keys("ssm.conv_kernel"),
        "linear_key_head_dim": keys("ssm.state_size"),
        "linear_value_head_dim": keys("ssm.state_size"),
        "linear_num_key_heads": keys("ssm.group_count"),
        "linear_num_value_heads": keys("ssm.time_step_rank"),
        "layer_types": [
            "linear_attention" if (layer + 1) % interval else "full_attention"
            for layer in range(keys.num_layers)
        ],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": keys("rope.freq_base"),
            "partial_rotary_factor": fraction,
        },
    }


def _qwen35moe_config(keys: Keys, common: dict[str, Any]):
    settings = common | _hybrid_settings(keys)
    settings["rope_parameters"]["mrope_section"] = keys("rope.dimension_sections")[:3]
    return transformers.Qwen3_5MoeTextConfig(**settings)


def _qwen35_config(keys: Keys, common: dict[str, Any]):
    settings = dense_settings(keys, common) | _hybrid_settings(keys)
    settings["rope_parameters"]["mrope_section"] = keys("rope.dimension_sections")[:3]
    return transformers.Qwen3_5TextConfig(**settings)


def _qwen3next_config(keys: Keys, common: dict[str, Any]):
    settings = common | _hybrid_settings(keys)
    return transformers.Qwen3NextConfig(
        **settings, intermediate_size=keys("feed_forward_length"), norm_topk_prob=True
    )


def _hybrid_state(keys: Keys, own: State) -> State:
    """The parts that both hybrids have alike: norms are stored around zero there, but for ssm_norm."""
    own = {
        name: values - 1 if name.endswith("norm.weight") and name != "ssm_norm.weight" else values
        for name, values in own.items()
    }
    if "ffn_gate_up_exps.weight" in own:
        both = own.pop("ffn_gate_up_exps.weight")
        own["ffn_gate_exps.weight"], own["ffn_up_exps.weight"] = np.split(both, 2, axis=1)
    names = {
        "ssm_norm.": "linear_attn.norm.",
        "ssm_out.": "linear_attn.out_proj.",
        **ATTENTION,
        **_SHARED,
    }
    if "ffn_gate_inp_shexp.weight" in own:
        state = renamed(own, names) | fused_experts(own)
        state["mlp.shared_expert_gate.weight"] = _row(own["ffn_gate_inp_shexp.weight"])
    else:
        state = renamed(own, names | MLP)
    if "ssm_a" in own:
        state["linear_attn.A_log"] = np.log(-own["ssm_a"])
        state["linear_attn.dt_bias"] = own["ssm_dt.bias"]
        state["linear_attn.conv1d.weight"] = own["ssm_conv1d.weight"][:, None]
    return state


def _qwen35moe_state(keys: Keys, own: State) -> State:
    state = _hybrid_state(keys, own)
    if "ssm_a" not in own:
        return state
    names = ("group_count", "time_step_rank", "state_size")
    groups, heads, size = (keys(f"ssm.{name}") for name in names)
    # Value heads are tiled in the file, and grouped there.
    order = np.arange(heads).reshape(-1, groups).T.reshape(-1)
    rows = (order[:, None] * size + np.arange(size)).reshape(-1)
    channels = np.concatenate((np.arange(2 * groups * size), 2 * groups * size + rows))
    prefix = "linear_attn."
    for name in ("A_log", "dt_bias"):
        state[prefix + name] = state[prefix + name][order]
    state[prefix + "conv1d.weight"] = state[prefix + "conv1d.weight"][channels]
    state[prefix + "out_proj.weight"] = state[prefix + "out_proj.weight"][:, rows]
    return state | {
        prefix + "in_proj_qkv.weight": own["attn_qkv.weight"][channels],
        prefix + "in_proj_z.weight": own["attn_gate.weight"][rows],
        prefix + "in_proj_a.weight": own["ssm_alpha.weight"][order],
        prefix + "in_proj_b.weight": own["ssm_beta.weight"][order],
    }


def _qwen4exp_config(keys: Keys, common: dict[str, Any]):
    return hf_streams.qwen4exp_config(keys, common, _hybrid_settings(keys))


def _qwen4exp_state(keys: Keys, own: State) -> State:
    return hf_streams.qwen4exp_state(keys, own, _qwen35moe_state)


def _qwen3next_state(keys: Keys, own: State) -> State:
    state = _hybrid_state(keys, own)
    if "ssm_a" not in own:
        return state
    groups, size = keys("ssm.group_count"), keys("ssm.state_size")
    width = groups * size
    mixed, z = own["attn_qkv.weight"], own["attn_gate.weight"]
    # One matrix there: of each key head its query, key, values and gates.
    parts = [
        part.reshape(groups, -1, mixed.shape[1])
        for part in (mixed[:width], mixed[width : 2 * width], mixed[2 * width :], z)
    ]
    fused = np.concatenate(parts, axis=1).reshape(-1, mixed.shape[1])
    return state | {
        "linear_attn.in_proj_qkvz.weight": fused,
        "linear_attn.in_proj_ba.weight": own["ssm_ba.weight"],
    }


def _laguna_config(keys: Keys, common: dict[str, Any]):
    heads, num_layers = keys("attention.head_count"), keys("block_count")
    window, num_dense = keys("attention.sliding_window", 0), keys("leading_dense_block_count")
    gates = keys.shapes["blk.0.attn_gate.weight"][0]
    head_dim = keys("attention.key_length")
    full = {
        "rope_type": "yarn",
        "rope_theta": keys("rope.freq_base"),
        "partial_rotary_factor": keys("rope.dimension_count") / head_dim,
        "factor": keys("rope.scaling.factor"),
        "original_max_position_embeddings": keys("rope.scaling.original_context_length"),
        "beta_fast": keys("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys("rope.scaling.yarn_beta_slow"),
    } | attention_factor(keys)
    near = {
        "rope_type": "default",
        "rope_theta": keys("rope.freq_base_swa"),
        "partial_rotary_factor": keys("rope.dimension_count_swa", 0) / head_dim,
    }
    kinds = [
        "sliding_attention" if window and n % 4 else "full_attention" for n in range(num_layers)
    ]
    ropes = {"full_attention": full} | ({"sliding_attention": near} if window else {})
    own = {
        "num_attention_heads": max(heads),
        "num_attention_heads_per_layer": heads,
        "layer_types": kinds,
        "mlp_layer_types": ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense),
        "intermediate_size": keys("feed_forward_length"),
        "shared_expert_intermediate_size": keys("expert_shared_feed_forward_length"),
        "moe_routed_scaling_factor": float(keys("expert_weights_scale")),
        "gating": "per-head" if gates == heads[0] else "per-element",
        "sliding_window": window,
        "rope_parameters": ropes,
    }
    return transformers.LagunaConfig(**(common | own))


def _laguna_state(keys: Keys, own: State) -> State:
    shared = {
        ours: name.replace("shared_expert", "shared_experts") for ours, name in _SHARED.items()
    }
    dense = {f"ffn_{role}.": f"mlp.{role}_proj." for role in ("gate", "up", "down")}
    state = renamed(own, {"attn_gate.": "self_attn.g_proj.", **ATTENTION, **shared, **dense})
    if "exp_probs_b.bias" in own:
        state |= fused_experts(own)
        state["mlp.gate.e_score_correction_bias"] = own["exp_probs_b.bias"]
    return state


_CLASSES: dict[str, str | Callable[[Any], torch.nn.Module]] = {
    "deepseek4": hf_deepseek4.deepseek4_model,
    "gemma4": "Gemma4ForCausalLM",
    "glm5-next": hf_glm5.glm5_model,
    "hy_v4": hf_hy_v4.hy_v4_model,
    "jamba": "JambaForCausalLM",
    "dots3note": hf_dots3.dots3_model,
    "laguna": "LagunaForCausalLM",
    "minimax-m3": "MiniMaxM3VLForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "qwen4exp": hf_streams.qwen4exp_model,
    "qwen3next": "Qwen3NextForCausalLM",
    **hf_dense.CLASSES,
    **hf_routers.CLASSES,
    **hf_formulas.CLASSES,
    **hf_granite.CLASSES,
    **hf_latent.CLASSES,
    **hf_norms.CLASSES,
    **hf_recurrent.CLASSES,
}
_TOP_NAMES = hf_recurrent.TOP | {"jamba": hf_jamba.TOP}
_TOPS = {"deepseek4": hf_deepseek4.deepseek4_top, "hy_v4": hf_hy_v4.hy_v4_top}
_CONFIGS: dict[str, Callable[[Keys, dict[str, Any]], Any]] = {
    "deepseek4": hf_deepseek4.deepseek4_config,
    "gemma4": gemma4_config,
    "glm5-next": hf_glm5.glm5_config,
    "hy_v4": hf_hy_v4.hy_v4_config,
    "jamba": hf_jamba.jamba_config,
    "dots3note": hf_dots3.dots3_config,
    "laguna": _laguna_config,
    "minimax-m3": hf_minimax_m3.minimax_m3_config,
    "olmoe": _olmoe_config,
    "qwen2moe": _qwen2moe_config,
    "qwen35": _qwen35_config,
    "qwen35moe": _qwen35moe_config,
    "qwen4exp": _qwen4exp_config,
    "qwen3next": _qwen3next_config,
    **hf_dense.CONFIGS,
    **hf_routers.CONFIGS,
    **hf_formulas.CONFIGS,
    **hf_granite.CONFIGS,
    **hf_latent.CONFIGS,
    **hf_norms.CONFIGS,
    **hf_recurrent.CONFIGS,
}
_STATES: dict[str, Callable[[Keys, State], State]] = {
    "deepseek4": hf_deepseek4.deepseek4_state,
    "gemma4": gemma4_state,
    "glm5-next": hf_glm5.glm5_state,
    "hy_v4": hf_hy_v4.hy_v4_state,
    "jamba": hf_jamba.jamba_state,
    "dots3note": hf_dots3.dots3_state,
    "laguna": _laguna_state,
    "minimax-m3": hf_minimax_m3.minimax_m3_state,
    "olmoe": _olmoe_state,
    "qwen2moe": _qwen2moe_state,
    "qwen35": _qwen35moe_state,
    "qwen35moe": _qwen35moe_state,
    "qwen4exp": _qwen4exp_state,
    "qwen3next": _qwen3next_state,
    **hf_dense.STATES,
    **hf_routers.STATES,
    **hf_formulas.STATES,
    **hf_granite.STATES,
    **hf_latent.STATES,
    **hf_norms.STATES,
    **hf_recurrent.STATES,
}
