"""Products of tokens with matrices of raw blocks on the device, computed as the down matrices of experts.

Decoding multiplies in float32, prompts round both operands to bfloat16 (TF32 with an F16 or F32 matrix); a token's result
depends on nothing else. Only queues work. Knows no layer.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import torch

from thermocline.kernels.gpu.dequant import naive_dequantize
from thermocline.kernels.gpu.expert_ffn import DECODE, PROMPT, operand_type
from thermocline.kernels.gpu.formats import WIDE_FORMATS

if TYPE_CHECKING:
    from torch import Tensor

    from thermocline.kernels.gpu.slots import SlotMatrix

# Rows of x up to which what a launch needs is made once: as many small launches take longer than the product.
_MAX_KEPT: Final = 256


def block_product(matrix: SlotMatrix, x: Tensor, *, prompt: bool, scale: float = 1.0) -> Tensor:
    """Return float32 [tokens, rows]: x [tokens, cols] times the transposed matrix in the only slot, times `scale`."""
    scales = _constant(1 if len(x) > _MAX_KEPT else len(x), scale, x.device)
    return _product(matrix, x[None], scales, prompt=prompt)[0]


def head_products(matrix: SlotMatrix, x: Tensor, scales: Tensor | None, *, prompt: bool) -> Tensor:
    """Return float32 [tokens, heads, rows]: x [tokens, heads, cols] times each head's transposed matrix.

    Head h has slot h; scales: float32 [heads], a factor on each one's products, None for 1.
    """
    if scales is None:
        scales = x.new_ones(x.shape[1])
    return _product(matrix, x.transpose(0, 1), scales, prompt=prompt).transpose(0, 1)


def _product(matrix: SlotMatrix, x: Tensor, scales: Tensor, *, prompt: bool) -> Tensor:
    """Return float32 [slots, tokens, rows] of x [slots, tokens, cols]; scales: float32 [slots], or of each row of x."""
    form, (num_slots, num_tokens) = PROMPT if prompt else DECODE, x.shape[:2]
    num_rows = num_slots * num_tokens
    tile_tokens = form.pairs_per_tile(num_tokens, 1)
    out = torch.empty((num_rows, matrix.rows), dtype=torch.float32, device=x.device)
    make = _tiles if num_rows > _MAX_KEPT else _kept_tiles
    tiles = make(num_slots, num_tokens, tile_tokens, x.device)
    # The kernel knows no strides, and reshaping one slot or one token would keep them.
    given = x.to(operand_type(form, matrix)).contiguous().view(num_rows, -1)
    if len(scales) != num_rows:
        scales = scales[:, None].expand(-1, num_tokens).contiguous().view(-1)
    form.down[form.grid(len(tiles), matrix.rows)](
        *(out, given, matrix.raw, matrix.codebook, tiles),
        *(scales, out, matrix.raw.stride(0), 0),
        row_bytes=matrix.raw.shape[2],
        num_rows=matrix.rows,
        cols=matrix.cols,
        fmt=matrix.format.name,
        has_bias=False,
        **form.options(tile_tokens),
    )
    return out.view(num_slots, num_tokens, -1)


def _tiles(num_slots: int, num_tokens: int, tile_tokens: int, device: torch.device) -> Tensor:
    """Return int32 [tiles, 3]: the slot, first row and number of rows of each tile."""
    first = torch.arange(0, num_tokens, tile_tokens, dtype=torch.int32, device=device)
    slots = torch.arange(num_slots, dtype=torch.int32, device=device)[:, None]
    counts = (num_tokens - first).clamp_max(tile_tokens)
    starts = slots * num_tokens + first
    parts = (slots.expand_as(starts), starts, counts.expand_as(starts))
    return torch.stack(parts, -1).view(-1, 3)


@cache
def _kept_tiles(num_slots: int, num_tokens: int, tile_tokens: int, device: torch.device) -> Tensor:
    # Captured graphs read it again, so that it stays for good.
    with torch.inference_mode(mode=False):
        return _settled(_tiles(num_slots, num_tokens, tile_tokens, device))


@cache
def _constant(count: int, value: float, device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):
        return _settled(torch.full((count,), value, device=device))


def _settled(made: Tensor) -> Tensor:
    """Return what any stream may read from now on."""
    if made.is_cuda:
        torch.cuda.current_stream(made.device).synchronize()
    return made


def naive_block_product(
    matrix: SlotMatrix, x: Tensor, *, prompt: bool, scale: float = 1.0
) -> Tensor:
    """Twin of `block_product` in plain torch, on any device."""
    return _naive_product(matrix, x[None], prompt=prompt)[0] * scale


def naive_head_products(
    matrix: SlotMatrix, x: Tensor, scales: Tensor | None, *, prompt: bool
) -> Tensor:
    """Twin of `head_products` in plain torch, on any device."""
    found = _naive_product(matrix, x.transpose(0, 1), prompt=prompt)
    if scales is not None:
        found = found * scales[:, None, None]
    return found.transpose(0, 1)


def _naive_product(matrix: SlotMatrix, x: Tensor, *, prompt: bool) -> Tensor:
    is_rounded = prompt and matrix.format.name not in WIDE_FORMATS
    kind = torch.bfloat16 if is_rounded else torch.float32
    weights = naive_dequantize(matrix.raw, matrix.format)
    return x.to(kind).float() @ weights.to(kind).float().transpose(-1, -2)
