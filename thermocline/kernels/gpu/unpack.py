"""Device code that turns raw blocks into weights, in registers: a chunk of 256 columns of some rows at a time.

A chunk comes as two planes of 128 columns, since formats of four bits keep two weights in a byte: plane 0
holds the low halves, plane 1 the high ones. Both hold runs of consecutive columns, which `plane_columns`
names; a product may take columns in any order, so that nothing is moved. Knows no operator.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 256
"""Columns that are unpacked together: the longest block of any format."""


@triton.jit
def plane_columns(chunk: tl.tensor, plane: tl.constexpr, fmt: tl.constexpr) -> tl.tensor:
    """Return int32 [128]: the columns of a chunk's plane, in the order in which `unpack_chunk` has them."""
    i = tl.arange(0, 128)
    is_sixteens: tl.constexpr = fmt == "Q4_0" or fmt == "IQ4_XS" or fmt == "MXFP4"
    is_two_level: tl.constexpr = fmt == "Q4_K" or fmt == "Q5_K"
    short: tl.constexpr = 16 if is_sixteens else 32
    long: tl.constexpr = 64 if fmt == "Q6_K" else 128
    run: tl.constexpr = short if is_sixteens or is_two_level else long
    return chunk * 256 + i // run * (2 * run) + i % run + plane * run


@triton.jit
def unpack_chunk(
    row: tl.tensor, live: tl.tensor, chunk: tl.tensor, cols: tl.constexpr, fmt: tl.constexpr
) -> tl.tuple:
    """Return two planes, float32 [n, 128] each; columns beyond `cols` are zeros, rows not `live` too.

    row: pointers [n] to the first byte of each row; live: bool [n], rows that may be read.
    """
    if fmt == "Q4_K" or fmt == "Q5_K":
        low, high = _two_level(row, live, chunk, fmt)
    elif fmt == "Q6_K":
        low, high = _q6_k(row, live, chunk)
    elif fmt == "Q8_0":
        low, high = _q8_0(row, live, chunk, 0, cols), _q8_0(row, live, chunk, 1, cols)
    elif fmt == "F16" or fmt == "BF16":
        low, high = _plain(row, live, chunk, 0, cols, fmt), _plain(row, live, chunk, 1, cols, fmt)
    else:
        low, high = _sixteens(row, live, chunk, cols, fmt)
    n: tl.constexpr = row.shape[0]
    return low.reshape(n, 128), high.reshape(n, 128)


@triton.jit
def _half(at: tl.tensor, live: tl.tensor) -> tl.tensor:
    """Return the halves at these byte pointers, as float32."""
    return tl.load(at.to(tl.pointer_type(tl.float16)), mask=live, other=0.0).to(tl.float32)


@triton.jit
def _word(at: tl.tensor, live: tl.tensor) -> tl.tensor:
    """Return the 32-bit words at these byte pointers, which are multiples of 4."""
    return tl.load(at.to(tl.pointer_type(tl.uint32)), mask=live, other=0)


@triton.jit
def _two_bytes(at: tl.tensor, live: tl.tensor) -> tl.tensor:
    """Return two bytes at each of these byte pointers, which are multiples of 2, as 32 bits."""
    return tl.load(at.to(tl.pointer_type(tl.uint16)), mask=live, other=0).to(tl.uint32)


@triton.jit
def _split(pairs: tl.tensor) -> tl.tensor:
    """Return float32 [n, groups, 2 * w] of two bytes each in [n, groups, w], the lower one first."""
    n: tl.constexpr = pairs.shape[0]
    groups: tl.constexpr = pairs.shape[1]
    width: tl.constexpr = pairs.shape[2]
    both = tl.join((pairs & 255).to(tl.float32), (pairs >> 8).to(tl.float32))
    return both.reshape(n, groups, 2 * width)


@triton.jit
def _six_bits(first: tl.tensor, second: tl.tensor, group: tl.tensor) -> tl.tensor:
    """Return the 6-bit number `group` of eight: 0..3 lie in `first`, 4..7 in `second` and first's top bits.

    second: its four bits have been moved to the low half of each byte.
    """
    shift = (group % 4) * 8
    late = ((second >> shift) & 15) | (((first >> (shift + 6)) & 3) << 4)
    return tl.where(group < 4, (first >> shift) & 63, late).to(tl.float32)


@triton.jit
def _two_level(row: tl.tensor, live: tl.tensor, chunk: tl.tensor, fmt: tl.constexpr) -> tl.tuple:
    """Q4_K and Q5_K: groups of 32 with a 6-bit scale and minimum each; [n, 4, 32], groups 2j and 2j + 1.

    Bytes: d, dmin (halves), 12 of scales, then (Q5_K) 32 of fifth bits, then 128 of low bits.
    """
    size: tl.constexpr = 144 if fmt == "Q4_K" else 176
    block = row + chunk * size
    j = tl.arange(0, 4)[None, :, None]
    byte = tl.arange(0, 32)[None, None, :]
    live_block, head = live[:, None, None], block[:, None, None]
    q = tl.load(head + (size - 128) + j * 32 + byte, mask=live_block, other=0)
    low, high = q & 15, q >> 4
    if fmt == "Q5_K":
        fifth = tl.load(head + 16 + byte + j * 0, mask=live_block, other=0)
        low |= ((fifth >> (2 * j).to(tl.uint8)) & 1) << 4
        high |= ((fifth >> (2 * j + 1).to(tl.uint8)) & 1) << 4
    d, minimum = _half(head, live_block), _half(head + 2, live_block)
    scales, minimums = _word(head + 4, live_block), _word(head + 8, live_block)
    rest = _word(head + 12, live_block)
    first = low.to(tl.float32) * (d * _six_bits(scales, rest, 2 * j)) - minimum * _six_bits(
        minimums, rest >> 4, 2 * j
    )
    second = high.to(tl.float32) * (d * _six_bits(scales, rest, 2 * j + 1)) - minimum * _six_bits(
        minimums, rest >> 4, 2 * j + 1
    )
    return first, second


@triton.jit
def _q6_k(row: tl.tensor, live: tl.tensor, chunk: tl.tensor) -> tl.tuple:
    """Q6_K: groups of 16 with an 8-bit scale each; [n, 8, 16].

    Bytes: 128 of low bits, 64 of high bits, 16 of scales, d.
    """
    group = tl.arange(0, 8)[None, :, None]
    pair = tl.arange(0, 8)[None, None, :] * 2
    head, live_block = (row + chunk * 210)[:, None, None], live[:, None, None]
    q = _two_bytes(head + group * 16 + pair, live_block)
    top = _two_bytes(head + 128 + group // 4 * 32 + group % 2 * 16 + pair, live_block)
    shift = group % 4 // 2 * 2
    low = (q & 0x0F0F) | ((top << (4 - shift)) & 0x3030)
    high = ((q >> 4) & 0x0F0F) | ((top >> shift) & 0x3030)
    at = (head + 192 + group // 4 * 8 + group % 4).to(tl.pointer_type(tl.int8))
    d = _half(head + 208, live_block)
    first = d * tl.load(at, mask=live_block, other=0).to(tl.float32)
    second = d * tl.load(at + 4, mask=live_block, other=0).to(tl.float32)
    # q * scale has at most 24 bits, so that this is (q - 32) * scale to the bit.
    return _split(low) * first - 32.0 * first, _split(high) * second - 32.0 * second


@triton.jit
def _q8_0(
    row: tl.tensor, live: tl.tensor, chunk: tl.tensor, plane: tl.constexpr, cols: tl.constexpr
) -> tl.tensor:
    """Q8_0: blocks of 32, d and a byte per weight; [n, 4, 32] in the order of the columns."""
    block = (chunk * 8 + plane * 4 + tl.arange(0, 4))[None, :, None]
    live_block = live[:, None, None]
    if cols % 256 != 0:
        live_block = live_block & (block < cols // 32)
    head = row[:, None, None] + block * 34
    at = (head + 2 + tl.arange(0, 32)[None, None, :]).to(tl.pointer_type(tl.int8))
    return tl.load(at, mask=live_block, other=0).to(tl.float32) * _half(head, live_block)


@triton.jit
def _plain(
    row: tl.tensor,
    live: tl.tensor,
    chunk: tl.tensor,
    plane: tl.constexpr,
    cols: tl.constexpr,
    fmt: tl.constexpr,
) -> tl.tensor:
    """F16 and BF16, in the order of the columns: [n, 128]."""
    column = (chunk * 256 + plane * 128 + tl.arange(0, 128))[None, :]
    live_value = live[:, None]
    if cols % 256 != 0:
        live_value = live_value & (column < cols)
    kind: tl.constexpr = tl.float16 if fmt == "F16" else tl.bfloat16
    at = row.to(tl.pointer_type(kind))[:, None] + column
    return tl.load(at, mask=live_value, other=0.0).to(tl.float32)


@triton.jit
def _sixteens(
    row: tl.tensor, live: tl.tensor, chunk: tl.tensor, cols: tl.constexpr, fmt: tl.constexpr
) -> tl.tuple:
    """Q4_0, IQ4_XS, MXFP4: a scale per 32, whose byte i holds weights i and 16 + i; [n, 8, 16]."""
    group = tl.arange(0, 8)[None, :, None]
    i = tl.arange(0, 16)[None, None, :]
    live_block = live[:, None, None]
    if cols % 256 != 0:
        live_block = live_block & (chunk * 8 + group < cols // 32)
    if fmt == "IQ4_XS":
        head = (row + chunk * 136)[:, None, None]
        packed = head + 8 + group * 16
        scale = _half(head, live_block) * _iq4_xs_scale(head, group, live_block)
    elif fmt == "MXFP4":
        head = row[:, None, None] + (chunk * 8 + group) * 17
        packed = head + 1
        scale = _power_of_two(tl.load(head, mask=live_block, other=0).to(tl.uint32))
    else:
        head = row[:, None, None] + (chunk * 8 + group) * 18
        packed = head + 2
        scale = _half(head, live_block)
    q = tl.load(packed + i, mask=live_block, other=0)
    return _level(q & 15, fmt) * scale, _level(q >> 4, fmt) * scale


@triton.jit
def _iq4_xs_scale(head: tl.tensor, group: tl.tensor, live: tl.tensor) -> tl.tensor:
    """Return the 6-bit scales less 32: four bits in bytes 4..7, two in the 16 bits before them."""
    top = tl.load((head + 2).to(tl.pointer_type(tl.uint16)), mask=live, other=0).to(tl.int32)
    four = tl.load(head + 4 + group // 2, mask=live, other=0).to(tl.int32) >> (group % 2 * 4)
    return ((four & 15) | (((top >> (group * 2)) & 3) << 4)).to(tl.float32) - 32.0


@triton.jit
def _power_of_two(exponent: tl.tensor) -> tl.tensor:
    """Return 2 ** (exponent - 128), of which the first two are subnormal."""
    bits = tl.where(exponent < 2, (exponent + 1) << 21, (exponent - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _level(index: tl.tensor, fmt: tl.constexpr) -> tl.tensor:
    """Return the level of each 4-bit index as float32. Tables are constants, read by shifts."""
    if fmt == "Q4_0":
        return index.to(tl.float32) - 8.0
    index = index.to(tl.uint32)
    if fmt == "MXFP4":  # twice 0, 0.5, 1, 1.5, 2, 3, 4, 6; the top bit is the sign
        magnitude = ((0xC8643210 >> ((index & 7) * 4)) & 15).to(tl.float32)
        return tl.where(index < 8, magnitude, -magnitude)
    # -127 -104 -83 -65 | -49 -35 -22 -10 | 1 13 25 38 | 53 69 89 113, each plus 128 in a byte
    early = tl.where(index < 4, 0x3F2D1801, 0x766A5D4F)
    late = tl.where(index < 12, 0xA6998D81, 0xF1D9C5B5)
    four = tl.where(index < 8, early, late).to(tl.uint32)
    return ((four >> ((index & 3) * 8)) & 255).to(tl.float32) - 128.0
