"""Turns a saved model's matrices into NVFP4 as ModelOpt publishes them: packed nibbles and three kinds of scales.

A block of 16 weights is 4-bit floats times a scale of 8 bits times the matrix's own float32 (`weight_scale_2`).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_LARGEST_SCALE = 448.0
_BLOCK = 16
_BLOCKS_OF = 64  # that llama.cpp keeps together; it converts no other rows
# What published checkpoints quantise of these architectures.
_QUANTISED = re.compile(r"\.(?:[qkvo]_proj|(?:gate|up|down)_proj)\.weight$")
_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)$")


def quantise_checkpoint(folder: Path) -> None:
    """Replace the attention's and the experts' matrices of the model in `folder`, and say so in its config."""
    path = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, values in _unstacked(load_file(path)).items():
        if _QUANTISED.search(name) and values.shape[-1] % _BLOCKS_OF == 0:
            tensors |= _packed(name.removesuffix("weight"), values)
        else:
            tensors[name] = values
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_algo": "NVFP4", "quant_method": "modelopt"}
    (folder / "config.json").write_text(json.dumps(config))


def _unstacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give each expert's matrices tensors of their own, whose scales are their own."""
    result = {}
    for name, values in tensors.items():
        if (match := _STACKED.match(name)) is None:
            result[name] = values
            continue
        for expert, matrix in enumerate(values):
            stem = f"{match[1]}.{expert}"
            if match[2] == "down_proj":
                result[f"{stem}.down_proj.weight"] = matrix.contiguous()
            else:
                gate, up = matrix.chunk(2)
                result[f"{stem}.gate_proj.weight"] = gate.contiguous()
                result[f"{stem}.up_proj.weight"] = up.contiguous()
    return result


def _packed(stem: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    own = values.abs().max() / (_MAGNITUDES[-1] * _LARGEST_SCALE)
    blocks = values.reshape(len(values), -1, _BLOCK)
    scales = (blocks.abs().amax(-1) / _MAGNITUDES[-1] / own).to(torch.float8_e4m3fn)
    units = blocks / (scales.float() * own).clamp_min(1e-30)[..., None]
    codes = (units.abs()[..., None] - _MAGNITUDES).abs().argmin(-1) + 8 * (units < 0)
    nibbles = codes.to(torch.uint8).reshape(len(values), -1)
    return {
        f"{stem}weight": nibbles[:, ::2] | (nibbles[:, 1::2] << 4),
        f"{stem}weight_scale": scales,
        f"{stem}weight_scale_2": own.reshape(()),
        f"{stem}input_scale": torch.tensor(0.01),
    }
