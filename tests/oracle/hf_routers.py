"""transformers' own models of architectures that differ by their routers, as `hf_archs` takes them.

Knows each architecture's settings and names. transformers has no class for bailingmoe2: with norms of heads and without
biases, Glm4Moe computes the same. It has none for bailingmoe and deepseek, either: Qwen2Moe computes the same with a gate of
the shared expert that is always one half, and twice as much behind it.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextModel

from tests.oracle.hf_names import ATTENTION, MLP, renamed

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.oracle.hf_archs import Keys

    State = dict[str, np.ndarray]

_ATTENTION = {
    **ATTENTION,
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **MLP,
    **{f"ffn_{role}_shexp.": f"mlp.shared_experts.{role}_proj." for role in ("gate", "up", "down")},
}


class TextModel(torch.nn.Module):
    """The text part of Qwen3-VL with its head, which transformers has only with the part that sees."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        is_dense = isinstance(config, transformers.Qwen3VLTextConfig)
        self.model = (Qwen3VLTextModel if is_dense else Qwen3VLMoeTextModel)(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        """Return transformers' output of the model, with logits."""
        out = self.model(input_ids=input_ids, **options)
        out.logits = self.lm_head(out.last_hidden_state)
        return out


def _afmoe_model(config: Any) -> Any:
    with warnings.catch_warnings():
        # Without shared experts there are matrices of no rows, which are given their first numbers, too.
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        return transformers.AfmoeForCausalLM(config)


def attention_factor(keys: Keys) -> dict[str, Any]:
    """What YaRN multiplies cosines and sines with, where the file says it."""
    factor = keys("rope.scaling.yarn_attn_factor")
    return {} if factor is None else {"attention_factor": float(factor)}


def scaled_rope(keys: Keys) -> dict[str, Any]:
    """The settings of linear and YaRN scaling, where the file has them."""
    kind, rope = keys("rope.scaling.type", "default"), {"rope_theta": keys("rope.freq_base")}
    if kind != "default":
        rope["factor"] = keys("rope.scaling.factor")
    if kind == "yarn":
        rope["original_max_position_embeddings"] = keys("rope.scaling.original_context_length")
        rope |= attention_factor(keys)
    return {"rope_parameters": rope | {"rope_type": kind}}


def _partial(keys: Keys) -> dict[str, Any]:
    """Settings of heads of which a part turns."""
    return {
        "rope_type": "default",
        "rope_theta": keys("rope.freq_base"),
        "partial_rotary_factor": keys("rope.dimension_count", keys.head_dim) / keys.head_dim,
    }


def _grouped(keys: Keys) -> dict[str, Any]:
    """Settings of routers with sigmoid scores, groups and shared experts."""
    return {
        "n_routed_experts": keys("expert_count"),
        "n_shared_experts": keys("expert_shared_count"),
        "n_group": keys("expert_group_count", 1),
        "topk_group": keys("expert_group_used_count", 1),
        "routed_scaling_factor": float(keys("expert_weights_scale")),
        "norm_topk_prob": keys("expert_weights_norm"),
        "first_k_dense_replace": keys("leading_dense_block_count"),
        "intermediate_size": keys("feed_forward_length"),
    }


def _without(common: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in common.items() if name not in names}


def _dense_settings(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Settings of a model without experts."""
    kept = _without(common, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    return kept | {"intermediate_size": keys("feed_forward_length")}


def _glm4moe_config(keys: Keys, common: dict[str, Any]) -> Any:
    own = {
        "rope_parameters": _partial(keys),
        "attention_bias": "blk.0.attn_q.bias" in keys.shapes,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.shapes,
    }
    return transformers.Glm4MoeConfig(**(_without(common, "num_experts") | _grouped(keys) | own))


def _dots1_config(keys: Keys, common: dict[str, Any]) -> Any:
    own = {"sliding_window": None}
    return transformers.Dots1Config(**(_without(common, "num_experts") | _grouped(keys) | own))


def _plain_config(keys: Keys, common: dict[str, Any]) -> Any:
    shared = keys("expert_shared_count") * keys("expert_feed_forward_length")
    own = {
        "intermediate_size": keys("feed_forward_length"),
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": keys("expert_weights_norm", False),
        "mlp_only_layers": list(range(keys("leading_dense_block_count"))),
        "qkv_bias": False,
    }
    return transformers.Qwen2MoeConfig(**(common | own))


def _minimax_config(keys: Keys, common: dict[str, Any]) -> Any:
    own = {
        "intermediate_size": keys("expert_feed_forward_length"),
        "rope_parameters": _partial(keys),
    }
    return transformers.MiniMaxM2Config(**(_without(common, "moe_intermediate_size") | own))


def _qwen3vl_config(keys: Keys, common: dict[str, Any]) -> Any:
    rope = common["rope_parameters"] | {"mrope_section": keys("rope.dimension_sections")[:3]}
    settings = common | {"rope_parameters": rope}
    if keys.arch == "qwen3vl":
        return transformers.Qwen3VLTextConfig(**_dense_settings(keys, settings))
    return transformers.Qwen3VLMoeTextConfig(**settings)


def _ernie_config(keys: Keys, common: dict[str, Any]) -> Any:
    own = {
        "moe_num_experts": keys("expert_count"),
        "moe_k": keys("expert_used_count"),
        "moe_num_shared_experts": keys("expert_shared_count", 0),
        "moe_layer_start_index": keys("leading_dense_block_count"),
        "intermediate_size": keys("feed_forward_length"),
        "use_bias": False,
    }
    return transformers.Ernie4_5_MoeConfig(
        **(_without(common, "num_experts", "num_experts_per_tok") | own)
    )


def _ernie_dense_config(keys: Keys, common: dict[str, Any]) -> Any:
    return transformers.Ernie4_5Config(**_dense_settings(keys, common))


def granite_settings(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of Granite's models, with experts or without."""
    own = {
        "intermediate_size": keys("feed_forward_length"),
        "attention_multiplier": keys("attention.scale"),
        "embedding_multiplier": keys("embedding_scale"),
        "residual_multiplier": keys("residual_scale"),
        "logits_scaling": keys("logit_scale"),
    }
    kept = _without(common, "num_experts", "moe_intermediate_size", "head_dim")
    if not keys("expert_count"):
        return _without(kept, "num_experts_per_tok") | own
    own["num_local_experts"] = keys("expert_count")
    own["shared_intermediate_size"] = keys("expert_shared_feed_forward_length", 0)
    return kept | own


def _granite_config(keys: Keys, common: dict[str, Any]) -> Any:
    settings = granite_settings(keys, common)
    if keys("expert_count"):
        return transformers.GraniteMoeSharedConfig(**settings)
    return transformers.GraniteConfig(**settings)


def _hunyuan_dense_config(keys: Keys, common: dict[str, Any]) -> Any:
    return transformers.HunYuanDenseV1Config(**_dense_settings(keys, common))


def _hunyuan_config(keys: Keys, common: dict[str, Any]) -> Any:
    own = {
        "moe_topk": keys("expert_used_count"),
        "intermediate_size": keys("feed_forward_length"),
    }
    kept = _without(common, "moe_intermediate_size", "num_experts_per_tok")
    return transformers.HunYuanMoEV1Config(**(kept | own))


def _afmoe_config(keys: Keys, common: dict[str, Any]) -> Any:
    own = {
        "intermediate_size": keys("feed_forward_length"),
        "num_dense_layers": keys("leading_dense_block_count"),
        "num_shared_experts": keys("expert_shared_count"),
        "route_scale": float(keys("expert_weights_scale")),
        "sliding_window": keys("attention.sliding_window"),
        "mup_enabled": True,
    }
    return transformers.AfmoeConfig(**(common | own))


def _mixed(keys: Keys) -> list[str]:
    dense = {
        n for n in range(keys("block_count")) if f"blk.{n}.ffn_gate_inp.weight" not in keys.shapes
    }
    return ["dense" if n in dense else "sparse" for n in range(keys("block_count"))]


def _windows(keys: Keys) -> dict[str, Any]:
    window, layers = keys("attention.sliding_window", 0), range(keys("block_count"))
    usual = [bool(window) and (n + 1) % 4 > 0 for n in layers]
    pattern = keys("attention.sliding_window_pattern", usual)
    kinds = ["sliding_attention" if is_window else "full_attention" for is_window in pattern]
    return {"layer_types": kinds, "sliding_window": window or None}


def _exaone_config(keys: Keys, common: dict[str, Any]) -> Any:
    own = {
        "num_shared_experts": keys("expert_shared_count"),
        "routed_scaling_factor": float(keys("expert_weights_scale")),
        "norm_topk_prob": keys("expert_weights_norm"),
        "intermediate_size": keys("feed_forward_length"),
        "mlp_layer_types": _mixed(keys),
        **_windows(keys),
    }
    return transformers.ExaoneMoeConfig(**(common | own))


def _hy_v3_config(keys: Keys, common: dict[str, Any]) -> Any:
    shared = keys("expert_shared_feed_forward_length")
    own = {
        "num_shared_experts": shared // keys("expert_feed_forward_length"),
        "router_scaling_factor": float(keys("expert_weights_scale")),
        "intermediate_size": keys("feed_forward_length"),
        "mlp_layer_types": _mixed(keys),
    }
    return transformers.HYV3Config(**(common | own))


def _mellum_config(keys: Keys, common: dict[str, Any]) -> Any:
    near = {
        "rope_type": "default",
        "rope_theta": keys("rope.freq_base_swa", keys("rope.freq_base")),
    }
    ropes = {"full_attention": scaled_rope(keys)["rope_parameters"], "sliding_attention": near}
    return transformers.MellumConfig(**(common | {"rope_parameters": ropes} | _windows(keys)))


def _llama4_config(keys: Keys, common: dict[str, Any]) -> Any:
    own = {
        "num_local_experts": keys("expert_count"),
        "intermediate_size": keys("expert_feed_forward_length"),
        "intermediate_size_mlp": keys("feed_forward_length"),
        "interleave_moe_layer_step": keys("interleave_moe_layer_step"),
        "use_qk_norm": keys("expert_count") != 128,
        "attention_chunk_size": keys("attention.sliding_window", 8192),
        "floor_scale": keys("attention.temperature_length", 8192),
        "attn_scale": float(keys("attention.temperature_scale", 0.1)),
    }
    kept = _without(common, "num_experts", "moe_intermediate_size")
    return transformers.Llama4TextConfig(**(kept | own))


def _experts(own: State, block: str = "mlp") -> State:
    if "ffn_down_exps.weight" not in own:
        return {}
    gate, up, down = (own[f"ffn_{role}_exps.weight"] for role in ("gate", "up", "down"))
    return {
        f"{block}.experts.gate_up_proj": np.concatenate((gate, up), axis=1),
        f"{block}.experts.down_proj": down,
    }


def usual_state(keys: Keys, own: State) -> State:
    """Return a layer under the names that most of transformers' models have."""
    return renamed(own, _ATTENTION) | _experts(own)


def _bailing_state(keys: Keys, own: State) -> State:
    q_rows = keys("attention.head_count") * keys.head_dim
    kv_rows = keys("attention.head_count_kv") * keys.head_dim
    parts = np.split(own["attn_qkv.weight"], (q_rows, q_rows + kv_rows))
    named = dict(zip(("attn_q.weight", "attn_k.weight", "attn_v.weight"), parts, strict=True))
    return usual_state(keys, own | named)


def _minimax_state(keys: Keys, own: State) -> State:
    names = _ATTENTION | {"exp_probs_b.bias": "mlp.e_score_correction_bias"}
    return renamed(own, names) | _experts(own)


def _ernie_state(keys: Keys, own: State) -> State:
    state = usual_state(keys, own)
    if "exp_probs_b.bias" in own:
        state["mlp.gate.moe_statics.e_score_correction_bias"] = own["exp_probs_b.bias"].reshape(
            1, -1
        )
        del state["mlp.gate.e_score_correction_bias"]
    return state


def _by_halves(keys: Keys, own: State) -> State:
    """q and k with the halves of a head one after the other, which are pairs in the file."""
    own = dict(own)
    for part, heads in (("attn_q", "head_count"), ("attn_k", "head_count_kv")):
        for name in (f"{part}.weight", f"{part}.bias"):
            if name in own:
                shape = own[name].shape
                rows = own[name].reshape(keys(f"attention.{heads}"), -1, 2, *shape[1:])
                own[name] = np.swapaxes(rows, 1, 2).reshape(shape)
    return own


def _plain_state(keys: Keys, own: State) -> State:
    own = _by_halves(keys, own)
    if "ffn_down_shexp.weight" in own:
        own["ffn_down_shexp.weight"] = own["ffn_down_shexp.weight"] * np.float32(2)
        # transformers' class has no factor on the weights of routed experts.
        scale = np.float32(keys("expert_weights_scale"))
        own["ffn_down_exps.weight"] = own["ffn_down_exps.weight"] * scale
    state = {
        name.replace("shared_experts", "shared_expert"): values
        for name, values in usual_state(keys, own).items()
    }
    if "ffn_down_shexp.weight" in own:
        gate = np.zeros((1, keys("embedding_length")), np.float32)
        state["mlp.shared_expert_gate.weight"] = gate
    return state


def granite_state(keys: Keys, own: State) -> State:
    """Return a layer of Granite's models, with experts or without, under transformers' names."""
    own = _by_halves(keys, own)
    if "ffn_gate_inp.weight" not in own:
        roles = ("gate", "up", "down")
        return renamed(own, _ATTENTION | {f"ffn_{n}.": f"mlp.{n}_proj." for n in roles})
    shared = {}
    if "ffn_down_shexp.weight" in own:
        gate, up, down = (own.pop(f"ffn_{role}_shexp.weight") for role in ("gate", "up", "down"))
        shared["shared_mlp.input_linear.weight"] = np.concatenate((gate, up))
        shared["shared_mlp.output_linear.weight"] = down
    names = _ATTENTION | {"ffn_gate_inp.": "block_sparse_moe.router."}
    return renamed(own, names) | _experts(own, "block_sparse_moe") | shared


def _hunyuan_state(keys: Keys, own: State) -> State:
    roles = ("gate", "up", "down")
    names = {
        **_ATTENTION,
        "attn_q_norm.": "self_attn.query_layernorm.",
        "attn_k_norm.": "self_attn.key_layernorm.",
        "ffn_gate_inp.": "mlp.gate.wg.",
        **{f"ffn_{role}_shexp.": f"mlp.shared_mlp.{role}_proj." for role in roles},
    }
    return renamed(own, names) | _experts(own)


def _afmoe_state(keys: Keys, own: State) -> State:
    names = _ATTENTION | {
        "attn_gate.": "self_attn.gate_proj.",
        "ffn_norm.": "pre_mlp_layernorm.",
        "post_ffw_norm.": "post_mlp_layernorm.",
        "ffn_gate_inp.": "mlp.router.gate.",
        "exp_probs_b.bias": "mlp.expert_bias",
    }
    state = renamed(own, names) | _experts(own)
    if "exp_probs_b.bias" in own and not keys("expert_shared_count"):  # of no width there
        hidden = keys("embedding_length")
        for role in ("gate", "up"):
            state[f"mlp.shared_experts.{role}_proj.weight"] = np.zeros((0, hidden), np.float32)
        state["mlp.shared_experts.down_proj.weight"] = np.zeros((hidden, 0), np.float32)
    return state


def _hy_v3_state(keys: Keys, own: State) -> State:
    return renamed(own, _ATTENTION | {"exp_probs_b": "mlp.e_score_correction_bias"}) | _experts(own)


def _llama4_state(keys: Keys, own: State) -> State:
    roles, block = ("gate", "up", "down"), "feed_forward."
    names = {
        **_ATTENTION,
        "ffn_gate_inp.": f"{block}router.",
        **{f"ffn_{role}.": f"{block}{role}_proj." for role in roles},
        **{f"ffn_{role}_shexp.": f"{block}shared_expert.{role}_proj." for role in roles},
    }
    experts = _experts(own, "feed_forward")
    return renamed(own, names) | {n: np.swapaxes(v, 1, 2) for n, v in experts.items()}


CLASSES: dict[str, Callable[[Any], torch.nn.Module]] = {
    "afmoe": _afmoe_model,
    "bailingmoe": transformers.Qwen2MoeForCausalLM,
    "bailingmoe2": transformers.Glm4MoeForCausalLM,
    "deepseek": transformers.Qwen2MoeForCausalLM,
    "dots1": transformers.Dots1ForCausalLM,
    "ernie4_5": transformers.Ernie4_5ForCausalLM,
    "ernie4_5-moe": transformers.Ernie4_5_MoeForCausalLM,
    "exaone-moe": transformers.ExaoneMoeForCausalLM,
    "glm4moe": transformers.Glm4MoeForCausalLM,
    "granite": transformers.GraniteForCausalLM,
    "granitemoe": transformers.GraniteMoeSharedForCausalLM,
    "hunyuan-dense": transformers.HunYuanDenseV1ForCausalLM,
    "hunyuan-moe": transformers.HunYuanMoEV1ForCausalLM,
    "hy_v3": transformers.HYV3ForCausalLM,
    "llama4": transformers.Llama4ForCausalLM,
    "mellum": transformers.MellumForCausalLM,
    "minimax-m2": transformers.MiniMaxM2ForCausalLM,
    "qwen3vl": TextModel,
    "qwen3vlmoe": TextModel,
}
CONFIGS: dict[str, Callable[[Keys, dict[str, Any]], Any]] = {
    "afmoe": _afmoe_config,
    "bailingmoe": _plain_config,
    "bailingmoe2": _glm4moe_config,
    "deepseek": _plain_config,
    "dots1": _dots1_config,
    "ernie4_5": _ernie_dense_config,
    "ernie4_5-moe": _ernie_config,
    "exaone-moe": _exaone_config,
    "glm4moe": _glm4moe_config,
    "granite": _granite_config,
    "granitemoe": _granite_config,
    "hunyuan-dense": _hunyuan_dense_config,
    "hunyuan-moe": _hunyuan_config,
    "hy_v3": _hy_v3_config,
    "llama4": _llama4_config,
    "mellum": _mellum_config,
    "minimax-m2": _minimax_config,
    "qwen3vl": _qwen3vl_config,
    "qwen3vlmoe": _qwen3vl_config,
}
STATES: dict[str, Callable[[Keys, State], State]] = {
    "afmoe": _afmoe_state,
    "bailingmoe": _plain_state,
    "bailingmoe2": _bailing_state,
    "deepseek": _plain_state,
    "dots1": usual_state,
    "ernie4_5": usual_state,
    "ernie4_5-moe": _ernie_state,
    "exaone-moe": usual_state,
    "glm4moe": usual_state,
    "granite": granite_state,
    "granitemoe": granite_state,
    "hunyuan-dense": _hunyuan_state,
    "hunyuan-moe": _hunyuan_state,
    "hy_v3": _hy_v3_state,
    "llama4": _llama4_state,
    "mellum": usual_state,
    "minimax-m2": _minimax_state,
    "qwen3vl": usual_state,
    "qwen3vlmoe": usual_state,
}
