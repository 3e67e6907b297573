"""Tiny random models of architectures that differ by their routers, as `tiny_hf` takes them.

Knows their configurations, and what the hub's checkpoints have that transformers does not write: the published names of
bailingmoe, bailingmoe2 and deepseek, for which it has no class, and GLM's blocks that guess a further token.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.oracle.toolchain.tiny_hf import TinyModel

Tensors = dict[str, torch.Tensor]
_HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


def _without(common: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in common.items() if name not in names}


def _grouped(common: dict[str, Any]) -> dict[str, Any]:
    """Settings of routers with sigmoid scores and shared experts behind a dense layer."""
    return _without(common, "num_experts") | {
        "n_routed_experts": common["num_experts"],
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "intermediate_size": 64,
    }


def _glm4moe(common: dict[str, Any], tiny: TinyModel) -> Any:
    own = {
        "rope_parameters": dict(_HALF),
        "head_dim": 32,
        "attention_bias": True,
        "num_nextn_predict_layers": 1 if tiny.extra_block else 0,
    }
    return transformers.Glm4MoeConfig(**(_grouped(common) | own | tiny.options))


def solar_open(common: dict[str, Any], tiny: TinyModel) -> Any:
    """Return the configuration of Solar-Open, which becomes a file of glm4moe without dense layers."""
    settings = _without(_grouped(common), "first_k_dense_replace", "intermediate_size")
    own = {"rope_parameters": _HALF | {"partial_rotary_factor": 1.0}, "head_dim": 32}
    return transformers.SolarOpenConfig(**(settings | own | tiny.options))


def _bailingmoe2(common: dict[str, Any], tiny: TinyModel) -> Any:
    own = {
        "rope_parameters": dict(_HALF),
        "use_qk_norm": True,
        "n_shared_experts": 1,  # as in all published ones; llama.cpp multiplies twice by more
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_nextn_predict_layers": 0,
    }
    return transformers.Glm4MoeConfig(**(_grouped(common) | own | tiny.options))


def _dots1(common: dict[str, Any], tiny: TinyModel) -> Any:
    # llama.cpp opens no file of it with fewer heads of keys.
    own = {"num_key_value_heads": 4, "sliding_window": None, "scoring_func": "sigmoid"}
    return transformers.Dots1Config(**(_grouped(common) | own | tiny.options))


def _plain(common: dict[str, Any], tiny: TinyModel) -> Any:
    own = {
        "num_key_value_heads": 4,
        "intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": tiny.arch == "bailingmoe",
        # llama.cpp converts and opens nothing of bailingmoe with dense layers.
        "mlp_only_layers": [0] if tiny.arch == "deepseek" else [],
        "qkv_bias": False,
    }
    return transformers.Qwen2MoeConfig(**(_without(common, "head_dim") | own | tiny.options))


def _minimax(common: dict[str, Any], tiny: TinyModel) -> Any:
    own: dict[str, Any] = {
        "intermediate_size": 32,
        "head_dim": 32,
        "rotary_dim": 16,
        "scoring_func": "sigmoid",
        "bos_token_id": None,
    }
    settings = _without(common, "moe_intermediate_size") | own | tiny.options
    return transformers.MiniMaxM2Config(**(settings | {"rope_parameters": dict(_HALF)}))


def qwen3vl(common: dict[str, Any], tiny: TinyModel) -> Any:
    """Return the configuration of Qwen3-VL, with experts or without."""
    text = common | {"intermediate_size": 64, "head_dim": 32}
    # Every pair belongs to an axis: llama.cpp does not turn one that belongs to none.
    text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [6, 5, 5]}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": tiny.hidden, "deepstack_visual_indexes": [0]}
    text |= tiny.options
    if tiny.arch == "qwen3vl":
        make = transformers.Qwen3VLConfig
        text = _without(text, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    else:
        make, text = transformers.Qwen3VLMoeConfig, text | {"norm_topk_prob": True}
    return make(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=text["tie_word_embeddings"],
        attn_implementation="eager",
        experts_implementation="eager",
        dtype="float32",
    )


def _ernie(common: dict[str, Any], tiny: TinyModel) -> Any:
    own = {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "intermediate_size": 64,  # the converter takes the shared width from it: over 2 heads of keys
        "head_dim": 32,
        "use_bias": False,
    }
    kept = _without(common, "num_experts", "num_experts_per_tok")
    return transformers.Ernie4_5_MoeConfig(**(kept | own | tiny.options))


GRANITE_FACTORS = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 2.5,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.75,
}
"""What models of Granite multiply with, in transformers' words."""


def _granite(common: dict[str, Any], tiny: TinyModel) -> Any:
    own = {
        "num_local_experts": 4,
        "intermediate_size": 32,
        "shared_intermediate_size": 32,
        **GRANITE_FACTORS,
    }
    kept = _without(common, "num_experts", "moe_intermediate_size", "head_dim")
    return transformers.GraniteMoeSharedConfig(**(kept | own | tiny.options))


GRANITE_LISTS = {
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 16,
    "layer_rope_theta": [0, 10000.0],
    "no_rope_layers": [0, 1],
}
"""Windows and turning heads of Granite's two layers: which turn is said to transformers, then to the converter."""


def _granite_swa(common: dict[str, Any], tiny: TinyModel) -> Any:
    own = {
        "num_local_experts": 4,
        "intermediate_size": 32,
        "shared_intermediate_size": 32,
        **GRANITE_FACTORS,
        **GRANITE_LISTS,
    }
    kept = _without(common, "num_experts", "moe_intermediate_size", "head_dim")
    return transformers.GraniteMoeSWAConfig(**(kept | own | tiny.options))


def _hunyuan(common: dict[str, Any], tiny: TinyModel) -> Any:
    own = {"moe_topk": 2, "intermediate_size": 32, "head_dim": 32}
    kept = _without(common, "num_experts_per_tok", "moe_intermediate_size")
    return transformers.HunYuanMoEV1Config(**(kept | own | tiny.options))


def _afmoe(common: dict[str, Any], tiny: TinyModel) -> Any:
    own = {
        "intermediate_size": 64,
        "num_dense_layers": 1,
        "num_shared_experts": 2,
        "route_scale": 1.5,
        "sliding_window": 16,
        "head_dim": 32,
        "mup_enabled": True,
    }
    return transformers.AfmoeConfig(**(common | own | tiny.options))


def _in_windows(tiny: TinyModel) -> dict[str, Any]:
    """Windows in all layers but every second."""
    kinds = ["full_attention" if n % 2 else "sliding_attention" for n in range(tiny.layers)]
    return {"layer_types": kinds, "sliding_window": 16}


def _exaone(common: dict[str, Any], tiny: TinyModel) -> Any:
    own = {
        "num_shared_experts": 2,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "intermediate_size": 64,
        "head_dim": 32,
        **_in_windows(tiny),
    }
    return transformers.ExaoneMoeConfig(**(common | own | tiny.options))


def _hy_v3(common: dict[str, Any], tiny: TinyModel) -> Any:
    own = {
        "num_shared_experts": 2,
        "router_scaling_factor": 1.5,
        "intermediate_size": 64,
        "head_dim": 32,
    }
    return transformers.HYV3Config(**(common | own | tiny.options))


def _mellum(common: dict[str, Any], tiny: TinyModel) -> Any:
    rope = common["rope_parameters"]
    ropes = {"full_attention": dict(rope), "sliding_attention": dict(rope)}
    own = {"rope_parameters": ropes, "head_dim": 32, **_in_windows(tiny)}
    return transformers.MellumConfig(**(common | own | tiny.options))


def _llama4(common: dict[str, Any], tiny: TinyModel) -> Any:
    own = {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size": 32,
        "intermediate_size_mlp": 64,
        "head_dim": 32,
    }
    kept = _without(common, "num_experts", "moe_intermediate_size")
    return transformers.Llama4TextConfig(**(kept | own | tiny.options))


def _rewritten(folder: Path, tensors: Tensors, settings: dict[str, Any]) -> None:
    """Write a checkpoint's tensors, and change settings of its configuration."""
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def half_gates(model: torch.nn.Module) -> None:
    """Make the gate of the shared expert one half for every token."""
    with torch.no_grad():
        for name, values in model.named_parameters():
            if name.endswith("shared_expert_gate.weight"):
                values.zero_()


def _ungated(folder: Path, config: Any) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors without gates of shared experts, which are in the matrices behind them, and common settings."""
    tensors = {
        name.replace(".shared_expert.", ".shared_experts."): values
        * (0.5 if name.endswith("shared_expert.down_proj.weight") else 1.0)
        for name, values in load_file(folder / "model.safetensors").items()
        if not name.endswith("shared_expert_gate.weight")
    }
    count = config.shared_expert_intermediate_size // config.moe_intermediate_size
    return tensors, {
        "first_k_dense_replace": len(config.mlp_only_layers),
        "n_shared_experts": count,
        "num_shared_experts": count,
    }


def _as_deepseek(folder: Path, config: Any) -> None:
    tensors, settings = _ungated(folder, config)
    settings |= {"architectures": ["DeepseekForCausalLM"], "model_type": "deepseek"}
    _rewritten(folder, tensors, settings | {"n_routed_experts": config.num_experts})


def _as_first_bailing(folder: Path, config: Any) -> None:
    tensors, settings = _ungated(folder, config)
    settings |= {"architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe"}
    _rewritten(folder, _bailing_names(tensors, config), settings)


def _bailing_names(tensors: Tensors, config: Any) -> Tensors:
    """Return the tensors under the names that Ling's have."""
    names = {
        "model.embed_tokens.": "model.word_embeddings.",
        "self_attn.o_proj.": "attention.dense.",
        "self_attn.q_norm.": "attention.query_layernorm.",
        "self_attn.k_norm.": "attention.key_layernorm.",
        "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
    }
    renamed: Tensors = {}
    for name, values in tensors.items():
        for theirs, own in names.items():
            name = name.replace(theirs, own)
        renamed[name] = values
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        parts = [renamed.pop(f"{prefix}self_attn.{part}_proj.weight") for part in ("q", "k", "v")]
        renamed[f"{prefix}attention.query_key_value.weight"] = torch.cat(parts)
    return renamed


def _as_bailing(folder: Path, config: Any) -> None:
    """Give the checkpoint the names that Ling's have."""
    tensors = _bailing_names(load_file(folder / "model.safetensors"), config)
    settings = {
        "architectures": ["BailingMoeV2ForCausalLM"],
        "model_type": "bailing_moe",
        "num_experts": config.n_routed_experts,
        "num_shared_experts": config.n_shared_experts,
        "score_function": "sigmoid",
    }
    _rewritten(folder, tensors, settings)


def _as_hunyuan(folder: Path, config: Any) -> None:
    """Name by layer what published configurations name by layer."""
    layers = config.num_hidden_layers
    settings = {
        "moe_intermediate_size": [config.intermediate_size] * layers,
        "moe_topk": [config.moe_topk] * layers,
        "num_shared_expert": [1] * layers,
    }
    _rewritten(folder, load_file(folder / "model.safetensors"), settings)


def _as_afmoe(folder: Path, config: Any) -> None:
    """Give the configuration what published ones say of the router, which transformers takes for granted."""
    settings = {"route_norm": True, "score_func": "sigmoid"}
    _rewritten(folder, load_file(folder / "model.safetensors"), settings)


def _as_exaone(folder: Path, config: Any) -> None:
    """Give the configuration what published ones say of the router, which transformers takes for granted."""
    tensors = load_file(folder / "model.safetensors")
    _rewritten(folder, tensors, {"scoring_func": "sigmoid"})


def _as_llama4(folder: Path, config: Any) -> None:
    """Make it the text part of a model that sees, as published ones are."""
    tensors = load_file(folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    settings = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": text,
    }
    _rewritten(folder, {f"language_model.{n}": v for n, v in tensors.items()}, settings)


def _as_qwen3vl(folder: Path, config: Any) -> None:
    """Store experts as the published checkpoints do: a column for each output."""
    tensors = load_file(folder / "model.safetensors")
    turned = {
        name: values.transpose(1, 2).contiguous() if ".mlp.experts." in name else values
        for name, values in tensors.items()
    }
    _rewritten(folder, turned, {})


def add_hy_block(folder: Path, config: Any) -> None:
    """Add a block that guesses a further token, as Hy3's checkpoints have it behind the last layer."""
    add_glm_block(folder, config, "final_layernorm")


def add_glm_block(folder: Path, config: Any, norm: str = "shared_head.norm") -> None:
    """Add a block that guesses a further token, as GLM's checkpoints have it behind the last layer. norm: its last one's name."""
    tensors = load_file(folder / "model.safetensors")
    count, hidden = config.num_hidden_layers, config.hidden_size
    last, block = f"model.layers.{count - 1}.", f"model.layers.{count}."
    added = {
        block + name.removeprefix(last): values.flip(0).contiguous()
        for name, values in tensors.items()
        if name.startswith(last)
    }
    added[block + "eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * hidden**-0.5
    for name in ("enorm", "hnorm", norm):
        added[f"{block}{name}.weight"] = torch.ones(hidden)
    _rewritten(folder, tensors | added, {"num_nextn_predict_layers": 1})


UNGATED = ("bailingmoe", "deepseek")
"""Those whose class in transformers has gates of shared experts, which their checkpoints have not."""
CLASSES = {
    "afmoe": "AfmoeForCausalLM",
    "bailingmoe": "Qwen2MoeForCausalLM",
    "bailingmoe2": "Glm4MoeForCausalLM",
    "deepseek": "Qwen2MoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
    "exaone-moe": "ExaoneMoeForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "granitemoe": "GraniteMoeSharedForCausalLM",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "hunyuan-moe": "HunYuanMoEV1ForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "mellum": "MellumForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
    "qwen3vlmoe": "Qwen3VLMoeForConditionalGeneration",
}
CONFIGS: dict[str, Callable[[dict[str, Any], TinyModel], Any]] = {
    "afmoe": _afmoe,
    "bailingmoe": _plain,
    "bailingmoe2": _bailingmoe2,
    "deepseek": _plain,
    "dots1": _dots1,
    "ernie4_5-moe": _ernie,
    "exaone-moe": _exaone,
    "glm4moe": _glm4moe,
    "granitemoe": _granite,
    "granitemoe_swa": _granite_swa,
    "hunyuan-moe": _hunyuan,
    "hy_v3": _hy_v3,
    "llama4": _llama4,
    "mellum": _mellum,
    "minimax-m2": _minimax,
    "qwen3vlmoe": qwen3vl,
}
PUBLISHED: dict[str, Callable[[Path, Any], None]] = {
    "afmoe": _as_afmoe,
    "bailingmoe": _as_first_bailing,
    "bailingmoe2": _as_bailing,
    "deepseek": _as_deepseek,
    "exaone-moe": _as_exaone,
    "hunyuan-moe": _as_hunyuan,
    "llama4": _as_llama4,
    "qwen3vlmoe": _as_qwen3vl,
}
"""What makes a saved checkpoint one as the hub has it, where transformers writes another."""


def wide_experts(arch: str, width: int) -> dict[str, Any]:
    """Return the options of experts of this width, shared ones too."""
    match arch:
        case "hunyuan-moe" | "minimax-m2":
            return {"intermediate_size": width}
        case "llama4":
            return {"intermediate_size": width, "intermediate_size_mlp": width}
        case "bailingmoe" | "deepseek":
            return {"moe_intermediate_size": width, "shared_expert_intermediate_size": 2 * width}
        case "granitemoe" | "granitemoe_swa":
            return {"intermediate_size": width, "shared_intermediate_size": width}
        case "ernie4_5-moe":
            return {"moe_intermediate_size": width, "intermediate_size": 2 * width}
        case _:
            return {"moe_intermediate_size": width}
