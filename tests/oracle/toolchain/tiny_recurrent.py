"""Tiny random models with short convolutions or Mamba2, as `tiny_hf` takes them: LFM2, Nemotron 3 and Granite 4 in small.

Knows their configurations, and what the hub's checkpoints have that transformers does not write.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.oracle.toolchain.tiny_routers import GRANITE_FACTORS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.oracle.toolchain.tiny_hf import TinyModel


def _lfm2_dense(common: dict[str, Any], tiny: TinyModel) -> Any:
    own = {
        "norm_eps": 1e-5,
        "intermediate_size": 64,
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
        "layer_types": ["full_attention" if n % 3 == 1 else "conv" for n in range(tiny.layers)],
        "tie_word_embeddings": True,
    }
    unknown = ("head_dim", "rms_norm_eps", "hidden_act", "num_experts", "num_experts_per_tok")
    kept = {name: value for name, value in common.items() if name not in unknown}
    del kept["moe_intermediate_size"], kept["experts_implementation"]
    return transformers.Lfm2Config(**(kept | own | tiny.options))


def _lfm2(common: dict[str, Any], tiny: TinyModel) -> Any:
    kinds = ["full_attention" if n % 3 == 1 else "conv" for n in range(tiny.layers)]
    own = {
        "norm_eps": 1e-5,
        "intermediate_size": 64,
        "num_dense_layers": 1,
        "conv_L_cache": 3,
        "layer_types": kinds,
        "tie_word_embeddings": True,  # the converter knows no head
    }
    unknown = ("head_dim", "rms_norm_eps", "hidden_act")
    kept = {name: value for name, value in common.items() if name not in unknown}
    return transformers.Lfm2MoeConfig(**(kept | own | tiny.options))


def _nemotron(common: dict[str, Any], tiny: TinyModel) -> Any:
    pattern = ("M-M*-" if tiny.arch == "nemotron_h" else "MEM*E") * tiny.layers
    own = {
        "hybrid_override_pattern": pattern[: tiny.layers],
        "layer_norm_epsilon": 1e-5,
        # Decoded tokens have no least step there, and files name none.
        "time_step_min": 1e-9,
        "ssm_state_size": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "intermediate_size": 48,
        "n_routed_experts": common["num_experts"],
        "moe_shared_expert_intermediate_size": 48,
        "routed_scaling_factor": 2.5,
    }
    unknown = ("num_experts", "num_hidden_layers", "rope_parameters", "hidden_act", "rms_norm_eps")
    kept = {name: value for name, value in common.items() if name not in unknown}
    return transformers.NemotronHConfig(**(kept | own | tiny.options))


def add_nemotron_block(folder: Path, config: Any) -> None:
    """Add a block of attention and experts, in two parts, as Nemotron-3's checkpoints have it."""
    path, pattern = folder / "model.safetensors", config.hybrid_override_pattern
    tensors, hidden = load_file(path), config.hidden_size
    added = {}
    for part, kind in enumerate("*E"):
        layer = f"layers.{pattern.index(kind)}."
        for name, values in tensors.items():
            start, found, rest = name.partition(layer)
            if found and start in ("backbone.", "model."):
                added[f"mtp.layers.{part}.{rest}"] = values.flip(0).contiguous()
    added["mtp.layers.0.eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * hidden**-0.5
    for name in ("0.enorm", "0.hnorm", "1.final_layernorm"):
        added[f"mtp.layers.{name}.weight"] = 1 + torch.randn(hidden) * 0.1
    save_file(tensors | added, path, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"num_nextn_predict_layers": 1}))


def _as_nemotron(folder: Path, config: Any) -> None:
    """Name blocks by letters, and leave out what says something of experts, as older configurations do."""
    path, pattern = folder / "config.json", config.hybrid_override_pattern
    settings = json.loads(path.read_text())
    of_experts = ("expert", "moe", "n_group", "topk_group", "mtp_", "layers_block_type")
    kept = {
        name: value
        for name, value in settings.items()
        if name == "n_groups" or not any(part in name for part in of_experts)
    }
    own = {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
    path.write_text(json.dumps(kept | own))


def _granite(common: dict[str, Any], tiny: TinyModel) -> Any:
    own = {
        "num_local_experts": 4,
        "intermediate_size": 32,
        "shared_intermediate_size": 48,
        **GRANITE_FACTORS,
        "layer_types": [
            "full_attention" if n % 3 == 1 else "linear_attention" for n in range(tiny.layers)
        ],
        "mamba_n_heads": 4,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
    }
    unknown = ("num_experts", "moe_intermediate_size", "head_dim")
    kept = {name: value for name, value in common.items() if name not in unknown}
    return transformers.GraniteMoeHybridConfig(**(kept | own | tiny.options))


def _as_granite(folder: Path, config: Any) -> None:
    """Name kinds of layers as the published configurations do."""
    path = folder / "config.json"
    names = {"full_attention": "attention", "linear_attention": "mamba"}
    kinds = {"layer_types": [names[kind] for kind in config.layer_types]}
    path.write_text(json.dumps(json.loads(path.read_text()) | kinds))


CLASSES = {
    "granitehybrid": "GraniteMoeHybridForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "nemotron_h_moe": "NemotronHForCausalLM",
}
CONFIGS = {
    "granitehybrid": _granite,
    "lfm2": _lfm2_dense,
    "lfm2moe": _lfm2,
    "nemotron_h": _nemotron,
    "nemotron_h_moe": _nemotron,
}
PUBLISHED = {"granitehybrid": _as_granite, "nemotron_h": _as_nemotron}
"""What makes a saved checkpoint one as the hub has it, where transformers writes another."""
