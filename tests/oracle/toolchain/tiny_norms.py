"""Tiny random models whose norms take the mean off, as `tiny_hf` takes them.

Knows their configurations, and how the hub names settings and tensors.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import transformers
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.oracle.toolchain.tiny_hf import TinyModel


def _dbrx(common: dict[str, Any], tiny: TinyModel) -> Any:
    """options: of its configuration of attention or of the feed-forward."""
    attention = {
        "kv_n_heads": common["num_key_value_heads"],
        "clip_qkv": 1.2,
        "rope_theta": common["rope_parameters"]["rope_theta"],
    }
    experts = {
        "ffn_hidden_size": common["moe_intermediate_size"],
        "moe_num_experts": common["num_experts"],
        "moe_top_k": common["num_experts_per_tok"],
        "moe_normalize_expert_weights": 1.0,
    }
    for part in (attention, experts):
        part |= {name: value for name, value in tiny.options.items() if name in part}
    return transformers.DbrxConfig(
        d_model=common["hidden_size"],
        n_heads=tiny.options.get("n_heads", common["num_attention_heads"]),
        n_layers=common["num_hidden_layers"],
        max_seq_len=common["max_position_embeddings"],
        vocab_size=common["vocab_size"],
        attn_config=attention,
        ffn_config=experts,
        rope_parameters=common["rope_parameters"],
        attn_implementation="eager",
        dtype="float32",
        eos_token_id=common["eos_token_id"],
        pad_token_id=common["pad_token_id"],
    )


def _phimoe(common: dict[str, Any], tiny: TinyModel) -> Any:
    left_out = ("num_experts", "moe_intermediate_size")
    kept = {name: value for name, value in common.items() if name not in left_out}
    own = {
        "num_local_experts": common["num_experts"],
        "intermediate_size": common["moe_intermediate_size"],
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "lm_head_bias": True,
        "bos_token_id": None,
        "rope_parameters": _stretched(tiny.hidden // 8),
    }
    return transformers.PhimoeConfig(**(kept | own | tiny.options))


def _stretched(count: int) -> dict[str, Any]:
    """Of a context of 512 that was 64, with the magnitude that the converter writes, and one list of factors for both.

    transformers' model takes the short one always; see `hf_norms`.
    """
    factors = [1.0 + 0.5 * index for index in range(count)]
    magnitude = math.sqrt(1 + math.log(512 / 64) / math.log(64))
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
        "short_factor": factors,
        "long_factor": factors,
        "short_mscale": magnitude,
        "long_mscale": magnitude,
    }


def _as_phimoe(folder: Path, config: Any) -> None:
    """The hub's checkpoints have experts apart, beside one another, and call the rest of them otherwise."""
    path, tensors = folder / "model.safetensors", {}
    for name, values in load_file(folder / "model.safetensors").items():
        start, _, end = name.partition("mlp.")
        if not end:
            tensors[name] = values
        elif end.startswith("router."):
            tensors[f"{start}block_sparse_moe.gate.weight"] = values
        else:
            parts = (
                {"w2": values}
                if "down" in end
                else dict(zip(("w1", "w3"), values.chunk(2, 1), strict=True))
            )
            for role, matrices in parts.items():
                for index, matrix in enumerate(matrices):
                    own = f"{start}block_sparse_moe.experts.{index}.{role}.weight"
                    tensors[own] = matrix.contiguous()
    save_file(tensors, path, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    settings["architectures"] = ["PhiMoEForCausalLM"]
    (folder / "config.json").write_text(json.dumps(settings), "utf-8")


_DBRX_UNEVEN = {
    "n_heads": 3,
    "kv_n_heads": 3,
    "ffn_hidden_size": 19,
    "moe_num_experts": 5,
    "moe_top_k": 3,
    "clip_qkv": 8.0,
}
_PHIMOE_UNEVEN = {
    "num_key_value_heads": 1,
    "intermediate_size": 19,
    "num_local_experts": 7,
    "attention_bias": False,
    "lm_head_bias": False,
}
PHIMOE_WIDE = {"intermediate_size": 256}
OTHERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("small", "dbrx", {}),
    ("uneven", "dbrx", {"hidden": 30, "layers": 3, "options": _DBRX_UNEVEN, "seed": 2}),
    ("small", "phimoe", {}),
    ("uneven", "phimoe", {"hidden": 64, "layers": 3, "options": _PHIMOE_UNEVEN, "seed": 2}),
)
"""Cases: their names, architectures, and how a model is otherwise."""
MIXED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("wide", "dbrx", {"options": {"ffn_hidden_size": 256}}),
)
"""The same of models that are quantised."""
CLASSES = {"dbrx": "DbrxForCausalLM", "phimoe": "PhimoeForCausalLM"}
CONFIGS: dict[str, Callable[[dict[str, Any], TinyModel], Any]] = {"dbrx": _dbrx, "phimoe": _phimoe}
PUBLISHED: dict[str, Callable[[Path, Any], None]] = {"phimoe": _as_phimoe}
"""What makes a saved checkpoint one as the hub has it."""
