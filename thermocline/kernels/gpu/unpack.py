"""Device code that turns raw blocks into weights, in registers: a chunk of 256 columns of some rows at a time.

A chunk comes as two planes of 128 columns, since formats of four bits keep two weights in a byte: plane 0
holds the low halves, plane 1 the high ones. Both hold runs of consecutive columns, which `plane_columns`
names; a product may take columns in any order, so that nothing is moved. Knows no operator.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline.kernels.gpu.block_loads import half
from thermocline.kernels.gpu.unpack_codebooks import iq1, iq2, iq3
from thermocline.kernels.gpu.unpack_k_quants import q2_k, q3_k, q6_k, tq1_0, tq2_0, two_level
from thermocline.kernels.gpu.unpack_nibbles import nibbles

CHUNK = 256
"""Columns that are unpacked together: the longest block of any format."""


@triton.jit
def plane_columns(chunk: tl.tensor, plane: tl.constexpr, fmt: tl.constexpr) -> tl.tensor:
    """Return int32 [128]: the columns of a chunk's plane, in the order in which `unpack_chunk` has them."""
    i = tl.arange(0, 128)
    # Columns of a plane that come before the other plane's. Here, not in a function: what a function returns is no
    # constant in Triton 3.6.
    is_four: tl.constexpr = fmt == "Q4_0" or fmt == "Q4_1" or fmt == "IQ4_NL" or fmt == "IQ4_XS"
    is_sixteens: tl.constexpr = is_four or fmt == "Q5_0" or fmt == "Q5_1" or fmt == "MXFP4"
    is_two_level: tl.constexpr = fmt == "Q4_K" or fmt == "Q5_K"
    short: tl.constexpr = 8 if fmt == "NVFP4" else (16 if is_sixteens else 32)
    long: tl.constexpr = 64 if fmt == "Q6_K" else 128
    run: tl.constexpr = short if fmt == "NVFP4" or is_sixteens or is_two_level else long
    return chunk * 256 + i // run * (2 * run) + i % run + plane * run


@triton.jit
def unpack_chunk(
    row: tl.tensor,
    live: tl.tensor,
    chunk: tl.tensor,
    codebook: tl.tensor,
    cols: tl.constexpr,
    fmt: tl.constexpr,
) -> tl.tuple:
    """Return two planes, float32 [n, 128] each; columns beyond `cols` are zeros, rows not `live` too.

    row: pointers [n] to the first byte of each row; live: bool [n], rows that may be read; codebook: what
    `device_codebook` returns, any pointer for formats without one.
    """
    is_four: tl.constexpr = fmt == "Q4_0" or fmt == "Q4_1" or fmt == "IQ4_NL" or fmt == "IQ4_XS"
    is_five: tl.constexpr = fmt == "Q5_0" or fmt == "Q5_1"
    if fmt == "Q4_K" or fmt == "Q5_K":
        low, high = two_level(row, live, chunk, fmt)
    elif fmt == "Q6_K":
        low, high = q6_k(row, live, chunk)
    elif is_four or is_five or fmt == "MXFP4" or fmt == "NVFP4":
        low, high = nibbles(row, live, chunk, codebook, cols, fmt)
    else:
        low = _side(row, live, chunk, codebook, 0, cols, fmt)
        high = _side(row, live, chunk, codebook, 1, cols, fmt)
    n: tl.constexpr = row.shape[0]
    return low.reshape(n, 128), high.reshape(n, 128)


@triton.jit
def row_sums(sums: tl.tensor, fmt: tl.constexpr) -> tl.tensor:
    """Return [n]: the sums of rows [n, 128] of what was multiplied with planes.

    Group by group: Triton 3.6 adds up wrong lanes of a tensor whose groups lie in lanes far apart.
    """
    n: tl.constexpr = sums.shape[0]
    is_four: tl.constexpr = fmt == "Q4_0" or fmt == "Q4_1" or fmt == "IQ4_NL" or fmt == "IQ4_XS"
    is_five: tl.constexpr = fmt == "Q5_0" or fmt == "Q5_1"
    is_entries: tl.constexpr = fmt == "IQ1_S" or fmt == "IQ1_M" or fmt == "IQ2_XXS"
    if fmt == "Q2_K" or fmt == "Q3_K":
        return tl.sum(tl.sum(tl.sum(sums.reshape(n, 4, 2, 16), 3), 2), 1)
    elif is_four or is_five or fmt == "MXFP4" or fmt == "Q6_K":
        return tl.sum(tl.sum(sums.reshape(n, 8, 16), 2), 1)
    elif is_entries or fmt == "IQ2_XS" or fmt == "IQ2_S" or fmt == "NVFP4":
        return tl.sum(tl.sum(sums.reshape(n, 16, 8), 2), 1)
    elif fmt == "IQ3_XXS" or fmt == "IQ3_S":
        return tl.sum(tl.sum(sums.reshape(n, 32, 4), 2), 1)
    elif fmt == "Q4_K" or fmt == "Q5_K" or fmt == "Q8_0" or fmt == "TQ2_0":
        return tl.sum(tl.sum(sums.reshape(n, 4, 32), 2), 1)
    else:
        return tl.sum(sums, 1)


@triton.jit
def _side(
    row: tl.tensor,
    live: tl.tensor,
    chunk: tl.tensor,
    codebook: tl.tensor,
    plane: tl.constexpr,
    cols: tl.constexpr,
    fmt: tl.constexpr,
) -> tl.tensor:
    """Return a plane that is 128 consecutive columns: [n, ...]."""
    if fmt == "Q8_0":
        return _q8_0(row, live, chunk, plane, cols)
    elif fmt == "Q2_K":
        return q2_k(row, live, chunk, plane)
    elif fmt == "Q3_K":
        return q3_k(row, live, chunk, plane)
    elif fmt == "TQ1_0":
        return tq1_0(row, live, chunk, plane)
    elif fmt == "TQ2_0":
        return tq2_0(row, live, chunk, plane)
    elif fmt == "IQ1_S" or fmt == "IQ1_M":
        return iq1(row, live, chunk, codebook, plane, fmt)
    elif fmt == "IQ2_XXS" or fmt == "IQ2_XS" or fmt == "IQ2_S":
        return iq2(row, live, chunk, codebook, plane, fmt)
    elif fmt == "IQ3_XXS" or fmt == "IQ3_S":
        return iq3(row, live, chunk, codebook, plane, fmt)
    else:
        return _plain(row, live, chunk, plane, cols, fmt)


@triton.jit
def _q8_0(
    row: tl.tensor, live: tl.tensor, chunk: tl.tensor, plane: tl.constexpr, cols: tl.constexpr
) -> tl.tensor:
    """Q8_0: blocks of 32, d and a byte per weight; [n, 4, 32] in the order of the columns."""
    block = (chunk * 8 + plane * 4 + tl.arange(0, 4))[None, :]
    live_block = live[:, None]
    if cols % 256 != 0:
        live_block = live_block & (block < cols // 32)
    head = row[:, None] + block * 34
    at = ((head + 2)[:, :, None] + tl.arange(0, 32)[None, None, :]).to(tl.pointer_type(tl.int8))
    q = tl.load(at, mask=live_block[:, :, None], other=0).to(tl.float32)
    return q * half(head, live_block)[:, :, None]


@triton.jit
def _plain(
    row: tl.tensor,
    live: tl.tensor,
    chunk: tl.tensor,
    plane: tl.constexpr,
    cols: tl.constexpr,
    fmt: tl.constexpr,
) -> tl.tensor:
    """F32, F16 and BF16, in the order of the columns: [n, 128]."""
    column = (chunk * 256 + plane * 128 + tl.arange(0, 128))[None, :]
    live_value = live[:, None]
    if cols % 256 != 0:
        live_value = live_value & (column < cols)
    short: tl.constexpr = tl.float16 if fmt == "F16" else tl.bfloat16
    kind: tl.constexpr = tl.float32 if fmt == "F32" else short
    at = row.to(tl.pointer_type(kind))[:, None] + column
    return tl.load(at, mask=live_value, other=0.0).to(tl.float32)
