"""Norms and rotary positions on a device, a launch each: as many torch operations would take longer than the work.

Float32. A row's result depends on nothing else. Twins are in `dense`. Knows no layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

# Numbers of a row that a warp takes: four loads of 16 bytes for each thread.
_OF_A_WARP = 512
_MAX_WARPS = 8


def norm_rows(
    x: Tensor,
    gain: Tensor,
    epsilon: float,
    *,
    centers: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) * gain over the last axis. x: float32 [..., width]; gain: float32 [width].

    centers: of x - mean(x). bias: float32 [width], added to that.
    """
    given, width = x.contiguous(), x.shape[-1]
    out = torch.empty_like(given)
    if given.numel():
        block = triton.next_power_of_2(width)
        rms_norm_kernel[(given.numel() // width,)](
            *(out, given, gain, gain if bias is None else bias, epsilon),
            width=width,
            centers=centers,
            has_bias=bias is not None,
            block=block,
            num_warps=_warps(block),
        )
    return out


def turn_rows(x: Tensor, cosines: Tensor, sines: Tensor, *, pairs: bool) -> Tensor:
    """Return x, float32 [tokens, heads, head_dim], with its first dimensions turned.

    cosines, sines: float32 [tokens, half], contiguous. pairs: neighbours turn together, not dimension i with half + i.
    """
    given, half = x.contiguous(), cosines.shape[1]
    tokens, heads, head_dim = given.shape
    out = torch.empty_like(given)
    if given.numel():
        block = triton.next_power_of_2(head_dim)
        turn_kernel[(tokens * heads,)](
            *(out, given, cosines, sines, heads),
            head_dim=head_dim,
            half=half,
            pairs=pairs,
            block=block,
            num_warps=_warps(block),
        )
    return out


def _warps(block: int) -> int:
    return min(max(block // _OF_A_WARP, 1), _MAX_WARPS)


@triton.jit
def rms_norm_kernel(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    gain_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    epsilon: tl.tensor,
    width: tl.constexpr,
    centers: tl.constexpr,
    has_bias: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """A program: one row."""
    at = tl.program_id(0).to(tl.int64) * width
    i = tl.arange(0, block)
    live = i < width
    x = tl.load(x_ptr + at + i, mask=live, other=0.0)
    if centers:
        x = tl.where(live, x - tl.sum(x, 0) / width, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + epsilon)
    gain = tl.load(gain_ptr + i, mask=live, other=0.0)
    normed = x * scale * gain
    if has_bias:
        normed += tl.load(bias_ptr + i, mask=live, other=0.0)
    tl.store(out_ptr + at + i, normed, mask=live)


@triton.jit
def turn_kernel(
    out_ptr: tl.tensor,
    x_ptr: tl.tensor,
    cosines_ptr: tl.tensor,
    sines_ptr: tl.tensor,
    heads: tl.tensor,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    pairs: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """A program: one head of one token."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, block)
    live, turns = i < head_dim, i < 2 * half
    if pairs:
        is_first, other, angle = i % 2 == 0, i ^ 1, i // 2
    else:
        is_first = i < half
        other, angle = tl.where(is_first, i + half, i - half), tl.where(is_first, i, i - half)
    x = tl.load(x_ptr + row * head_dim + i, mask=live, other=0.0)
    y = tl.load(x_ptr + row * head_dim + other, mask=turns, other=0.0)
    angle += row // heads * half
    cosine = tl.load(cosines_ptr + angle, mask=turns, other=1.0)
    sine = tl.load(sines_ptr + angle, mask=turns, other=0.0)
    turned = tl.where(is_first, x * cosine - y * sine, x * cosine + y * sine)
    tl.store(out_ptr + row * head_dim + i, tl.where(turns, turned, x), mask=live)
