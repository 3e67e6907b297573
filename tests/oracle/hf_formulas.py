"""transformers' own models of architectures that differ by the formula of their layers, as `hf_archs` takes them.

Knows each architecture's settings and names. transformers has no class for maple and smallthinker.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers.models.mellum import modeling_mellum as mellum
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

from tests.oracle.hf_routers import scaled_rope, usual_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.oracle.hf_archs import Keys

    State = dict[str, np.ndarray]

_NAMES = {
    "attn_q.": "self_attn.q_proj.",
    "attn_k.": "self_attn.k_proj.",
    "attn_v.": "self_attn.v_proj.",
    "attn_output.": "self_attn.o_proj.",
    "attn_sinks.weight": "self_attn.sinks",
    "attn_norm.": "input_layernorm.",
    "post_attention_norm.": "post_attention_layernorm.",
    "ffn_gate_inp.": "mlp.router.",
}


def _oss_config(keys: Keys, common: dict[str, Any]) -> Any:
    own = {
        "num_local_experts": keys("expert_count"),
        "intermediate_size": keys("expert_feed_forward_length"),
        "sliding_window": keys("attention.sliding_window"),
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": keys("rope.freq_base"),
            "factor": keys("rope.scaling.factor"),
            "original_max_position_embeddings": keys("rope.scaling.original_context_length"),
            "beta_fast": keys("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys("rope.scaling.yarn_beta_slow", 1.0),
            "truncate": False,
        },
    }
    left_out = ("num_experts", "moe_intermediate_size")
    shared = {name: value for name, value in common.items() if name not in left_out}
    return transformers.GptOssConfig(**(shared | own))


def _oss_state(keys: Keys, own: State) -> State:
    state = {
        theirs + name.removeprefix(ours): values
        for ours, theirs in _NAMES.items()
        for name, values in own.items()
        if name.startswith(ours)
    }
    # Gate and up in turns there, and matrices the other way round.
    gate, up, down = (own[f"ffn_{role}_exps.weight"] for role in ("gate", "up", "down"))
    both = np.stack((gate, up), axis=2).reshape(len(gate), -1, gate.shape[2])
    biases = [own[f"ffn_{role}_exps.bias"] for role in ("gate", "up")]
    return state | {
        "mlp.experts.gate_up_proj": both.transpose(0, 2, 1),
        "mlp.experts.down_proj": down.transpose(0, 2, 1),
        "mlp.experts.gate_up_proj_bias": np.stack(biases, axis=2).reshape(len(gate), -1),
        "mlp.experts.down_proj_bias": own["ffn_down_exps.bias"],
    }


def _cohere_config(keys: Keys, common: dict[str, Any]) -> Any:
    layers = range(keys("block_count"))
    pattern = keys("attention.sliding_window_pattern", [n % 4 > 0 for n in layers])
    dense = keys("leading_dense_block_count")
    epsilon = keys("attention.layer_norm_rms_epsilon")
    own = {
        "intermediate_size": keys("expert_feed_forward_length"),
        "prefix_dense_intermediate_size": keys("feed_forward_length"),
        "num_shared_experts": keys("expert_shared_count", 0),
        "expert_selection_fn": {1: "softmax", 2: "sigmoid"}[keys("expert_gating_func", 2)],
        "norm_topk_prob": keys("expert_weights_norm", False),
        "layer_types": ["sliding_attention" if near else "full_attention" for near in pattern],
        "mlp_layer_types": ["dense" if n < dense else "sparse" for n in layers],
        "sliding_window": keys("attention.sliding_window"),
        "logit_scale": float(keys("logit_scale")),
        "rms_norm_eps": None if epsilon is None else float(epsilon),
        "layer_norm_eps": float(keys("attention.layer_norm_epsilon", 1.0)),
    }
    if shared := keys("expert_shared_feed_forward_length", 0):
        assert shared == own["num_shared_experts"] * own["intermediate_size"]
    return transformers.Cohere2MoeConfig(**(common | own))


class LimitedExperts(torch.nn.Module):
    """Experts with a limit, in place of transformers' own. before: of the gate before its SiLU, else of what that gives."""

    def __init__(self, own: torch.nn.Module, limit: float, *, before: bool) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = own.gate_up_proj, own.down_proj
        self.limit, self.before = limit or float("inf"), before

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return what the chosen experts of each row give, weighed."""
        out = torch.zeros_like(x)
        for expert in range(len(self.down_proj)):
            rows, slots = torch.where(chosen == expert)
            gate, up = torch.nn.functional.linear(x[rows], self.gate_up_proj[expert]).chunk(2, -1)
            if self.before:
                gate = gate.clamp(max=self.limit)
            gate = torch.nn.functional.silu(gate).clamp(max=self.limit)
            inner = gate * up.clamp(-self.limit, self.limit)
            part = torch.nn.functional.linear(inner, self.down_proj[expert])
            out.index_add_(0, rows, part * weights[rows, slots, None])
        return out


class LimitedMlp(torch.nn.Module):
    """A feed-forward with a limit of what SiLU gives, and of the up values, in place of transformers' own."""

    def __init__(self, own: torch.nn.Module, limit: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = own.gate_proj, own.up_proj, own.down_proj
        self.limit = limit or float("inf")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what it gives for each row."""
        gate = torch.nn.functional.silu(self.gate_proj(x)).clamp(max=self.limit)
        return self.down_proj(gate * self.up_proj(x).clamp(-self.limit, self.limit))


def limit_layers(layers: Any, routed: list[float], shared: list[float]) -> None:
    """Give layers of transformers' limits by layer, of routed experts, and of shared ones and dense layers."""
    for layer, limit, other in zip(layers, routed, shared, strict=True):
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = LimitedExperts(layer.mlp.experts, limit, before=False)
            layer.mlp.shared_experts = LimitedMlp(layer.mlp.shared_experts, other)
        else:
            layer.mlp = LimitedMlp(layer.mlp, other)


def maple_model(config: Any) -> Any:
    """Return Mellum's model with what Maple has besides: limits, and heads that do not turn where all tokens are seen."""
    model = transformers.MellumForCausalLM(config)
    model.model.rotary_emb.full_attention_inv_freq.zero_()
    for layer, limit in zip(model.model.layers, config.expert_limits, strict=True):
        layer.mlp.experts = LimitedExperts(layer.mlp.experts, limit, before=True)
    return model


def _maple_config(keys: Keys, common: dict[str, Any]) -> Any:
    near = scaled_rope(keys)["rope_parameters"]
    near["rope_theta"] = keys("rope.freq_base_swa", near["rope_theta"])
    full = {"rope_type": "default", "rope_theta": 1.0}
    pattern = keys("attention.sliding_window_pattern")
    own = {
        "rope_parameters": {"full_attention": full, "sliding_attention": near},
        "layer_types": [
            "sliding_attention" if is_near else "full_attention" for is_near in pattern
        ],
        "sliding_window": keys("attention.sliding_window"),
    }
    config = transformers.MellumConfig(**(common | own))
    config.expert_limits = keys("swiglu_clamp_exp")
    return config


class EarlyRouted(torch.nn.Module):
    """Mellum's experts, whose choice the layer's input decides, in place of a layer's feed-forward."""

    def __init__(self, config: Any, layer: torch.nn.Module) -> None:
        super().__init__()
        self.experts = mellum.MellumExperts(config)
        self.gate = torch.nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self._score = torch.sigmoid if config.gates_by_sigmoid else partial(torch.softmax, dim=-1)
        self._num_chosen = config.num_experts_per_tok
        self._given = torch.empty(0)
        layer.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, layer: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._given = args[0] if args else kwargs["hidden_states"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the chosen experts of each row give, weighed."""
        scores = self._score(self.gate(self._given).flatten(0, 1))
        weights, chosen = scores.topk(self._num_chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        return self.experts(x.flatten(0, 1), chosen, weights).view_as(x)


def thinker_model(config: Any) -> Any:
    """Return SmolLM3's model with experts of SmallThinker's kind."""
    model = transformers.SmolLM3ForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp = EarlyRouted(config, layer)
    return model


def thinker_config(settings: dict[str, Any], *, window: int, gates_by_sigmoid: bool) -> Any:
    """Return the configuration for `thinker_model`. window: 0 for none."""
    near = [bool(window and layer % 4) for layer in range(settings["num_hidden_layers"])]
    own = {
        "no_rope_layers": [int(is_near or not window) for is_near in near],
        "layer_types": ["sliding_attention" if is_near else "full_attention" for is_near in near],
        "use_sliding_window": bool(window),
        "sliding_window": window or None,
        "intermediate_size": 1,
        "hidden_act": "relu",
        "bos_token_id": None,
    }
    config = transformers.SmolLM3Config(**(settings | own))
    config.gates_by_sigmoid = gates_by_sigmoid
    return config


def _thinker_config(keys: Keys, common: dict[str, Any]) -> Any:
    window = keys("attention.sliding_window", 0)
    settings = common | scaled_rope(keys)
    return thinker_config(settings, window=window, gates_by_sigmoid=keys("expert_gating_func") == 2)


class StepModel(torch.nn.Module):
    """The text part of Step-3.7 with its head, which transformers has only with the part that sees."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.model = config, Step3p7TextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def save_pretrained(self, folder: Path) -> None:
        """Write configuration and tensors as they are named here."""
        self.config.save_pretrained(folder)
        tensors = {name: values.contiguous() for name, values in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        """Return transformers' output of the model, with logits."""
        out = self.model(input_ids=input_ids, **options)
        out.logits = self.lm_head(out.last_hidden_state)
        return out


def _step_config(keys: Keys, common: dict[str, Any]) -> Any:
    layers, dense = range(keys.num_layers), keys("leading_dense_block_count")
    pattern, heads = keys("attention.sliding_window_pattern"), keys("attention.head_count")
    full = {"rope_theta": keys("rope.freq_base"), "partial_rotary_factor": 0.5}
    near = {"rope_theta": keys("rope.freq_base_swa"), "partial_rotary_factor": 1.0}
    ropes = {"full_attention": full, "sliding_attention": near}
    own = {
        "num_attention_heads": heads[pattern.index(False)],
        "num_sliding_attention_heads": heads[pattern.index(True)],
        "num_key_value_heads": keys("attention.head_count_kv")[0],
        "layer_types": [
            "sliding_attention" if is_near else "full_attention" for is_near in pattern
        ],
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in layers],
        "sliding_window": keys("attention.sliding_window"),
        "rope_parameters": {n: {"rope_type": "default"} | rope for n, rope in ropes.items()},
        "intermediate_size": keys("feed_forward_length"),
        "n_routed_experts": keys("expert_count"),
        "pad_token_id": 0,
        "share_expert_dim": keys("expert_shared_feed_forward_length"),
        "moe_router_scaling_factor": float(keys("expert_weights_scale")),
        "swiglu_limits": [float(each) for each in keys("swiglu_clamp_exp")],
        "swiglu_limits_shared": [float(each) for each in keys("swiglu_clamp_shexp")],
    }
    kept = {name: value for name, value in common.items() if name != "num_experts"}
    return Step3p7TextConfig(**(kept | own))


def _step_state(keys: Keys, own: State) -> State:
    """Norms are stored around zero there."""
    own = {n: v - 1 if n.endswith("norm.weight") else v for n, v in own.items()}
    return usual_state(keys, own) | {"self_attn.g_proj.weight": own["attn_gate.weight"]}


def _mimo_config(keys: Keys, common: dict[str, Any]) -> Any:
    near = [bool(n) for n in keys("attention.sliding_window_pattern")][: keys.num_layers]
    kv_heads = keys("attention.head_count_kv")[: keys.num_layers]
    far_heads = {count for count, is_near in zip(kv_heads, near, strict=True) if not is_near}
    near_heads = {count for count, is_near in zip(kv_heads, near, strict=True) if is_near}
    (count,) = far_heads
    assert near_heads <= {2 * count}, "its layers with a window have twice as many"
    fraction = keys("rope.dimension_count") / keys.head_dim
    routed = [f"blk.{n}.ffn_gate_inp.weight" in keys.shapes for n in range(keys.num_layers)]
    own = {
        "num_key_value_heads": count,
        "intermediate_size": keys("feed_forward_length"),
        "n_routed_experts": keys("expert_count"),
        "norm_topk_prob": True,
        "v_head_dim": keys("attention.value_length"),
        "sliding_window": keys("attention.sliding_window"),
        "layer_types": ["sliding_attention" if is_near else "full_attention" for is_near in near],
        "mlp_layer_types": ["sparse" if is_routed else "dense" for is_routed in routed],
        "attention_value_scale": keys("attention.value_scale"),
        "attention_bias": "blk.0.attn_q.bias" in keys.shapes,
        "rope_parameters": {
            kind: {
                "rope_type": "default",
                "rope_theta": keys(base),
                # A little more, since its product with the head's size is cut to a whole number.
                "partial_rotary_factor": fraction + 1e-6,
            }
            for kind, base in (
                ("full_attention", "rope.freq_base"),
                ("sliding_attention", "rope.freq_base_swa"),
            )
        },
    }
    left_out = ("num_experts",)
    shared = {name: value for name, value in common.items() if name not in left_out}
    return transformers.MiMoV2FlashConfig(**(shared | own))


def _mimo_state(keys: Keys, own: State) -> State:
    if "attn_qkv.weight" in own:
        own = own | _split(keys, own)
    state = usual_state(keys, own)
    return state | (
        {"self_attn.sinks": own["attn_sinks.weight"]} if "attn_sinks.weight" in own else {}
    )


def _split(keys: Keys, own: State) -> State:
    """q, k and v of one tensor; how many heads of keys it has, its rows say."""
    both, q_rows = own["attn_qkv.weight"], keys("attention.head_count") * keys.head_dim
    kv_heads = (len(both) - q_rows) // (keys.head_dim + keys("attention.value_length"))
    parts = np.split(both, (q_rows, q_rows + kv_heads * keys.head_dim))
    return dict(zip((f"attn_{part}.weight" for part in "qkv"), parts, strict=True))


CLASSES: dict[str, Any] = {
    "cohere2moe": "Cohere2MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "maple": maple_model,
    "smallthinker": thinker_model,
    "step35": StepModel,
    "mimo2": "MiMoV2FlashForCausalLM",
}
CONFIGS: dict[str, Callable[[Keys, dict[str, Any]], Any]] = {
    "cohere2moe": _cohere_config,
    "gpt-oss": _oss_config,
    "maple": _maple_config,
    "smallthinker": _thinker_config,
    "step35": _step_config,
    "mimo2": _mimo_config,
}
STATES: dict[str, Callable[[Keys, State], State]] = {
    "cohere2moe": usual_state,
    "gpt-oss": _oss_state,
    "maple": usual_state,
    "smallthinker": usual_state,
    "step35": _step_state,
    "mimo2": _mimo_state,
}
