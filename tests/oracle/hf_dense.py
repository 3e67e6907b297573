"""transformers' own models of architectures whose layers are dense, or Mixtral's, as `hf_archs` takes them.

Knows each architecture's settings and names, and those that most have in common.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import transformers

from tests.oracle.hf_names import ATTENTION, MLP, renamed
from tests.oracle.hf_routers import scaled_rope

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.oracle.hf_archs import Keys

State = dict[str, np.ndarray]


def fused_experts(own: State) -> State:
    """Return routed experts, gate and up in one tensor."""
    gate, up, down = (own[f"ffn_{role}_exps.weight"] for role in ("gate", "up", "down"))
    return {
        "mlp.experts.gate_up_proj": np.concatenate((gate, up), axis=1),
        "mlp.experts.down_proj": down,
    }


def dense_settings(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a model whose layers are dense."""
    return common | scaled_rope(keys) | {"intermediate_size": keys("feed_forward_length")}


def _llama_config(keys: Keys, common: dict[str, Any]):
    own = dense_settings(keys, common)
    if keys("expert_count"):
        return transformers.MixtralConfig(
            **own, num_local_experts=keys("expert_count"), sliding_window=None
        )
    attention, dense = (f"blk.0.{name}.bias" in keys.shapes for name in ("attn_q", "ffn_up"))
    return transformers.LlamaConfig(**own, attention_bias=attention, mlp_bias=dense)


def _llama_state(keys: Keys, own: State) -> State:
    """q and k have the halves of a head one after the other there, and pairs in the file."""
    own = dict(own)
    for name, values in own.items():
        if name.startswith(("attn_q.", "attn_k.")):
            pairs = values.reshape(-1, keys.head_dim // 2, 2, *values.shape[1:])
            own[name] = pairs.swapaxes(1, 2).reshape(values.shape)
    if "attn_q.bias" in own and "attn_output.bias" not in own:
        own["attn_output.bias"] = np.zeros(len(own["attn_output.weight"]), np.float32)
    state = renamed(own, ATTENTION | MLP)
    return state | fused_experts(own) if "ffn_gate_exps.weight" in own else state


def _smollm3_config(keys: Keys, common: dict[str, Any]):
    return transformers.SmolLM3Config(**dense_settings(keys, common))


def _mistral3_config(keys: Keys, common: dict[str, Any]):
    """The multiplier of all dimensions is 1 in files that have one, as that of the factor itself."""
    settings, multiplier = dense_settings(keys, common), keys("rope.scaling.yarn_log_multiplier")
    rope = {"original_max_position_embeddings": keys("context_length")}
    rope |= settings["rope_parameters"]
    rope |= {"llama_4_scaling_beta": float(keys("attention.temperature_scale", 0.0))}
    rope |= {"mscale": 1.0, "mscale_all_dim": multiplier} if multiplier else {}
    return transformers.Ministral3Config(**(settings | {"rope_parameters": rope}))


def _qwen2_config(keys: Keys, common: dict[str, Any]):
    return transformers.Qwen2Config(**dense_settings(keys, common), use_sliding_window=False)


def _qwen2_state(keys: Keys, own: State) -> State:
    """Its q, k and v always have biases there."""
    for part in ("q", "k", "v"):
        rows = len(own[f"attn_{part}.weight"])
        own = {f"attn_{part}.bias": np.zeros(rows, np.float32)} | own
    return renamed(own, ATTENTION | MLP)


def _qwen3_config(keys: Keys, common: dict[str, Any]):
    return transformers.Qwen3Config(**dense_settings(keys, common), use_sliding_window=False)


def _qwen3_state(keys: Keys, own: State) -> State:
    return renamed(own, ATTENTION | MLP)


CLASSES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral3": "Ministral3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
CONFIGS: dict[str, Callable[[Keys, dict[str, Any]], Any]] = {
    "llama": _llama_config,
    "qwen2": _qwen2_config,
    "qwen3": _qwen3_config,
    "mistral3": _mistral3_config,
    "smollm3": _smollm3_config,
}
STATES: dict[str, Callable[[Keys, State], State]] = {
    "llama": _llama_state,
    "qwen2": _qwen2_state,
    "qwen3": _qwen3_state,
    "mistral3": _llama_state,
    "smollm3": _llama_state,
}
