"""transformers' model of glm5-next, filled from a GGUF file's keys and tensors by `hf_archs`.

transformers has no class of a language model without images, and none whose layers take a choice from behind a state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.glm5_next import modeling_glm5_next as glm5

from tests.oracle.hf_latent import kimi_linear_state, limits_of, sparse_settings

if TYPE_CHECKING:
    from tests.oracle.hf_archs import Keys, State

_NO_LIMIT = 1e30
_NAMES = {
    **{
        f"hc_{part}_{role}.weight": f"{part}_hc.{role}"
        for part in ("attn", "ffn")
        for role in ("fn", "base", "scale")
    },
    **{
        f"indexer_compressor_{role}.weight": f"self_attn.indexer.index_kpool_compress_{role}"
        for role in ("gate", "ape")
    },
}


class Glm5NextForCausalLM(glm5.Glm5NextPreTrainedModel):
    """transformers' text model with a head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = glm5.Glm5NextTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        _KeptChoice(self.model.layers)

    def forward(self, input_ids: torch.Tensor, **options: Any) -> CausalLMOutputWithPast:
        """Return the logits after every token, and the cache."""
        out = self.model(input_ids, **options)
        logits = self.lm_head(out.last_hidden_state)
        return CausalLMOutputWithPast(logits=logits, past_key_values=out.past_key_values)


class _KeptChoice:
    """Gives layers that take a choice the last one that was made.

    transformers passes it to the next layer alone, and none from a layer that takes one.
    """

    def __init__(self, layers: Any) -> None:
        self._chosen: torch.Tensor | None = None
        for layer in layers:
            indexer = getattr(layer.self_attn, "indexer", None)
            if indexer is not None:
                indexer.register_forward_hook(self._keep)
            elif layer.block_type != "linear_attention":
                layer.self_attn.register_forward_pre_hook(self._give, with_kwargs=True)

    def _keep(self, _indexer: Any, _args: Any, chosen: torch.Tensor) -> None:
        self._chosen = chosen

    def _give(self, _mixer: Any, args: Any, options: dict[str, Any]) -> Any:
        return args, options | {"prev_topk_indices": self._chosen}


def glm5_config(keys: Keys, common: dict[str, Any]) -> Any:
    """Return the configuration, and the limits that the file states by layer."""
    settings = sparse_settings(keys, common)
    for name in ("rope_parameters", "first_k_dense_replace", "head_dim"):
        del settings[name]
    attends = keys("attention.head_count_kv")[: keys.num_layers]
    bound = keys("kda.gate_lower_bound")
    choosing = keys("attention.indexer.types", [True] * keys.num_layers)
    own = {
        "layer_types": ["indexed_attention" if n else "linear_attention" for n in attends],
        "indexer_types": ["full" if flag else "shared" for flag in choosing],
        "index_kpool": keys("attention.indexer.kpool"),
        "index_kpool_always_select_tail": bool(keys("attention.indexer.kpool_select_tail", True)),
        "linear_head_dim": keys("kda.head_dim"),
        "linear_num_heads": keys("attention.head_count"),
        "linear_conv_kernel_dim": keys("ssm.conv_kernel"),
        "linear_lower_bound": None if bound is None else float(bound),
        "hc_mult": keys("hyper_connection.count"),
        "hc_eps": float(keys("hyper_connection.epsilon")),
        "hc_sinkhorn_iters": keys("hyper_connection.sinkhorn_iterations"),
    }
    config = glm5.Glm5NextTextConfig(**(settings | own))
    routed = "swiglu_clamp_exp"
    others = "swiglu_clamp_shexp" if "swiglu_clamp_shexp" in keys else routed
    config.limits = [limits_of(keys, name) for name in (routed, others)]
    return config


def glm5_model(config: Any) -> torch.nn.Module:
    """Return the model, with limits of routed experts, and of shared ones and dense layers."""
    model = Glm5NextForCausalLM(config)
    for layer, routed, other in zip(model.model.layers, *config.limits, strict=True):
        mlp = layer.mlp
        if hasattr(mlp, "experts"):
            mlp.experts.swiglu_limit = routed or _NO_LIMIT
            mlp = mlp.shared_experts
        mlp.swiglu_limit = other or _NO_LIMIT
    return model


def glm5_state(keys: Keys, own: State) -> State:
    """Return one layer's weights."""
    state = kimi_linear_state(keys, own)
    if "ssm_a" in own:
        state["self_attn.forget_gate.A_log"] = state["self_attn.forget_gate.A_log"].reshape(-1)
    return state | {theirs: own[ours] for ours, theirs in _NAMES.items() if ours in own}
