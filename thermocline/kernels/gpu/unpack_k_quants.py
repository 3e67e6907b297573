"""Device code of the block formats with two or three levels of scales in 256 columns: K-quants, and ternary ones.

For `unpack_chunk`; planes and columns are as there. Knows no operator.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline.kernels.gpu.block_loads import byte, half, word


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
def two_level(row: tl.tensor, live: tl.tensor, chunk: tl.tensor, fmt: tl.constexpr) -> tl.tuple:
    """Q4_K and Q5_K: groups of 32 with a 6-bit scale and minimum each; [n, 4, 32], groups 2j and 2j + 1.

    Bytes: d, dmin (halves), 12 of scales, then (Q5_K) 32 of fifth bits, then 128 of low bits.
    """
    size: tl.constexpr = 144 if fmt == "Q4_K" else 176
    block = row + chunk * size
    j = tl.arange(0, 4)[None, :]
    byte = tl.arange(0, 32)[None, None, :]
    live_block, head = live[:, None, None], block[:, None, None]
    q = tl.load(head + (size - 128) + j[:, :, None] * 32 + byte, mask=live_block, other=0)
    low, high = q & 15, q >> 4
    if fmt == "Q5_K":
        fifth = tl.load(head + 16 + byte, mask=live_block, other=0)
        shift = (2 * j).to(tl.uint8)[:, :, None]
        low |= ((fifth >> shift) & 1) << 4
        high |= ((fifth >> (shift + 1)) & 1) << 4
    d, minimum = half(block, live)[:, None], half(block + 2, live)[:, None]
    scales, minimums = word(block + 4, live)[:, None], word(block + 8, live)[:, None]
    rest = word(block + 12, live)[:, None]
    first_scale = d * _six_bits(scales, rest, 2 * j)
    first_minimum = minimum * _six_bits(minimums, rest >> 4, 2 * j)
    second_scale = d * _six_bits(scales, rest, 2 * j + 1)
    second_minimum = minimum * _six_bits(minimums, rest >> 4, 2 * j + 1)
    first = low.to(tl.float32) * first_scale[:, :, None] - first_minimum[:, :, None]
    second = high.to(tl.float32) * second_scale[:, :, None] - second_minimum[:, :, None]
    return first, second


@triton.jit
def q6_k(row: tl.tensor, live: tl.tensor, chunk: tl.tensor) -> tl.tuple:
    """Q6_K: groups of 16 with an 8-bit scale each; [n, 8, 16].

    Bytes: 128 of low bits, 64 of high bits, 16 of scales, d.
    """
    group, pair = tl.arange(0, 8)[None, :], tl.arange(0, 8)[None, None, :]
    block = row + chunk * 210
    head, live_block = block[:, None], live[:, None, None]
    # Neighbours are seen to be so only where two bytes are what is counted.
    low_at = (head + group * 16).to(tl.pointer_type(tl.uint16))
    top_at = (head + 128 + group // 4 * 32 + group % 2 * 16).to(tl.pointer_type(tl.uint16))
    q = tl.load(low_at[:, :, None] + pair, mask=live_block, other=0).to(tl.uint32)
    top = tl.load(top_at[:, :, None] + pair, mask=live_block, other=0).to(tl.uint32)
    shift = (group % 4 // 2 * 2)[:, :, None]
    low = (q & 0x0F0F) | ((top << (4 - shift)) & 0x3030)
    high = ((q >> 4) & 0x0F0F) | ((top >> shift) & 0x3030)
    at = (head + 192 + group // 4 * 8 + group % 4).to(tl.pointer_type(tl.int8))
    d = half(block + 208, live)[:, None]
    first = (d * tl.load(at, mask=live[:, None], other=0).to(tl.float32))[:, :, None]
    second = (d * tl.load(at + 4, mask=live[:, None], other=0).to(tl.float32))[:, :, None]
    # q * scale has at most 24 bits, so that this is (q - 32) * scale to the bit.
    return _split(low) * first - 32.0 * first, _split(high) * second - 32.0 * second


@triton.jit
def q2_k(row: tl.tensor, live: tl.tensor, chunk: tl.tensor, plane: tl.constexpr) -> tl.tensor:
    """Q2_K: groups of 16 with a 4-bit scale and minimum each; [n, 4, 2, 16] in the order of the columns.

    Bytes: 16 of scales, 64 of weights (32 for each half of the block, whose two bits at 2j are columns 32j and on),
    d, dmin.
    """
    block = row + chunk * 84
    shift, side = tl.arange(0, 4)[None, :, None] * 2, tl.arange(0, 2)[None, None, :]
    i = tl.arange(0, 16)[None, None, None, :]
    head, live_block = block[:, None, None], live[:, None, None]
    q = byte((head + 16 + plane * 32 + side * 16)[:, :, :, None] + i, live_block[:, :, :, None])
    scales = byte(head + plane * 8 + shift + side, live_block)
    scale = half(block + 80, live)[:, None, None] * (scales & 15).to(tl.float32)
    minimum = half(block + 82, live)[:, None, None] * (scales >> 4).to(tl.float32)
    weights = ((q >> shift[:, :, :, None]) & 3).to(tl.float32)
    return weights * scale[:, :, :, None] - minimum[:, :, :, None]


@triton.jit
def q3_k(row: tl.tensor, live: tl.tensor, chunk: tl.tensor, plane: tl.constexpr) -> tl.tensor:
    """Q3_K: groups of 16 with a 6-bit scale each; [n, 4, 2, 16] in the order of the columns.

    Bytes: 32 of third bits, 64 of low bits as in Q2_K, 12 of scales (four bits in eight, two in four), d.
    """
    block = row + chunk * 110
    shift, side = tl.arange(0, 4)[None, :, None] * 2, tl.arange(0, 2)[None, None, :]
    head, live_block = block[:, None, None], live[:, None, None]
    at = (side * 16)[:, :, :, None] + tl.arange(0, 16)[None, None, None, :]
    wide, live_weight = head[:, :, :, None], live_block[:, :, :, None]
    low = (byte(wide + 32 + plane * 32 + at, live_weight) >> shift[:, :, :, None]) & 3
    third = (byte(wide + at, live_weight) >> (plane * 4 + shift // 2)[:, :, :, None]) & 1
    group = shift + side
    four = (byte(head + 96 + group, live_block) >> (plane * 4)) & 15
    two = (byte(head + 104 + group % 4, live_block) >> (plane * 4 + group // 4 * 2)) & 3
    d = half(block + 108, live)[:, None, None]
    scale = d * ((four | (two << 4)).to(tl.float32) - 32.0)
    return ((low | (third << 2)).to(tl.float32) - 4.0) * scale[:, :, :, None]


@triton.jit
def tq2_0(row: tl.tensor, live: tl.tensor, chunk: tl.tensor, plane: tl.constexpr) -> tl.tensor:
    """TQ2_0: -1, 0 and 1 as two bits, which lie as in Q2_K, then d; [n, 4, 32] in the order of the columns."""
    block = row + chunk * 66
    shift = tl.arange(0, 4)[None, :, None] * 2
    at = block[:, None, None] + plane * 32 + tl.arange(0, 32)[None, None, :]
    q = byte(at, live[:, None, None])
    return (((q >> shift) & 3).to(tl.float32) - 1.0) * half(block + 64, live)[:, None, None]


@triton.jit
def tq1_0(row: tl.tensor, live: tl.tensor, chunk: tl.tensor, plane: tl.constexpr) -> tl.tensor:
    """TQ1_0: -1, 0 and 1 as digits of base 3; [n, 128] in the order of the columns.

    Bytes: 32 with digit j of columns 32j and on, 16 with digit j of columns 160 + 16j and on, 4 with digit j of
    columns 240 + 4j and on, then d. A byte is a fraction of 256, so that its digits come out at the top.
    """
    column = plane * 128 + tl.arange(0, 128)[None, :]
    is_first, is_second = column < 160, column < 240
    late = tl.where(is_second, 32 + column % 16, 48 + column % 4)
    late_digit = tl.where(is_second, (column - 160) // 16, (column - 240) // 4)
    digit = tl.where(is_first, column // 32, late_digit)
    power = tl.where(digit == 4, 81, (0x1B090301 >> (digit % 4 * 8)) & 255).to(tl.uint32)
    block = row + chunk * 54
    packed = byte(block[:, None] + tl.where(is_first, column % 32, late), live[:, None])
    q = (((packed * power) & 255) * 3) >> 8
    return (q.to(tl.float32) - 1.0) * half(block + 52, live)[:, None]
