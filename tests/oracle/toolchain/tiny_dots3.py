"""Tiny random models of dots3-note's kind, as `tiny_hf` takes them.

Knows their configuration, and under which names the hub's has it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import transformers

if TYPE_CHECKING:
    from pathlib import Path

    from tests.oracle.toolchain.tiny_hf import TinyModel

_KINDS = ("full_attention", "sliding_attention", "sliding_attention", "full_attention")
_SWA = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 48,
    "kv_lora_rank": 96,
    "head_dim": 56,
    "qk_nope_head_dim": 40,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "rope_theta": 500.0,
}
_WITHOUT = ("num_experts", "head_dim", "rope_parameters")


def _config(common: dict[str, Any], tiny: TinyModel) -> Any:
    wide = tiny.hidden >= 256
    kept = {name: value for name, value in common.items() if name not in _WITHOUT}
    own = {
        "num_key_value_heads": common["num_attention_heads"],
        "n_routed_experts": common["num_experts"],
        "n_shared_experts": 1,
        "shared_experts_intermediate_size": common["moe_intermediate_size"],
        "routed_scaling_factor": 2.5,
        "intermediate_size": 256 if wide else 64,
        "first_k_dense_replace": 1,
        "layer_types": list(_KINDS[: tiny.layers]),
        "q_lora_rank": 256 if wide else 48,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "head_dim": 48,
        "v_head_dim": 32,
        "sliding_window": 16,
        "rope_theta": 10000.0,
        "index_n_heads": 16,
        "index_head_dim": 64,
        "index_topk": 8,
        "bos_token_id": None,
    }
    near = {f"swa_{name}": value for name, value in _SWA.items()}
    if wide:
        near["swa_q_lora_rank"] = 256
    return transformers.Dots3NoteTextConfig(**(kept | own | near | tiny.options))


def _as_published(folder: Path, config: Any) -> None:
    """Name the settings as the hub's configuration does."""
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    near = config.per_layer_config["sliding_attention"]
    ropes = config.rope_parameters
    theirs = ("per_layer_config", "rope_parameters", "mlp_layer_types", "transformers_version")
    settings = {name: value for name, value in saved.items() if name not in theirs}
    settings |= {
        "architectures": ["Dots3NoteForCausalLM"],
        "model_type": "dots3_note",
        "layer_types": [
            kind.replace("indexed_attention", "full_attention") for kind in config.layer_types
        ],
        "first_k_dense_replace": config.mlp_layer_types.count("dense"),
        "moe_shared_expert_intermediate_size": config.shared_experts_intermediate_size,
        "rope_theta": ropes["indexed_attention"]["rope_theta"],
        "sliding_window_size": config.sliding_window,
        "apply_mla_qkv_lora_rescale": True,
        "k_rope_only_layernorm": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_dsa": True,
        **{
            f"{part}_config": {"adapter_out_dim": config.hidden_size}
            for part in ("vision", "audio")
        },
    }
    for name in _SWA:
        if name != "rope_theta":
            settings[f"swa_{name}"] = getattr(near, name)
    settings["swa_rope_theta"] = ropes["sliding_attention"]["rope_theta"]
    path.write_text(json.dumps(settings))


_UNEVEN = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "n_routed_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 19,
    "shared_experts_intermediate_size": 19,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "q_lora_rank": 29,
    "kv_lora_rank": 37,
    "qk_nope_head_dim": 11,
    "qk_rope_head_dim": 6,
    "head_dim": 17,
    "v_head_dim": 13,
    "first_k_dense_replace": 2,
    "index_n_heads": 13,
    "index_head_dim": 18,
    "index_topk": 6,
    "sliding_window": 7,
    "rms_norm_eps": 1e-5,
    "swa_num_attention_heads": 5,
    "swa_num_key_value_heads": 5,
    "swa_q_lora_rank": 29,
    "swa_kv_lora_rank": 22,
    "swa_head_dim": 13,
    "swa_qk_nope_head_dim": 7,
    "swa_qk_rope_head_dim": 6,
    "swa_v_head_dim": 9,
}
_ALL_POSITIONS = {"index_topk": 512, "first_k_dense_replace": 0}
# A rounded number changes which positions are chosen: of all of them none.
_WIDE = {
    "moe_intermediate_size": 256,
    "shared_experts_intermediate_size": 256,
    "index_topk": 512,
}
OTHERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("small", "dots3note", {"layers": 4}),
    ("uneven", "dots3note", {"layers": 4, "options": _UNEVEN, "seed": 2}),
    ("all_positions", "dots3note", {"layers": 3, "options": _ALL_POSITIONS, "seed": 3}),
)
"""Cases: their names, architectures, and how a model is otherwise."""
MIXED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("wide", "dots3note", {"layers": 3, "options": _WIDE}),
)
"""The same of models that are quantised."""
CLASSES = {"dots3note": "Dots3NoteForCausalLM"}
CONFIGS = {"dots3note": _config}
PUBLISHED = {"dots3note": _as_published}
"""What makes a saved checkpoint one as the hub has it."""
