"""Tiny random models with latent attention, as `tiny_hf` takes them: DeepSeek-V2-Lite, V3 and GLM-4.7-Flash in small.

Knows their configurations. llama.cpp opens a file without a second matrix of queries only if it has 26 or 27 layers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import transformers

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


CLASSES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
}
CONFIGS = {"deepseek_v2": _lite, "deepseek_v3": _v3, "glm4_moe_lite": _flash, "mistral4": _mistral4}
PUBLISHED = {"mistral4": _as_mistral4}
"""What makes a saved checkpoint one as the hub has it."""
