"""transformers' configuration and weights of qwen4exp from a GGUF file's keys and tensors, for `hf_archs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.oracle.hf_archs import Keys, State

_NAMES = {
    "hc_attn_": "attn_hyper_connection.",
    "hc_ffn_": "mlp_hyper_connection.",
}
_MIXER = {
    "norm": "hc_norm",
    "down": "input_mix_weight_down",
    "up": "input_mix_weight_up",
    "inject": "block_inject_weight",
}
_NGRAMS = {
    "ple_key": "key_proj",
    "ple_value": "value_proj",
    "ple_norm_key": "norm_key",
    "ple_norm_query": "norm_query",
    "ple_norm_conv": "norm_conv",
    "ple_conv1d": "conv1d",
}
_CONSTANTS = {
    "layer_multipliers": "layer_multipliers",
    "head_offsets": "ngram_heads_offsets",
    "head_vocab_sizes": "ngram_heads_vocab_sizes",
}


def top_names(keys: Keys) -> dict[str, str]:
    """Return the tensors of no layer by their names in the file, and what they are called there."""
    names = {"token_embd": "embed_tokens"}
    for role in ("norm", "down", "up"):
        names[f"output_hc_{role}"] = f"hyper_connection_mixer.{_MIXER[role]}"
    for layer in keys("ple.layers", []):
        names["per_layer_token_embd"] = f"layers.{layer}.ple.ple_embedding.ngram_embedding"
    return names


def qwen4exp_config(keys: Keys, common: dict[str, Any], hybrid: dict[str, Any]) -> Any:
    """Return the configuration. hybrid: the settings of the older siblings.

    Where no layer has a ratio every token reads all positions, for which a budget is enough there.
    """
    recurrent = keys("attention.recurrent_layers")
    if recurrent is not None:
        kinds = ["linear_attention" if flag else "indexed_attention" for flag in recurrent]
        hybrid["layer_types"] = kinds
    hybrid["rope_parameters"]["mrope_section"] = keys("rope.dimension_sections")[:3]
    ratios = {ratio for ratio in keys("attention.compress_ratios") if ratio}
    assert len(ratios) <= 1, ratios
    ratio = max(ratios, default=1)
    budget = keys("attention.indexer.top_k") if ratios else keys("context_length")
    own = {
        "hc_count": keys("hyper_connection.count"),
        "hc_lowrank": keys("hyper_connection.low_rank"),
        "indexer_n_heads": keys("attention.indexer.head_count"),
        "indexer_kv_heads": 1,
        "indexer_head_dim": keys("attention.indexer.key_length"),
        "indexer_budget": budget,
        "indexer_compress_ratio": ratio,
        "output_gate_type": "sigmoid",
        "ple_layer_ids": [layer + 1 for layer in keys("ple.layers", [])],
    }
    if own["ple_layer_ids"]:
        heads = (keys("ple.ngram_size") - 1) * keys("ple.heads_per_ngram")
        own |= {
            "ple_embed_dim": heads * keys("embedding_length_per_layer_input"),
            "ple_conv_kernel_size": keys("ple.conv_kernel"),
            "ngram_size": keys("ple.ngram_size"),
            "heads_per_ngram": keys("ple.heads_per_ngram"),
            "ngram_vocab_size_base": 2,  # the table is the file's
            "eos_token_id": keys("ple.eos_token_id"),
        }
    config = transformers.Qwen4ExpTextConfig(**(common | hybrid | own))
    config.table_shape = keys.shapes.get("per_layer_token_embd.weight")
    return config


def qwen4exp_model(config: Any) -> torch.nn.Module:
    """Return the model, with a table of n-grams of the file's size."""
    model = transformers.Qwen4ExpForCausalLM(config)
    for number in config.ple_layer_ids:
        embedding = model.model.layers[number - 1].ple.ple_embedding
        embedding.ngram_embedding = torch.nn.Embedding(*config.table_shape)
    return model


def qwen4exp_state(keys: Keys, own: State, hybrid_state: Callable[[Keys, State], State]) -> State:
    """Return one layer's weights. hybrid_state: what gives those of the older sibling."""
    state = hybrid_state(keys, own)
    for name, values in own.items():
        ours = name.removesuffix(".weight")
        for prefix, theirs in _NAMES.items():
            if ours.startswith(prefix):
                role = ours.removeprefix(prefix)
                centred = values - 1 if role == "norm" else values
                state[f"{theirs}{_MIXER[role]}.weight"] = centred
        if ours in _NGRAMS:
            centred = values - 1 if "norm" in ours else values
            shaped = centred[:, None] if ours == "ple_conv1d" else centred
            state[f"ple.{_NGRAMS[ours]}.weight"] = shaped
    if "ple_key.weight" in own:
        for key, theirs in _CONSTANTS.items():
            state[f"ple.ple_embedding.{theirs}"] = np.array(keys(f"ple.{key}"), np.int64)
    if "indexer.q_proj.weight" in own:
        parts = [own[f"indexer.{part}_proj.weight"] for part in ("q", "k")]
        state["self_attn.indexer.index_qk_proj.weight"] = np.concatenate(parts)
        for part in ("q", "k"):
            gains = own[f"indexer.{part}_norm.weight"]
            state[f"self_attn.indexer.{part}_layernorm.weight"] = gains - 1
    return state
