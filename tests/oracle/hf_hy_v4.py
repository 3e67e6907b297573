"""transformers' model of hy_v4, filled from a GGUF file's keys and tensors by `hf_archs`.

Of what turns it turns halves. Files, as the checkpoints that they are made from, have neighbours that turn together, so that
these rows change places here (docs/decisions/0121).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import transformers

from tests.oracle.hf_latent import STATES, limits_of, sparse_settings

if TYPE_CHECKING:
    import torch

    from tests.oracle.hf_archs import Keys, State

_NO_LIMIT = 1e30
_NAMES = {
    "attn_gate.weight": "self_attn.gate_proj.weight",
    "attn_sinks.weight": "self_attn.sinks",
    **{
        f"hc_{part}_{role}.weight": f"{part}_hc.{role}"
        for part in ("attn", "ffn")
        for role in ("fn", "base", "scale")
    },
}
_LAST_TURNED = {
    "self_attn.kv_a_proj_with_mqa.weight": "row",
    "self_attn.q_b_proj.weight": "key",
    "self_attn.indexer.wq_b.weight": "index",
    "self_attn.indexer.wk.weight": "index",
    "self_attn.indexer.k_norm.weight": "index",
    "self_attn.indexer.k_norm.bias": "index",
}
"""What has numbers that turn at the end of each head, and of whose size a head is."""


def hy_v4_config(keys: Keys, common: dict[str, Any]) -> Any:
    """Return the configuration, and the limits that the file states by layer. Without an indexer, all positions are chosen."""
    has_indexer = bool(keys("attention.indexer.top_k"))
    chooses = keys("attention.indexer.types", [True] * keys.num_layers)
    settings = sparse_settings(keys, common) | {
        "indexer_types": ["full" if flag else "shared" for flag in chooses],
        "hc_mult": keys("hyper_connection.count"),
        "hc_eps": float(keys("hyper_connection.epsilon")),
        "hc_magnitude": float(keys("hyper_connection.magnitude")),
    }
    if not has_indexer:
        rotary = keys("rope.dimension_count")
        settings |= {"index_n_heads": 1, "index_head_dim": 2 * rotary}
        settings["index_topk"] = keys("context_length")
    del settings["first_k_dense_replace"]
    config = transformers.HYV4Config(**settings)
    config.limits = limits_of(keys, "swiglu_clamp_exp")
    return config


def hy_v4_model(config: Any) -> torch.nn.Module:
    """Return the model, with limits of each layer's routed experts."""
    model = transformers.HYV4ForCausalLM(config)
    for layer, limit in zip(model.model.layers, config.limits, strict=True):
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.swiglu_limit = limit or _NO_LIMIT
    return model


def hy_v4_state(keys: Keys, own: State) -> State:
    """Return one layer's weights."""
    state = STATES["glm-dsa"](keys, own)
    turned, rank = keys("rope.dimension_count"), keys("attention.kv_lora_rank")
    sizes = {
        "row": rank + turned,
        "key": keys("attention.key_length_mla"),
        "index": keys("attention.indexer.key_length"),
    }
    if not keys("attention.indexer.top_k"):
        state |= _nothing_chosen(keys, sizes)
    for name, of in _LAST_TURNED.items():
        if name in state:
            state[name] = in_halves(state[name], sizes[of], turned)
    if "ffn_gate_inp.weight" in own and "exp_probs_b.bias" not in own:
        experts = keys("expert_count")
        state["mlp.gate.e_score_correction_bias"] = np.zeros(experts, np.float32)
    return state | {theirs: own[ours] for ours, theirs in _NAMES.items()}


def in_halves(values: np.ndarray, size: int, turned: int) -> np.ndarray:
    """Return rows of heads of `size` of which the last `turned` are even ones, then odd ones, where they are neighbours."""
    last = np.arange(size - turned, size)
    order = np.concatenate((np.arange(size - turned), last[0::2], last[1::2]))
    found: np.ndarray = values.reshape(-1, size, *values.shape[1:])[:, order].reshape(values.shape)
    return found


def hy_v4_top(weights: State) -> State:
    """Return what sums the streams behind the last layer."""
    parts = ("fn", "base", "scale")
    return {f"model.hc_head.hc_{part}": weights[f"output_hc_{part}.weight"] for part in parts}


def _nothing_chosen(keys: Keys, sizes: dict[str, Any]) -> State:
    """Return an indexer that reads all positions, whatever it says."""
    dim = sizes["index"] = 2 * keys("rope.dimension_count")
    hidden, own = keys("embedding_length"), "self_attn.indexer."
    return {
        f"{own}wq_b.weight": np.zeros((dim, keys("attention.q_lora_rank")), np.float32),
        f"{own}wk.weight": np.zeros((dim, hidden), np.float32),
        f"{own}k_norm.weight": np.ones(dim, np.float32),
        f"{own}k_norm.bias": np.zeros(dim, np.float32),
        f"{own}weights_proj.weight": np.zeros((1, hidden), np.float32),
    }
