"""Tiny random models of DeepSeek-V4's kind, as `tiny_hf` takes them.

Knows their configuration, and how the hub's checkpoints are: experts in MXFP4, most other matrices in 8-bit floats.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

    from tests.oracle.toolchain.tiny_hf import TinyModel

FAINT = ("position_bias",)
"""What is added to numbers of a spread of one, and would hardly count beside them."""
_LIMIT = 1.0
"""Small enough to be reached."""
_YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
}
_BLOCK = 128
# What has scales by blocks of 128 rows and columns.
_BYTES = re.compile(
    r"\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.|\.shared_experts\.|\.[eh]_proj\."
)
_BYTES_HERE = re.compile(
    r"\.self_attn\.(q_a|q_b|kv|o_a|o_b)_proj\.|\.indexer\.q_b_proj\.|\.shared_experts\."
)
# What is in float32 beside them.
_SINGLE = re.compile(r"hc_|attn_sink|\.ape$|gate\.bias$|tid2eid$")
_SINGLE_HERE = re.compile(r"_hc\.|hc_head|\.sinks$|position_bias$")
_HUB_NAMES = {
    "model.embed_tokens.": "embed.",
    "model.hc_head.hc_": "hc_head_",
    "model.": "",
    "attn.norm.": "attn.kv_norm.",  # which transformers misnames when it saves
}


def _config(common: dict[str, Any], tiny: TinyModel) -> Any:
    wide = tiny.hidden >= 256
    kept = {
        name: value
        for name, value in common.items()
        if name not in ("num_experts", "rope_parameters")
    }
    own = {
        "num_key_value_heads": 1,
        "head_dim": 64 if wide else 32,
        "partial_rotary_factor": 0.25,
        "rope_parameters": dict(_YARN),
        "compress_rope_theta": 160000.0,
        "n_routed_experts": common["num_experts"],
        "n_shared_experts": 1,
        "layer_types": (_KINDS * tiny.layers)[: tiny.layers],
        "mlp_layer_types": ["hash_moe"] + ["moe"] * (tiny.layers - 1),
        "q_lora_rank": 256 if wide else 32,
        "o_groups": 2,
        "o_lora_rank": 128 if wide else 32,
        "sliding_window": 16,
        "index_n_heads": 16,
        "index_head_dim": 64,
        "index_topk": 4,
        "swiglu_limit": _LIMIT,
        "bos_token_id": None,
        "num_nextn_predict_layers": int(tiny.extra_block),
    }
    return transformers.DeepseekV4Config(**(kept | own | tiny.options))


def draw_tables(model: torch.nn.Module) -> None:
    """Give each token its experts, in any order."""
    for name, values in model.named_buffers():
        if name.endswith("tid2eid"):
            experts = model.config.n_routed_experts
            order = torch.rand(len(values), experts).argsort(dim=1)
            values.copy_(order[:, : values.shape[1]])


def save_as_published(folder: Path, model: torch.nn.Module, tiny: TinyModel) -> None:
    """Write the checkpoint as the hub has it, and fill the model with what the converter's file decodes to.

    Experts are in MXFP4, since the converter takes no others; the rest stays in float32 where the model is not `packed`.
    """
    path = folder / "model.safetensors"
    tensors = {_hub_name(name): values for name, values in load_file(path).items()}
    if tiny.extra_block:
        tensors |= _block(tensors, model.config)
    tensors = _with_packed_experts(tensors)
    if tiny.packed:
        tensors = _rounded(tensors)
    save_file(tensors, path, {"format": "pt"})
    _fill(model, packed=tiny.packed)
    _write_config(folder, model.config, tiny)


def _hub_name(name: str) -> str:
    for ours, theirs in _HUB_NAMES.items():
        name = name.replace(ours, theirs, 1) if ours in name else name
    return name


def _block(tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Return a block that guesses a further token, which has a window alone. Nothing computes it here."""
    hidden, first = config.hidden_size, config.layer_types.index("sliding_attention")
    own = {
        name.replace(f"layers.{first}.", "mtp.0.", 1): values.flip(0).contiguous()
        for name, values in tensors.items()
        if name.startswith(f"layers.{first}.") and not name.endswith("tid2eid")
    }
    own["mtp.0.ffn.gate.bias"] = 0.2 * torch.randn(config.n_routed_experts)
    for part in ("fn", "base", "scale"):
        own[f"mtp.0.hc_head_{part}"] = tensors[f"hc_head_{part}"].flip(0).contiguous()
    for part in ("e_proj", "h_proj"):
        own[f"mtp.0.{part}.weight"] = torch.randn(hidden, hidden) * (2 * hidden) ** -0.5
    for part in ("enorm", "hnorm", "norm"):
        own[f"mtp.0.{part}.weight"] = 1 + 0.1 * torch.randn(hidden)
    return own


def _with_packed_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same with experts in MXFP4: two neighbours in a byte, where GGUF has the numbers i and i + 16."""
    found = {}
    for name, values in tensors.items():
        if ".ffn.experts." not in name:
            found[name] = values
            continue
        raw = quantize(values.numpy(), GGMLQuantizationType.MXFP4)
        blocks = raw.reshape(len(values), -1, 17)
        codes = np.concatenate((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), axis=-1)
        packed = (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(len(values), -1)
        found[name] = torch.from_numpy(packed.view(np.int8).copy())
        scales = torch.from_numpy(np.ascontiguousarray(blocks[..., 0]))
        found[name.replace(".weight", ".scale")] = scales.view(torch.float8_e8m0fnu)
    return found


def _rounded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same with matrices in 8-bit floats where published ones are, and the rest in bfloat16 but for some."""
    found = {}
    for name, values in tensors.items():
        if values.dtype != torch.float32 or _SINGLE.search(name):
            found[name] = values
        elif _BYTES.search(name):
            found[name], found[name.replace(".weight", ".scale")] = _in_bytes(values)
        else:
            found[name] = values.bfloat16()
    return found


def _in_bytes(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 8-bit floats, and a power of two for each block of 128 rows and columns."""
    rows, columns = (-(-count // _BLOCK) for count in values.shape)
    scales = torch.empty(rows, columns)
    small = torch.empty_like(values, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            part = tuple(slice(n * _BLOCK, (n + 1) * _BLOCK) for n in (row, column))
            scales[row, column] = torch.exp2(torch.ceil(torch.log2(values[part].abs().max() / 448)))
            small[part] = (values[part] / scales[row, column]).to(torch.float8_e4m3fn)
    return small, scales.to(torch.float8_e8m0fnu)


def _fill(model: torch.nn.Module, *, packed: bool) -> None:
    """Round a model's weights to what the converter's file decodes to, by transformers' own names."""
    for name, values in model.named_parameters():
        if ".mlp.experts." in name:
            values.data = _through(values.detach(), GGMLQuantizationType.MXFP4)
        elif not packed or _SINGLE_HERE.search(name):
            continue
        elif _BYTES_HERE.search(name):
            small, scales = _in_bytes(values.detach())
            wide = scales.float().repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
            exact = small.float() * wide[: values.shape[0], : values.shape[1]]
            values.data = _through(exact, GGMLQuantizationType.Q8_0)
        else:
            values.data = values.detach().bfloat16().float()


def _through(values: torch.Tensor, kind: GGMLQuantizationType) -> torch.Tensor:
    return torch.from_numpy(dequantize(quantize(values.numpy(), kind), kind)).reshape(values.shape)


def _write_config(folder: Path, config: Any, tiny: TinyModel) -> None:
    """Name the settings as the hub's configuration does."""
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    rope = config.rope_parameters["compress"]
    ratios = {"sliding_attention": 0, "compressed_sparse_attention": 4}
    theirs = ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters")
    others = ("partial_rotary_factor", "mlp_bias", "transformers_version")
    settings = {name: value for name, value in saved.items() if name not in theirs + others}
    settings |= {
        "compress_ratios": [*(ratios.get(kind, 128) for kind in config.layer_types), 0],
        "num_hash_layers": config.mlp_layer_types.count("hash_moe"),
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "rope_theta": config.rope_parameters["main"]["rope_theta"],
        "topk_method": "noaux_tc",
        "expert_dtype": "fp4",
    }
    if rope["rope_type"] == "yarn":
        names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
        settings["rope_scaling"] = {name: rope[name] for name in names} | {"type": "yarn"}
    if tiny.packed:
        settings["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [_BLOCK, _BLOCK],
        }
    path.write_text(json.dumps(settings))


_KINDS = [
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
]
_UNEVEN = {
    "num_attention_heads": 6,
    "n_routed_experts": 5,
    "num_experts_per_tok": 3,
    "head_dim": 22,
    "partial_rotary_factor": 6.5 / 22,
    "rope_parameters": {"rope_type": "default"},
    "rope_theta": 1000.0,
    "compress_rope_theta": 4000.0,
    "q_lora_rank": 29,
    "o_lora_rank": 11,
    "index_n_heads": 13,
    "index_topk": 3,
    "sliding_window": 7,
    "layer_types": ["heavily_compressed_attention", *_KINDS[:2], _KINDS[1]],
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
    "swiglu_limit": 0.7,
    "hc_sinkhorn_iters": 3,
    "hc_eps": 1e-3,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
}
_ALL_ENTRIES = {"index_topk": 512}
# A rounded number changes which entries are chosen: of all of them none.
_WIDE = {"moe_intermediate_size": 256, "index_topk": 512}
DEEPSEEK4_PACKED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("small", "deepseek_v4", {"layers": 3}),
    ("uneven", "deepseek_v4", {"layers": 4, "options": _UNEVEN, "seed": 2}),
    ("all_entries", "deepseek_v4", {"layers": 3, "options": _ALL_ENTRIES, "seed": 3}),
    ("as_published", "deepseek_v4", {"layers": 4, "packed": True, "extra_block": True, "seed": 4}),
)
"""Cases: their names, architectures, and how a model is otherwise."""
DEEPSEEK4_MIXED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("wide", "deepseek_v4", {"layers": 3, "options": _WIDE}),
)
"""The same of models that are quantised."""
CLASSES = {"deepseek_v4": "DeepseekV4ForCausalLM"}
CONFIGS = {"deepseek_v4": _config}
