"""Tiny random models of architectures that differ by the formula of their layers, as `tiny_hf` takes them.

Knows their configurations, and the form in which the hub's checkpoints of gpt-oss hold experts: MXFP4.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig

from tests.oracle.hf_formulas import StepModel, maple_model, thinker_config, thinker_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.oracle.toolchain.tiny_hf import TinyModel

MAPLE_LIMIT = 7.0
"""The converter writes it, whatever the configuration says."""


def _oss(common: dict[str, Any], tiny: TinyModel) -> Any:
    left_out = ("num_experts", "moe_intermediate_size")
    shared = {name: value for name, value in common.items() if name not in left_out}
    own = {
        "num_local_experts": common["num_experts"],
        "intermediate_size": 32,
        "sliding_window": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    }
    return transformers.GptOssConfig(**(shared | own | tiny.options))


def _cohere(common: dict[str, Any], tiny: TinyModel) -> Any:
    """A dense layer, which sees all tokens, and a full layer behind every three with a window."""
    own = {
        "intermediate_size": 32,
        "prefix_dense_intermediate_size": 64,
        "num_shared_experts": 2,
        "expert_selection_fn": "sigmoid",
        "head_dim": 32,
        "first_k_dense_replace": 1,
        "sliding_window": 16,
        "logit_scale": 0.5,
        "rms_norm_eps": None,
    }
    left_out = ("moe_intermediate_size",)
    shared = {name: value for name, value in common.items() if name not in left_out}
    return transformers.Cohere2MoeConfig(**(shared | own | tiny.options))


def _maple(common: dict[str, Any], tiny: TinyModel) -> Any:
    """Windows in all layers but every second."""
    kinds = ["full_attention" if n % 2 else "sliding_attention" for n in range(tiny.layers)]
    ropes = {kind: dict(common["rope_parameters"]) for kind in set(kinds)}
    own = {"layer_types": kinds, "rope_parameters": ropes, "sliding_window": 16, "head_dim": 32}
    config = transformers.MellumConfig(**(common | own | tiny.options))
    config.expert_limits = [MAPLE_LIMIT] * tiny.layers
    return config


def _step(common: dict[str, Any], tiny: TinyModel) -> Any:
    """The first layer of every four sees all tokens. Limits as published ones are, but for where they are."""
    layers = range(tiny.layers)
    kinds = ["sliding_attention" if n % 4 else "full_attention" for n in layers]
    own = {
        "n_routed_experts": common["num_experts"],
        "head_dim": 32,
        "intermediate_size": 64,
        "share_expert_dim": 32,
        "moe_router_scaling_factor": 3.0,
        "num_sliding_attention_heads": 6,
        "layer_types": kinds,
        "mlp_layer_types": ["sparse" if n else "dense" for n in layers],
        "sliding_window": 16,
        "rope_parameters": {
            "full_attention": _turning(1e6, 0.5) | tiny.options.get("full_rope", {}),
            "sliding_attention": _turning(1e4, 1.0),
        },
        "swiglu_limits": [7.0 if n % 2 else None for n in layers],
        "swiglu_limits_shared": [None if n % 2 else 16.0 for n in layers],
    }
    kept = {name: value for name, value in common.items() if name != "num_experts"}
    options = {name: value for name, value in tiny.options.items() if name != "full_rope"}
    return Step3p7TextConfig(**(kept | own | options))


def _turning(base: float, part: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": part}


_STEP_NAMES = {
    ".mlp.gate.e_score_correction_bias": ".moe.router_bias",
    ".mlp.gate.": ".moe.gate.",
    ".mlp.experts.down_proj": ".moe.down_proj.weight",
    ".mlp.shared_experts.": ".share_expert.",
}
_STEP_BLOCKS = 3
"""How many blocks guess further tokens, where a checkpoint has such."""


def _as_step(folder: Path, config: Any) -> None:
    """Write tensors and configuration under the names that the published ones have."""
    tensors = {}
    for name, values in load_file(folder / "model.safetensors").items():
        own = name
        for theirs, ours in _STEP_NAMES.items():
            own = own.replace(theirs, ours)
        if own.endswith(".mlp.experts.gate_up_proj"):
            stem = own.removesuffix("mlp.experts.gate_up_proj")
            for part, role in zip(values.chunk(2, dim=1), ("gate", "up"), strict=True):
                tensors[f"{stem}moe.{role}_proj.weight"] = part.contiguous()
        else:
            tensors[own] = values
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    num_blocks = config.num_hidden_layers
    if saved.get("num_nextn_predict_layers"):
        num_blocks += _STEP_BLOCKS
        tensors |= _step_blocks(tensors, config)
    kinds = ["sliding_attention" if n % 4 else "full_attention" for n in range(num_blocks)]
    near = config.rope_parameters.get("sliding_attention", _turning(1e4, 1.0))
    full = config.rope_parameters["full_attention"]
    routed = [str(n) for n, kind in enumerate(config.mlp_layer_types) if kind == "sparse"]
    named = {
        "architectures": ["Step3p5ForCausalLM"],
        "num_attention_groups": config.num_key_value_heads,
        "attention_other_setting": {
            "num_attention_heads": config.num_sliding_attention_heads,
            "num_attention_groups": config.num_key_value_heads,
        },
        "layer_types": kinds,
        "partial_rotary_factors": [1.0 if kind[0] == "s" else 0.5 for kind in kinds],
        "rope_theta": [(near if kind[0] == "s" else full)["rope_theta"] for kind in kinds],
        "moe_num_experts": config.n_routed_experts,
        "moe_top_k": config.num_experts_per_tok,
        "moe_layers_enum": ",".join(routed),
        "moe_router_activation": "sigmoid",
        "norm_expert_weight": True,
        "num_nextn_predict_layers": num_blocks - config.num_hidden_layers,
    }
    del saved["rope_parameters"]
    if full["rope_type"] == "llama3":
        named["rope_scaling"] = {n: full[n] for n in full if n != "partial_rotary_factor"}
    path.write_text(json.dumps(saved | named))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _step_blocks(tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Return blocks that guess further tokens: dense layers with a window, and heads of their own."""
    found, hidden, width = {}, config.hidden_size, config.intermediate_size
    near = {n: v for n, v in tensors.items() if n.startswith("model.layers.1.")}
    for index in range(_STEP_BLOCKS):
        block = f"model.layers.{config.num_hidden_layers + index}."
        for name, values in near.items():
            if ".moe." not in name and ".share_expert." not in name:
                found[name.replace("model.layers.1.", block)] = values.flip(0).contiguous()
        for name, shape in (
            ("mlp.gate_proj", (width, hidden)),
            ("mlp.up_proj", (width, hidden)),
            ("mlp.down_proj", (hidden, width)),
            ("eh_proj", (hidden, 2 * hidden)),
            ("transformer.shared_head.output", (config.vocab_size, hidden)),
        ):
            found[f"{block}{name}.weight"] = torch.randn(shape) * shape[1] ** -0.5
        for name in ("enorm", "hnorm", "transformer.shared_head.norm"):
            found[f"{block}{name}.weight"] = torch.zeros(hidden)
    return found


def ask_for_blocks(folder: Path, config: Any) -> None:
    """Let the configuration have blocks that guess further tokens."""
    path = folder / "config.json"
    named = {"num_nextn_predict_layers": _STEP_BLOCKS}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))


def _as_maple(folder: Path, config: Any) -> None:
    """Write the configuration as the published one is."""
    path = folder / "config.json"
    named = {
        "architectures": ["MapleForCausalLM"],
        "num_experts": config.num_experts,
        "nope_on_global_attention": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | named))


def _thinker(common: dict[str, Any], tiny: TinyModel) -> Any:
    """Windows of the published size in all layers but one of four, unless the options have others."""
    options = {"window": 4096, "gates_by_sigmoid": True} | tiny.options
    window, by_sigmoid = options.pop("window"), options.pop("gates_by_sigmoid")
    settings = common | {"head_dim": 32} | options
    return thinker_config(settings, window=window, gates_by_sigmoid=by_sigmoid)


def _as_thinker(folder: Path, config: Any) -> None:
    """Write the configuration and the names of tensors as the published models have them."""
    path = folder / "config.json"
    near = [kind == "sliding_attention" for kind in config.layer_types]
    named = {
        "architectures": ["SmallThinkerForCausalLM"],
        "moe_num_primary_experts": config.num_experts,
        "moe_num_active_primary_experts": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_primary_router_apply_softmax": not config.gates_by_sigmoid,
        "sliding_window_layout": [int(is_near) for is_near in near],
        "sliding_window_size": config.sliding_window,
    }
    left_out = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "sliding_window")
    kept = {n: v for n, v in json.loads(path.read_text()).items() if n not in left_out}
    path.write_text(json.dumps(kept | named))
    tensors = {}
    for name, values in load_file(folder / "model.safetensors").items():
        name = name.replace("mlp.gate.", "block_sparse_moe.primary_router.")
        if ".experts." not in name:
            tensors[name] = values
            continue
        prefix, _, part = name.replace("mlp.", "block_sparse_moe.").rpartition(".")
        for expert, own in enumerate(values):
            named = zip(("gate", "up"), own.chunk(2), strict=True)
            parts = dict(named) if part == "gate_up_proj" else {"down": own}
            for which, rows in parts.items():
                tensors[f"{prefix}.{expert}.{which}.weight"] = rows.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def speak_up(model: torch.nn.Module) -> None:
    """Make experts so loud that limits of the published models are reached."""
    with torch.no_grad():
        for name, values in model.named_parameters():
            if ".mlp." in name and "gate_up_proj" in name:
                values.mul_(8.0)
            elif ".mlp." in name and name.endswith(("gate_proj.weight", "up_proj.weight")):
                values.mul_(16.0)
            elif ".mlp." in name and "down_proj" in name:
                values.mul_(0.05)


def _mimo(common: dict[str, Any], tiny: TinyModel) -> Any:
    """A dense layer that sees all tokens, then routed ones with a window, whose keys have twice as many heads."""
    near = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.334}
    own = {
        "n_routed_experts": common["num_experts"],
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "v_head_dim": 16,
        "intermediate_size": 64,
        "sliding_window": 16,
        "rope_parameters": {
            "full_attention": near | {"rope_theta": 10000.0},
            "sliding_attention": near,
        },
    }
    left_out = ("num_experts",)
    shared = {name: value for name, value in common.items() if name not in left_out}
    return transformers.MiMoV2FlashConfig(**(shared | own | tiny.options))


def _as_mimo(folder: Path, config: Any) -> None:
    """Name the settings as the published configuration does, which transformers reads and does not write."""
    path = folder / "config.json"
    saved = json.loads(path.read_text("utf-8"))
    far, near = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    del saved["rope_parameters"], saved["rms_norm_eps"]
    sizes = {
        f"swa_{name}": getattr(config, name)
        for name in ("head_dim", "v_head_dim", "num_attention_heads")
    }
    own = {
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in config.layer_types],
        "moe_layer_freq": [int(kind == "sparse") for kind in config.mlp_layer_types],
        "layernorm_epsilon": config.rms_norm_eps,
        "partial_rotary_factor": far["partial_rotary_factor"],
        "rope_theta": far["rope_theta"],
        "swa_rope_theta": near["rope_theta"],
        "swa_num_key_value_heads": 2 * config.num_key_value_heads,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": None,
    }
    path.write_text(json.dumps(saved | sizes | own), "utf-8")


def add_mimo_blocks(folder: Path, config: Any) -> None:
    """Add the three blocks that guess further tokens: dense layers with a window, whose q, k and v are one matrix as in V2.5."""
    path, hidden = folder / "model.safetensors", config.hidden_size
    tensors, count = load_file(path), config.num_hidden_layers
    last, inner = f"model.layers.{count - 1}.", config.intermediate_size
    assert config.layer_types[-1] == "sliding_attention", "a block has its tensors"
    for number in range(3):
        block = f"model.mtp.layers.{number}."
        kept = ("self_attn", "input_layernorm", "post_attention_layernorm")
        own = {
            block + name.removeprefix(last): values.flip(0).contiguous()
            for name, values in tensors.items()
            if name.startswith(tuple(last + part for part in kept))
        }
        parts = [own.pop(f"{block}self_attn.{part}_proj.weight") for part in "qkv"]
        tensors |= own | {f"{block}self_attn.qkv_proj.weight": torch.cat(parts)}
        for part, rows, columns in (
            ("eh_proj", hidden, 2 * hidden),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            tensors[f"{block}{part}.weight"] = torch.randn(rows, columns) * columns**-0.5
        for part in ("enorm", "hnorm", "final_layernorm"):
            tensors[f"{block}{part}.weight"] = torch.ones(hidden)
    save_file(tensors, path, {"format": "pt"})


def pack_experts(folder: Path, model: torch.nn.Module) -> None:
    """Replace the experts' matrices in `folder` by the hub's MXFP4 blocks, and in `model` by what these decode to.

    Blocks of a checkpoint hold two neighbours per byte, those of GGUF the numbers i and i + 16.
    """
    path = folder / "model.safetensors"
    tensors, own = load_file(path), dict(model.named_parameters())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        rows = tensors.pop(name).transpose(1, 2).contiguous().numpy()  # [experts, rows, columns]
        raw = quantize(rows, GGMLQuantizationType.MXFP4)
        decoded = dequantize(raw, GGMLQuantizationType.MXFP4)
        own[name].data = torch.from_numpy(decoded).transpose(1, 2).contiguous()
        blocks = raw.reshape(*rows.shape[:2], -1, 17)
        codes = np.concatenate((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), axis=-1)
        packed = codes[..., 0::2] | codes[..., 1::2] << 4
        tensors[f"{name}_blocks"] = torch.from_numpy(np.ascontiguousarray(packed))
        tensors[f"{name}_scales"] = torch.from_numpy(np.ascontiguousarray(blocks[..., 0]))
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


CLASSES: dict[str, Any] = {
    "cohere2moe": "Cohere2MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "maple": maple_model,
    "smallthinker": thinker_model,
    "mimo2": "MiMoV2FlashForCausalLM",
    "step35": StepModel,
}
LIMITED = ("maple", "step35")
"""Those whose experts have limits."""
CONFIGS: dict[str, Callable[[dict[str, Any], TinyModel], Any]] = {
    "cohere2moe": _cohere,
    "gpt-oss": _oss,
    "maple": _maple,
    "smallthinker": _thinker,
    "mimo2": _mimo,
    "step35": _step,
}
PUBLISHED: dict[str, Callable[[Path, Any], None]] = {
    "maple": _as_maple,
    "smallthinker": _as_thinker,
    "mimo2": _as_mimo,
    "step35": _as_step,
}
"""What makes a saved checkpoint one as the hub has it."""
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LIMITS = ("swiglu_limits", "swiglu_limits_shared")
_STEP_WIDE = {"moe_intermediate_size": 256, "share_expert_dim": 256}
_MIMO_UNEVEN = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "n_routed_experts": 6,
    "n_group": 3,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 19,
    "head_dim": 12,
    "v_head_dim": 13,
    "attention_value_scale": None,
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"],
    "layer_types": [
        f"{kind}_attention" for kind in ("full", "sliding", "full", "sliding", "sliding")
    ],
    "sliding_window": 7,
    "rms_norm_eps": 1e-5,
}
OTHERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("long", "maple", {"layers": 5, "seed": 3}),
    ("long", "smallthinker", {"layers": 5, "seed": 4}),
    ("softmax", "smallthinker", {"options": {"window": 0, "gates_by_sigmoid": False}, "seed": 5}),
    ("long", "step35", {"layers": 5, "seed": 3}),
    ("extra_blocks", "step35", {"layers": 5, "extra_block": True, "seed": 4}),
    ("llama3", "step35", {"layers": 4, "options": {"full_rope": _LLAMA3}, "seed": 5}),
    ("uneven", "mimo2", {"layers": 5, "options": _MIMO_UNEVEN, "seed": 2}),
    ("extra_block", "mimo2", {"layers": 3, "extra_block": True, "seed": 3}),
    ("unlimited", "step35", {"options": dict.fromkeys(_LIMITS), "seed": 6}),
)
"""More cases: their names, architectures, and how a model is otherwise."""
MIXED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("wide", "maple", {"layers": 4, "options": {"moe_intermediate_size": 256}}),
    ("wide", "step35", {"layers": 4, "options": _STEP_WIDE}),
)
"""The same of models that are quantised."""
MIMO_WIDE = {
    "moe_intermediate_size": 256,
    "intermediate_size": 256,
    "head_dim": 96,
    "v_head_dim": 64,
}
