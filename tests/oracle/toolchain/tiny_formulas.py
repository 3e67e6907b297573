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

from tests.oracle.hf_formulas import maple_model, thinker_config, thinker_model

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
            if name.endswith("experts.gate_up_proj"):
                values.mul_(8.0)
            elif name.endswith("experts.down_proj"):
                values.mul_(0.05)


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
}
LIMITED = ("maple",)
"""Those whose experts have limits."""
CONFIGS: dict[str, Callable[[dict[str, Any], TinyModel], Any]] = {
    "cohere2moe": _cohere,
    "gpt-oss": _oss,
    "maple": _maple,
    "smallthinker": _thinker,
}
PUBLISHED: dict[str, Callable[[Path, Any], None]] = {
    "maple": _as_maple,
    "smallthinker": _as_thinker,
}
"""What makes a saved checkpoint one as the hub has it."""
OTHERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("long", "maple", {"layers": 5, "seed": 3}),
    ("long", "smallthinker", {"layers": 5, "seed": 4}),
    ("softmax", "smallthinker", {"options": {"window": 0, "gates_by_sigmoid": False}, "seed": 5}),
)
"""More cases: their names, architectures, and how a model is otherwise."""
MIXED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("wide", "maple", {"layers": 4, "options": {"moe_intermediate_size": 256}}),
)
"""The same of models that are quantised."""
