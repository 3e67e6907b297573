"""Tiny random models with latent attention, as `tiny_hf` takes them: DeepSeek-V2-Lite, V3 and GLM-4.7-Flash in small.

Knows their configurations. llama.cpp opens a file without a second matrix of queries only if it has 26 or 27 layers.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import transformers
from safetensors.torch import load_file, save_file

from tests.oracle.hf_formulas import limit_layers

if TYPE_CHECKING:
    from pathlib import Path

    from tests.oracle.toolchain.tiny_hf import TinyModel

LITE_LAYERS = 26


def _settings(common: dict[str, Any], tiny: TinyModel, **own: Any) -> dict[str, Any]:
    kept = {
        name: value for name, value in common.items() if name not in ("num_experts", "head_dim")
    }
    return kept | {
        "num_key_value_heads": common["num_attention_heads"],
        "n_routed_experts": common["num_experts"],
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "intermediate_size": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        **own,
        **tiny.options,
    }


def _yarn(mscale: float) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


def _lite(common: dict[str, Any], tiny: TinyModel) -> Any:
    own = {
        "q_lora_rank": None,
        "rope_parameters": _yarn(0.707),
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "n_group": 1,
        "topk_group": 1,
    }
    return transformers.DeepseekV2Config(**_settings(common, tiny, **own))


def _v3(common: dict[str, Any], tiny: TinyModel) -> Any:
    own = {
        "q_lora_rank": 48 if tiny.hidden < 256 else 256,
        "rope_parameters": _yarn(1.0),
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
    }
    return transformers.DeepseekV3Config(**_settings(common, tiny, **own))


def _flash(common: dict[str, Any], tiny: TinyModel) -> Any:
    own = {
        "q_lora_rank": 48 if tiny.hidden < 256 else 256,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 1 if tiny.extra_block else 0,
    }
    return transformers.Glm4MoeLiteConfig(**_settings(common, tiny, **own))


def _sparse(common: dict[str, Any], tiny: TinyModel, **own: Any) -> dict[str, Any]:
    indexer = {"index_n_heads": 16, "index_head_dim": 64, "index_topk": 8}
    settings = {
        "q_lora_rank": 48 if tiny.hidden < 256 else 256,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 1 if tiny.extra_block else 0,
    }
    return _settings(common, tiny, **(settings | indexer | own))


def _v32(common: dict[str, Any], tiny: TinyModel) -> Any:
    own = {"rope_parameters": _yarn(1.0), "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
    return transformers.DeepseekV32Config(**_sparse(common, tiny, **own))


def _glm_dsa(common: dict[str, Any], tiny: TinyModel) -> Any:
    return transformers.GlmMoeDsaConfig(**_sparse(common, tiny))


def _mistral4(common: dict[str, Any], tiny: TinyModel) -> Any:
    own = {
        "q_lora_rank": 48 if tiny.hidden < 256 else 256,
        # No file has the factor on queries behind the original context.
        "rope_parameters": _yarn(1.0)
        | {"llama_4_scaling_beta": 0.0, "partial_rotary_factor": 16 / 48},
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
    }
    return transformers.Mistral4Config(**_settings(common, tiny, **own))


def _as_mistral4(folder: Path, config: Any) -> None:
    """Name the class as the published configuration does, whose text part is one of several kinds."""
    path = folder / "config.json"
    named = {"architectures": ["Ministral3ForCausalLM"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))


def _kimi_linear(common: dict[str, Any], tiny: TinyModel) -> Any:
    kinds = ["full_attention" if n % 2 else "linear_attention" for n in range(tiny.layers)]
    own = {
        "num_local_experts": common["num_experts"],
        "q_lora_rank": None,
        "n_shared_experts": 1,
        "layer_types": kinds,
        "mlp_layer_types": ["dense"] + ["sparse"] * (tiny.layers - 1),
        "linear_head_dim": 16,
        "linear_num_heads": common["num_attention_heads"],
        "linear_conv_kernel_dim": 4,
        "bos_token_id": None,
    }
    settings = _settings(common, tiny, **own)
    for name in ("n_routed_experts", "first_k_dense_replace", "rope_parameters"):
        del settings[name]
    return transformers.KimiLinearConfig(**settings)


def _as_kimi_linear(folder: Path, config: Any) -> None:
    """Write the configuration under the names that the published one has, and those of dense layers' tensors."""
    path = folder / "config.json"
    kinds = enumerate(config.layer_types, start=1)
    attends = [number for number, kind in kinds if kind == "full_attention"]
    named = {
        "num_experts": config.num_local_experts,
        "num_experts_per_token": config.num_experts_per_tok,
        "num_expert_group": config.n_group,
        "num_shared_experts": config.n_shared_experts,
        "moe_renormalize": config.norm_topk_prob,
        "moe_router_activation_func": "sigmoid",
        "model_max_length": config.max_position_embeddings,
        "first_k_dense_replace": config.mlp_layer_types.count("dense"),
        "head_dim": config.hidden_size // config.num_attention_heads,  # says nothing
        "rope_theta": 10000.0,
        "linear_attn_config": {
            "full_attn_layers": attends,
            "kda_layers": [n for n in range(1, config.num_hidden_layers + 1) if n not in attends],
            "head_dim": config.linear_head_dim,
            "num_heads": config.linear_num_heads,
            "short_conv_kernel_size": config.linear_conv_kernel_dim,
        },
    }
    theirs = ("num_local_experts", "num_experts_per_tok", "n_group", "n_shared_experts")
    theirs += ("norm_topk_prob", "max_position_embeddings", "layer_types", "mlp_layer_types")
    theirs += ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    saved = json.loads(path.read_text())
    kept = {name: value for name, value in saved.items() if name not in theirs}
    path.write_text(json.dumps(kept | named))
    # transformers saves them as if they were of experts.
    tensors, dense = {}, re.compile(r"block_sparse_moe\.((?:gate|up|down)_proj)")
    for name, values in load_file(folder / "model.safetensors").items():
        tensors[dense.sub(r"mlp.\1", name)] = values
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _bailingmoe3(common: dict[str, Any], tiny: TinyModel) -> Any:
    whole = tiny.layers // 2 * 2  # what is behind attends, too
    kinds = [n % 2 or n >= whole for n in range(tiny.layers)]
    own = {
        "num_local_experts": common["num_experts"],
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "head_dim": 16,
        "layer_types": ["full_attention" if attends else "linear_attention" for attends in kinds],
        "short_conv_kernel_size": 4,
        "layer_group_size": 2,
        "kda_lower_bound": -5.0,
        "num_mtp_layers": 0,
        "bos_token_id": None,
    }
    settings = _settings(common, tiny, **own)
    del settings["n_routed_experts"]
    return transformers.BailingHybridConfig(**settings)


LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
"""Settings of Ling 3, which transformers does not know: limits of routed and shared experts by layer."""


def _bailingmoe3_model(config: Any) -> Any:
    model = transformers.BailingHybridForCausalLM(config)
    if any(hasattr(config, name) for name in LIMITS):
        found = (getattr(config, name, None) for name in LIMITS)
        limits = ([limit or 0.0 for limit in each or ()] for each in found)
        count = config.num_hidden_layers
        padded = ((each + [0.0] * count)[:count] for each in limits)
        limit_layers(model.model.layers, *padded)
    return model


def _as_bailingmoe3(folder: Path, config: Any) -> None:
    """Write the configuration under the names that the converter reads, and those of a block's tensors."""
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    width = config.moe_intermediate_size
    named = {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "num_experts": config.num_local_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "num_shared_experts": config.n_shared_experts,
        "moe_shared_expert_intermediate_size": config.n_shared_experts * width,
        "n_group": config.n_group,
        "norm_topk_prob": config.norm_topk_prob,
        "score_function": "sigmoid",
        "max_position_embeddings": config.max_position_embeddings,
        "head_dim": config.linear_head_dim,  # transformers saves how much of a latent head turns
        "rope_theta": config.rope_parameters["rope_theta"],
        "num_nextn_predict_layers": saved.get("num_nextn_predict_layers", 0),
        "no_kda_lora": True,
        "gated_attention_proj_granularity_type": "head_wise",
    }
    path.write_text(json.dumps(saved | named))
    tensors = load_file(folder / "model.safetensors")
    renamed = {n.replace("shared_head.norm", "final_layernorm"): v for n, v in tensors.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


BAILINGMOE3_UNEVEN = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "num_local_experts": 6,
    "n_group": 3,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 19,
    "n_shared_experts": 2,
    "kv_lora_rank": 37,
    "qk_nope_head_dim": 11,
    "qk_rope_head_dim": 6,
    "v_head_dim": 13,
    "head_dim": 10,
    "short_conv_kernel_size": 3,
    "kda_lower_bound": -1.5,
    "first_k_dense_replace": 2,
}
BAILINGMOE3_WIDE = {"moe_intermediate_size": 256, "head_dim": 64}
BAILINGMOE3_LIMITS = {LIMITS[0]: [None, 7.0, 10.0], LIMITS[1]: [16.0, None, 12.0, 12.0]}
SPARSE = ("deepseek_v32", "glm_moe_dsa")
"""Whose tokens read chosen positions."""
# A rounded number changes which positions are chosen: of more of them that is less.
_SPARSE_WIDE = {"moe_intermediate_size": 256, "index_topk": 24}
_OWN_CHOICE = {"index_topk_pattern": "FFSSF"}
OTHERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("small", "bailingmoe3", {"layers": 4}),
    ("uneven", "bailingmoe3", {"layers": 5, "options": BAILINGMOE3_UNEVEN, "seed": 2}),
    ("extra_block", "bailingmoe3", {"layers": 4, "extra_block": True, "seed": 3}),
    ("limited", "bailingmoe3", {"layers": 4, "options": BAILINGMOE3_LIMITS, "seed": 4}),
    *(("small", arch, {"layers": 3}) for arch in SPARSE),
    *(("extra_block", arch, {"extra_block": True, "seed": 3}) for arch in SPARSE),
    ("shared", "glm_moe_dsa", {"layers": 5, "options": _OWN_CHOICE, "seed": 2}),
)
"""More cases: their names, architectures, and how a model is otherwise."""
MIXED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("wide", "bailingmoe3", {"layers": 4, "options": BAILINGMOE3_WIDE}),
    *(("wide", arch, {"options": _SPARSE_WIDE}) for arch in SPARSE),
)
"""The same of models that are quantised."""
CLASSES: dict[str, Any] = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "bailingmoe3": _bailingmoe3_model,
}
CONFIGS = {
    "deepseek_v2": _lite,
    "deepseek_v3": _v3,
    "deepseek_v32": _v32,
    "glm_moe_dsa": _glm_dsa,
    "glm4_moe_lite": _flash,
    "mistral4": _mistral4,
    "kimi_linear": _kimi_linear,
    "bailingmoe3": _bailingmoe3,
}
PUBLISHED = {
    "mistral4": _as_mistral4,
    "kimi_linear": _as_kimi_linear,
    "bailingmoe3": _as_bailingmoe3,
}
"""What makes a saved checkpoint one as the hub has it."""
