"""transformers' models whose norms take the mean off, filled from a GGUF file's keys and tensors by `hf_archs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers

from tests.oracle.hf_dense import ATTENTION, fused_experts
from tests.oracle.hf_names import renamed

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tests.oracle.hf_archs import Keys, State

_DBRX_NAMES = {
    "model.layers.": "transformer.blocks.",
    "model.embed_tokens.": "transformer.wte.",
    "model.norm.": "transformer.norm_f.",
}
_DBRX_LAYER = {
    "attn_norm.weight": "norm_attn_norm.norm_1.weight",
    "attn_qkv.weight": "norm_attn_norm.attn.Wqkv.weight",
    "attn_output.weight": "norm_attn_norm.attn.out_proj.weight",
    "attn_output_norm.weight": "norm_attn_norm.norm_2.weight",
    "ffn_gate_inp.weight": "ffn.router.layer.weight",
}


class DbrxModel(transformers.DbrxForCausalLM):
    """Its parts by the names that other models have."""

    @property
    def model(self) -> torch.nn.Module:
        """All but the head."""
        return self.transformer

    def load_state_dict(self, state: dict[str, torch.Tensor], **options: Any) -> Any:
        """Take tensors by the usual names."""
        renamed = {}
        for name, values in state.items():
            start = next((usual for usual in _DBRX_NAMES if name.startswith(usual)), "")
            renamed[_DBRX_NAMES.get(start, "") + name.removeprefix(start)] = values
        return super().load_state_dict(renamed, **options)


def _dbrx_config(keys: Keys, common: dict[str, Any]) -> Any:
    rope = common["rope_parameters"]
    return transformers.DbrxConfig(
        d_model=common["hidden_size"],
        n_heads=common["num_attention_heads"],
        n_layers=common["num_hidden_layers"],
        max_seq_len=common["max_position_embeddings"],
        vocab_size=common["vocab_size"],
        attn_config={
            "kv_n_heads": common["num_key_value_heads"],
            "clip_qkv": float(keys("attention.clamp_kqv")),
            "rope_theta": rope["rope_theta"],
        },
        ffn_config={
            "ffn_hidden_size": keys("feed_forward_length"),
            "moe_num_experts": common["num_experts"],
            "moe_top_k": common["num_experts_per_tok"],
            "moe_normalize_expert_weights": 1.0,
        },
        rope_parameters=rope,
        attn_implementation="eager",
        dtype="float32",
    )


def _dbrx_state(keys: Keys, own: State) -> State:
    """Experts lie one after another, and their last matrix has a row per number between."""
    state = {name: own[ours] for ours, name in _DBRX_LAYER.items()}
    for role, name in (("gate", "w1"), ("up", "v1"), ("down", "w2")):
        values = own[f"ffn_{role}_exps.weight"]
        rows = values.transpose(0, 2, 1) if role == "down" else values
        state[f"ffn.experts.mlp.{name}"] = rows.reshape(-1, rows.shape[-1])
    return state


def _phimoe_config(keys: Keys, common: dict[str, Any]) -> Any:
    """Of two lists of factors it gets that which the context chooses as both: 5.23's model takes the short one always."""
    rope, context = common["rope_parameters"], keys("context_length")
    original = keys("rope.scaling.original_context_length")
    if (magnitude := keys("rope.scaling.attn_factor")) is not None:
        which = "long" if context > original else "short"
        factors = keys.values(f"rope_factors_{which}.weight").tolist()
        rope |= {
            "rope_type": "longrope",
            "original_max_position_embeddings": original,
            "short_factor": factors,
            "long_factor": factors,
            "short_mscale": float(magnitude),
            "long_mscale": float(magnitude),
        }
    left_out = ("num_experts", "moe_intermediate_size")
    kept = {name: value for name, value in common.items() if name not in left_out}
    return transformers.PhimoeConfig(
        **kept,
        num_local_experts=common["num_experts"],
        intermediate_size=keys("feed_forward_length"),
        sliding_window=keys("attention.sliding_window") or None,
        router_jitter_noise=0.01,
        attention_bias="blk.0.attn_q.bias" in keys.shapes,
        lm_head_bias="output.bias" in keys.shapes,
    )


def _phimoe_state(keys: Keys, own: State) -> State:
    return renamed(own, ATTENTION | {"ffn_gate_inp.": "mlp.router."}) | fused_experts(own)


CLASSES: dict[str, Any] = {
    "dbrx": DbrxModel,
    "phimoe": "PhimoeForCausalLM",
}
CONFIGS: dict[str, Callable[[Keys, dict[str, Any]], Any]] = {
    "dbrx": _dbrx_config,
    "phimoe": _phimoe_config,
}
STATES: dict[str, Callable[[Keys, State], State]] = {
    "dbrx": _dbrx_state,
    "phimoe": _phimoe_state,
}
