"""Products of tokens with one matrix that lies on the device as its blocks: an expert's down, of one expert.

Decoding multiplies in float32, prompts round both operands to bfloat16 (TF32 with an F16 matrix); a token's result
depends on nothing else. Only queues work. Knows no layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from thermocline.kernels.gpu.dequant import naive_dequantize
from thermocline.kernels.gpu.expert_rows import down_rows_kernel
from thermocline.kernels.gpu.expert_tiles import down_tiles_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from thermocline.kernels.gpu.slots import SlotMatrix

_NUM_WARPS = 4


def block_product(matrix: SlotMatrix, x: Tensor, *, prompt: bool) -> Tensor:
    """Return float32 [tokens, rows]: x [tokens, cols] times the transposed matrix in the only slot."""
    num_tokens, rows = len(x), matrix.rows
    kernel, block_rows, sizes = (
        (down_tiles_kernel, 64, (16, 32, 64)) if prompt else (down_rows_kernel, 16, (1, 2, 4))
    )
    tile_tokens = next((size for size in sizes if size >= num_tokens), sizes[-1])
    out = torch.empty((num_tokens, rows), dtype=torch.float32, device=x.device)
    first = torch.arange(0, num_tokens, tile_tokens, dtype=torch.int32, device=x.device)
    count = (num_tokens - first).clamp_max(tile_tokens)
    tiles = torch.stack((torch.zeros_like(first), first, count), 1)
    kernel[triton.cdiv(rows, block_rows), len(tiles)](
        *(out, x.to(_operand(matrix, prompt=prompt)), matrix.raw, tiles, x.new_ones(num_tokens)),
        matrix.raw.stride(0),
        row_bytes=matrix.raw.shape[2],
        num_rows=rows,
        cols=matrix.cols,
        fmt=matrix.format.name,
        block_rows=block_rows,
        num_pairs=tile_tokens,
        num_warps=_NUM_WARPS,
    )
    return out


def naive_block_product(matrix: SlotMatrix, x: Tensor, *, prompt: bool) -> Tensor:
    """Twin of `block_product` in plain torch, on any device."""
    weights, kind = naive_dequantize(matrix.raw[0], matrix.format), _operand(matrix, prompt=prompt)
    return x.to(kind).float() @ weights.to(kind).float().t()


def _operand(matrix: SlotMatrix, *, prompt: bool) -> torch.dtype:
    is_rounded = prompt and matrix.format.name != "F16"
    return torch.bfloat16 if is_rounded else torch.float32
