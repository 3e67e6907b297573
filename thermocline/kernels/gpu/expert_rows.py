"""Device code of experts for tokens that are decoded: weights in registers times a few rows in float32.

Bound by the bytes of the weights. Each program reads some rows of one expert's matrix once, for up to
`num_pairs` pairs; a pair's sums are added in the same order whatever their number. Knows no launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline.kernels.gpu.activations import activated
from thermocline.kernels.gpu.unpack import plane_columns, row_sums, unpack_chunk


@triton.jit
def _add_chunk(
    sums: tl.tuple,
    planes: tl.tuple,
    x: tl.tuple,
    chunk: tl.tensor,
    cols: tl.constexpr,
    fmt: tl.constexpr,
    num_pairs: tl.constexpr,
) -> tl.tuple:
    """Return `sums` [n, 128] of each pair plus the chunk's products with x (pointers to rows)."""
    for plane in tl.static_range(2):
        column = plane_columns(chunk, plane, fmt)
        added: tl.tuple = ()
        for pair in tl.static_range(num_pairs):
            if cols % 256 == 0:
                values = tl.load(x[pair] + column)
            else:
                values = tl.load(x[pair] + column, mask=column < cols, other=0.0)
            added = added + (sums[pair] + planes[plane] * values[None, :],)  # noqa: RUF005 - Triton's tuples
        sums = added
    return sums


@triton.jit
def gate_up_rows_kernel(
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
    x: tl.tuple = ()
    gate: tl.tuple = ()
    up: tl.tuple = ()
    for pair in tl.static_range(num_pairs):
        # Beyond the tile's pairs its first is computed again, and not stored.
        token = tl.load(rows_ptr + first + tl.where(pair < count, pair, 0))
        x = x + (x_ptr + token.to(tl.int64) * cols,)  # noqa: RUF005 - Triton's tuples
        gate = gate + (tl.zeros((block_rows, 128), tl.float32),)  # noqa: RUF005 - Triton's tuples
        up = up + (tl.zeros((block_rows, 128), tl.float32),)  # noqa: RUF005 - Triton's tuples
    for chunk in tl.range(0, (cols + 255) // 256):
        if has_gate:
            planes = unpack_chunk(gate_row, live, chunk, gate_codebook_ptr, cols, gate_fmt)
            gate = _add_chunk(gate, planes, x, chunk, cols, gate_fmt, num_pairs)
        planes = unpack_chunk(up_row, live, chunk, up_codebook_ptr, cols, up_fmt)
        up = _add_chunk(up, planes, x, chunk, cols, up_fmt, num_pairs)
    for pair in tl.static_range(num_pairs):
        value = row_sums(gate[pair], gate_fmt)
        if is_scaled:
            value *= tl.load(gate_scale_ptr + first + pair, mask=pair < count, other=0.0)
        other = row_sums(up[pair], up_fmt)
        if has_bias:
            if has_gate:
                value += tl.load(gate_bias_ptr + slot * bias_stride + row, mask=live, other=0.0)
            other += tl.load(up_bias_ptr + slot * bias_stride + row, mask=live, other=0.0)
        value = activated(value, other, gate_limit, up_limit, activation)
        at = inner_ptr + (first + pair).to(tl.int64) * num_rows + row
        tl.store(at, value, mask=row < tl.where(pair < count, num_rows, 0))


@triton.jit
def down_rows_kernel(
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
    inner: tl.tuple = ()
    sums: tl.tuple = ()
    for pair in tl.static_range(num_pairs):
        index = first + tl.where(pair < count, pair, 0)
        inner = inner + (inner_ptr + index.to(tl.int64) * cols,)  # noqa: RUF005 - Triton's tuples
        sums = sums + (tl.zeros((block_rows, 128), tl.float32),)  # noqa: RUF005 - Triton's tuples
    for chunk in tl.range(0, (cols + 255) // 256):
        planes = unpack_chunk(down_row, live, chunk, codebook_ptr, cols, fmt)
        sums = _add_chunk(sums, planes, inner, chunk, cols, fmt, num_pairs)
    for pair in tl.static_range(num_pairs):
        index = (first + pair).to(tl.int64)
        scale = tl.load(scale_ptr + index, mask=pair < count, other=0.0)
        at = out_ptr + index * num_rows + row
        value = row_sums(sums[pair], fmt)
        if has_bias:
            value += tl.load(bias_ptr + slot * bias_stride + row, mask=live, other=0.0)
        value *= scale
        tl.store(at, value, mask=row < tl.where(pair < count, num_rows, 0))
