"""Device code of the block formats whose bytes hold two weights of four bits with columns 16 (NVFP4: eight) apart.

For `unpack_chunk`; planes and columns are as there. Knows no operator.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline.kernels.gpu.block_loads import byte, half, two_bytes


@triton.jit
def nibbles(
    row: tl.tensor,
    live: tl.tensor,
    chunk: tl.tensor,
    codebook: tl.tensor,
    cols: tl.constexpr,
    fmt: tl.constexpr,
) -> tl.tuple:
    """Return both planes of a chunk: [n, 8, 16], NVFP4 [n, 16, 8]."""
    if fmt == "NVFP4":
        return _nvfp4(row, live, chunk, cols)
    else:
        return _sixteens(row, live, chunk, codebook, cols, fmt)


@triton.jit
def _sixteens(
    row: tl.tensor,
    live: tl.tensor,
    chunk: tl.tensor,
    codebook: tl.tensor,
    cols: tl.constexpr,
    fmt: tl.constexpr,
) -> tl.tuple:
    """A scale per 32, whose byte i holds weights i and 16 + i; [n, 8, 16].

    Bytes of all but IQ4_XS: d (MXFP4: one byte), the minimum (Q4_1, Q5_1), 4 of fifth bits (Q5_0, Q5_1), 16 of weights.
    """
    group = tl.arange(0, 8)[None, :]
    i = tl.arange(0, 16)[None, None, :]
    live_block = live[:, None]
    if cols % 256 != 0:
        live_block = live_block & (chunk * 8 + group < cols // 32)
    if fmt == "IQ4_XS":
        block = row + chunk * 136
        head = block[:, None]
        packed = head + 8 + group * 16
        scale = half(block, live)[:, None] * _iq4_xs_scale(block, head, group, live)
    elif fmt == "MXFP4":
        head = row[:, None] + (chunk * 8 + group) * 17
        packed = head + 1
        scale = _power_of_two(byte(head, live_block))
    else:
        has_minimum: tl.constexpr = fmt == "Q4_1" or fmt == "Q5_1"
        has_fifth: tl.constexpr = fmt == "Q5_0" or fmt == "Q5_1"
        before: tl.constexpr = 2 + (2 if has_minimum else 0) + (4 if has_fifth else 0)
        head = row[:, None] + (chunk * 8 + group) * (before + 16)
        packed = head + before
        scale = half(head, live_block)
    q = byte(packed[:, :, None] + i, live_block[:, :, None])
    low, high = q & 15, q >> 4
    if fmt == "Q5_0" or fmt == "Q5_1":
        low |= ((two_bytes(packed - 4, live_block)[:, :, None] >> i) & 1) << 4
        high |= ((two_bytes(packed - 2, live_block)[:, :, None] >> i) & 1) << 4
    factor = scale[:, :, None]
    first, second = _level(low, codebook, fmt) * factor, _level(high, codebook, fmt) * factor
    if fmt == "Q4_1" or fmt == "Q5_1":
        minimum = half(head + 2, live_block)[:, :, None]
        first, second = first + minimum, second + minimum
    return first, second


@triton.jit
def _nvfp4(row: tl.tensor, live: tl.tensor, chunk: tl.tensor, cols: tl.constexpr) -> tl.tuple:
    """NVFP4: 64 weights with an 8-bit float per 16, whose byte i holds weights i and 8 + i; [n, 16, 8].

    Bytes: 4 of scales, 32 of weights.
    """
    group = chunk * 16 + tl.arange(0, 16)[None, :]
    live_block = live[:, None]
    if cols % 256 != 0:
        live_block = live_block & (group < cols // 16)
    head = row[:, None] + group // 4 * 36
    scale = _small_float(byte(head + group % 4, live_block))[:, :, None]
    at = (head + 4 + group % 4 * 8)[:, :, None] + tl.arange(0, 8)[None, None, :]
    q = byte(at, live_block[:, :, None])
    return _e2m1(q & 15) * scale, _e2m1(q >> 4) * scale


@triton.jit
def _small_float(bits: tl.tensor) -> tl.tensor:
    """Return half of the float in the low seven bits: four of exponent, three of mantissa. 127 is zero."""
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    normal = (((exponent + 119) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    subnormal = mantissa.to(tl.float32) * 0.0009765625
    return tl.where(bits == 127, 0.0, tl.where(exponent == 0, subnormal, normal))


@triton.jit
def _iq4_xs_scale(
    block: tl.tensor, head: tl.tensor, group: tl.tensor, live: tl.tensor
) -> tl.tensor:
    """Return the 6-bit scales less 32: four bits in bytes 4..7, two in the 16 bits before them.

    block [n] and head [n, 1] point to the same.
    """
    top = two_bytes(block + 2, live)[:, None]
    four = byte(head + 4 + group // 2, live[:, None]) >> (group % 2 * 4)
    return ((four & 15) | (((top >> (group * 2)) & 3) << 4)).to(tl.float32) - 32.0


@triton.jit
def _power_of_two(exponent: tl.tensor) -> tl.tensor:
    """Return 2 ** (exponent - 128), of which the first two are subnormal."""
    bits = tl.where(exponent < 2, (exponent + 1) << 21, (exponent - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _e2m1(index: tl.tensor) -> tl.tensor:
    """Return twice the float of two bits of exponent and one of mantissa, whose top bit is the sign.

    Its bits are those of a float32 that is smaller by 2 ** 126, subnormal where it is.
    """
    bits = ((index & 7) << 22) | ((index & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38  # 2 ** 127


@triton.jit
def _level(index: tl.tensor, codebook: tl.tensor, fmt: tl.constexpr) -> tl.tensor:
    """Return the level of each 4-bit index as float32."""
    if fmt == "Q4_0":
        return index.to(tl.float32) - 8.0
    elif fmt == "Q5_0":
        return index.to(tl.float32) - 16.0
    elif fmt == "Q4_1" or fmt == "Q5_1":
        return index.to(tl.float32)
    elif fmt == "MXFP4":
        return _e2m1(index)
    else:
        return tl.load(codebook + index).to(tl.float32) - 128.0
