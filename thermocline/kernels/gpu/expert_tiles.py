"""Device code of experts for prompts: weights, unpacked in registers, times tiles of tokens on the matrix units.

Weights are the left operand, so that few tokens still fill a tile. Operands are rounded to bfloat16, or
to TF32 where a matrix is F16 or F32, of which bfloat16 would drop digits; sums are float32, chunk by chunk.
Knows no launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline.kernels.gpu.activations import activated
from thermocline.kernels.gpu.unpack import plane_columns, unpack_chunk


@triton.jit
def _product(
    row: tl.tensor,
    live: tl.tensor,
    codebook: tl.tensor,
    x: tl.tensor,
    wanted: tl.tensor,
    cols: tl.constexpr,
    fmt: tl.constexpr,
) -> tl.tensor:
    """Return float32 [n, tokens]: rows of blocks (pointers [n]) times x (pointers [tokens] to rows)."""
    sums = tl.zeros((row.shape[0], x.shape[0]), tl.float32)
    for chunk in tl.range(0, (cols + 255) // 256):
        planes = unpack_chunk(row, live, chunk, codebook, cols, fmt)
        for plane in tl.static_range(2):
            column = plane_columns(chunk, plane, fmt)[None, :]
            there = wanted[:, None]
            if cols % 256 != 0:
                there = there & (column < cols)
            values = tl.load(x[:, None] + column, mask=there, other=0.0)
            weights = planes[plane].to(values.dtype)
            sums = tl.dot(weights, tl.trans(values), sums, input_precision="tf32")
    return sums


@triton.jit
def gate_up_tiles_kernel(
    inner_ptr: tl.tensor,
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    gate_codebook_ptr: tl.tensor,
    up_codebook_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    gate_scale_ptr: tl.tensor,
    gate_bias_ptr: tl.tensor,
    up_bias_ptr: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    bias_stride: tl.tensor,
    gate_limit: tl.tensor,
    up_limit: tl.tensor,
    gate_row_bytes: tl.constexpr,
    up_row_bytes: tl.constexpr,
    num_rows: tl.constexpr,
    cols: tl.constexpr,
    gate_fmt: tl.constexpr,
    up_fmt: tl.constexpr,
    is_scaled: tl.constexpr,
    activation: tl.constexpr,
    has_gate: tl.constexpr,
    has_bias: tl.constexpr,
    block_rows: tl.constexpr,
    num_pairs: tl.constexpr,
) -> None:
    """inner[pair] = activation of gate x[row] and up x[row], for a tile's pairs and `block_rows` of its rows.

    is_scaled: gate x[row] is multiplied by gate_scale[pair] first. has_gate, has_bias: where not, those pointers are
    not read. bias_stride: numbers from one slot's biases to the next. gate_limit, up_limit: see `activated`.
    """
    tile = tiles_ptr + tl.program_id(0) * 3
    slot, first, count = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if count == 0:
        return
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    live = row < num_rows
    gate_row = gate_ptr + slot * gate_stride + row.to(tl.int64) * gate_row_bytes
    up_row = up_ptr + slot * up_stride + row.to(tl.int64) * up_row_bytes
    pair = tl.arange(0, num_pairs)
    wanted = pair < count
    token = tl.load(rows_ptr + first + pair, mask=wanted, other=0)
    x = x_ptr + token.to(tl.int64) * cols
    # One after the other: both at once need more registers than there are.
    gate = tl.zeros((block_rows, num_pairs), tl.float32)
    if has_gate:
        gate = _product(gate_row, live, gate_codebook_ptr, x, wanted, cols, gate_fmt)
    if is_scaled:
        gate *= tl.load(gate_scale_ptr + first + pair, mask=wanted, other=0.0)[None, :]
    up = _product(up_row, live, up_codebook_ptr, x, wanted, cols, up_fmt)
    if has_bias:
        if has_gate:
            gate_bias = tl.load(gate_bias_ptr + slot * bias_stride + row, mask=live, other=0.0)
            gate += gate_bias[:, None]
        up += tl.load(up_bias_ptr + slot * bias_stride + row, mask=live, other=0.0)[:, None]
    at = inner_ptr + (first + pair).to(tl.int64)[None, :] * num_rows + row[:, None]
    value = activated(gate, up, gate_limit, up_limit, activation)
    tl.store(at, value, mask=live[:, None] & wanted[None, :])


@triton.jit
def down_tiles_kernel(
    out_ptr: tl.tensor,
    inner_ptr: tl.tensor,
    down_ptr: tl.tensor,
    codebook_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    down_stride: tl.tensor,
    bias_stride: tl.tensor,
    row_bytes: tl.constexpr,
    num_rows: tl.constexpr,
    cols: tl.constexpr,
    fmt: tl.constexpr,
    has_bias: tl.constexpr,
    block_rows: tl.constexpr,
    num_pairs: tl.constexpr,
) -> None:
    """out[pair] = scale[pair] * down inner[pair], for a tile's pairs and `block_rows` of its rows.

    has_bias: the slot's bias is added to down inner[pair] first.
    """
    tile = tiles_ptr + tl.program_id(0) * 3
    slot, first, count = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if count == 0:
        return
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    live = row < num_rows
    down_row = down_ptr + slot * down_stride + row.to(tl.int64) * row_bytes
    pair = tl.arange(0, num_pairs)
    wanted = pair < count
    index = (first + pair).to(tl.int64)
    sums = _product(down_row, live, codebook_ptr, inner_ptr + index * cols, wanted, cols, fmt)
    if has_bias:
        sums += tl.load(bias_ptr + slot * bias_stride + row, mask=live, other=0.0)[:, None]
    scale = tl.load(scale_ptr + index, mask=wanted, other=0.0)
    at = out_ptr + index[None, :] * num_rows + row[:, None]
    tl.store(at, sums * scale[None, :], mask=live[:, None] & wanted[None, :])
