"""Attention over the block cache on a device: keys and values are read where they lie, tile by tile, with a running softmax.

No context is gathered and no mask is stored. A decoded token's context is cut into splits that are computed side by side;
their number is fixed, and each finds its part of the context on the device, so that a captured step serves every length.
Knows neither layers nor requests, and never waits for the device. The twin in plain torch runs on any device, and waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import triton
import triton.language as tl

from thermocline.kernels.gpu.paged_tiles import (
    attend_splits_kernel,
    attend_tiles_kernel,
    merge_splits_kernel,
)

if TYPE_CHECKING:
    from thermocline.kernels.dense_contract import Temperature
    from thermocline.kernels.gpu.cache import DeviceLayerCache
    from thermocline.kernels.gpu.step import AttendSpan

NUM_SPLITS: Final = 32
"""Splits of a decoded token's context, whatever the batch: sums are added in one order, alone or beside others."""

LOG2_E: Final = log2(e)
"""Scores are in powers of two here: exp2 is what devices have."""
_LEAST_ROWS: Final = 16  # of a product on the matrix units
_OPERANDS: Final = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
# Of the twin: positions of a piece of the context, those of all decoded tokens together, and the most scores at a time,
# which stay in the processor's cache.
_PIECE_POSITIONS: Final = 512
_LONG_PIECE: Final = 2048
_MAX_SCORES: Final = 1 << 19


@dataclass(frozen=True, slots=True)
class TileSizes:
    """How work is cut into programs. positions: of a tile; rows: tokens times heads of one in a prompt, at most."""

    positions: int
    rows: int
    num_warps: int
    num_stages: int = 2

    @classmethod
    def of(cls, operand: torch.dtype, head_dim: int) -> TileSizes:
        """Return the form for products of this type.

        head_dim: numbers of a key or of a value, what is more; of a value in a latent cache. All fit into 64 KiB of shared memory, which Turing has,
        but for latent rows of 512 and 64 numbers: 68 KiB there, and 50 on newer ones.
        """
        if head_dim > 256:
            return cls(16, 16, 4, 1)
        is_wide = head_dim > 128
        if operand is torch.float32:
            return cls(16, 16, 4) if is_wide else cls(32, 32, 4)
        return cls(32, 32, 4) if is_wide else cls(64, 64, 4)

    def heads(self, group: int) -> int:
        """Return how many of the `group` heads that share a key head one program of a decoded token takes."""
        least: int = triton.next_power_of_2(group)
        return max(min(least, self.rows), _LEAST_ROWS)


class PagedRule(NamedTuple):
    """scale, sinks: of the scores, in powers of two; the others: as in `rule_of`."""

    scale: float
    window: int
    sinks: torch.Tensor | None
    chunked: bool
    temperature: Temperature | None

    def first_seen(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the first position that tokens at these see, where there is a window; maybe one below 0."""
        if self.chunked:
            return positions // self.window * self.window
        return positions - self.window + 1


def rule_of(
    scale: float,
    window: int,
    sinks: torch.Tensor | None = None,
    *,
    chunked: bool = False,
    temperature: Temperature | None = None,
) -> PagedRule:
    """Return the rule of a scale in powers of e.

    window, chunked, temperature: as in `Attending`. sinks: float32 [heads], those of `Attending` times LOG2_E.
    """
    return PagedRule(scale * LOG2_E, window, sinks, chunked, temperature)


def attention(
    q: torch.Tensor,
    spans: tuple[AttendSpan, ...],
    cache: DeviceLayerCache,
    rule: PagedRule,
) -> torch.Tensor:
    """Return float32 [T, heads, value_dim]: causal attention of each row over its own sequence.

    q: float32 [T, heads, head_dim]; the spans cover it. Multiplies in the type of the cache, halves for Q8_0, and adds in float32. A row of a negative
    position sees nothing and gets zeros.
    """
    attend = paged_attention if q.is_cuda else naive_attention
    outs = [attend(tempered(q[span.shape.rows], span, rule), span, cache, rule) for span in spans]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def tempered(q: torch.Tensor, span: AttendSpan, rule: PagedRule) -> torch.Tensor:
    """Return q [rows, heads, head_dim] of a span times the rule's temperature at each row; only queues."""
    given = rule.temperature
    if given is None:
        return q
    # Padding stands before the first position.
    steps = (span.positions.reshape(-1).clamp_min(0) + given.offset) // given.length
    factors = 1.0 + given.scale * torch.log1p(steps.double())
    return q * factors.float()[:, None, None]


def paged_attention(
    q: torch.Tensor, span: AttendSpan, cache: DeviceLayerCache, rule: PagedRule
) -> torch.Tensor:
    """Return [rows, heads, value_dim] of a span's rows by the kernels; only queues."""
    num_heads, head_dim = q.shape[1:]
    value_dim = cache.value_dim
    form = TileSizes.of(cache.operand, value_dim if cache.is_latent else max(head_dim, value_dim))
    group, sequences = num_heads // cache.kv_heads, span.shape.sequences
    operand = torch.float32 if triton.knobs.runtime.interpret else cache.operand
    numbers = (span.positions, span.first, span.tables, *span.tables.stride())
    constants = {
        "kv_heads": cache.kv_heads,
        "group": group,
        "head_dim": head_dim,
        "rest_width": max(triton.next_power_of_2(max(head_dim - value_dim, 0)), _LEAST_ROWS),
        "block_tokens": cache.block_tokens,
        "is_latent": cache.is_latent,
        "is_quantised": cache.is_quantised,
        "operand": _OPERANDS[operand],
        "precision": "ieee" if operand is torch.float32 else "tf32",
        "num_stages": form.num_stages,
        "num_warps": form.num_warps,
    }
    shared = {
        "value_dim": value_dim,
        "width": max(triton.next_power_of_2(value_dim), _LEAST_ROWS),
        "window": rule.window,
        "chunked": rule.chunked,
        "positions": form.positions,
        "has_sinks": rule.sinks is not None,
    }
    out = torch.empty((len(q), num_heads, value_dim), dtype=torch.float32, device=q.device)
    sinks = out if rule.sinks is None else rule.sinks  # without them, memory that is not read
    if span.shape.length > 1:
        grid = (triton.cdiv(span.shape.length * group, form.rows), cache.kv_heads, sequences)
        attend_tiles_kernel[grid](
            *(out, q.contiguous(), *cache.arrays(), sinks, *numbers, span.shape.length, rule.scale),
            block_rows=form.rows,
            **constants,
            **shared,
        )
        return out
    sums, tops = (
        torch.empty((len(q), num_heads, NUM_SPLITS, size), dtype=torch.float32, device=q.device)
        for size in (value_dim, 2)
    )
    has_sinks = shared.pop("has_sinks")
    block_rows = form.heads(group)
    heads = cache.kv_heads * triton.cdiv(group, block_rows)
    attend_splits_kernel[(NUM_SPLITS, heads, sequences)](
        *(sums, tops, q.contiguous(), *cache.arrays(), *numbers, rule.scale),
        block_rows=block_rows,
        num_splits=NUM_SPLITS,
        **constants,
        **shared,
    )
    merge_splits_kernel[(num_heads, sequences)](
        *(out, sums, tops, sinks, span.positions, span.first),
        has_sinks=has_sinks,
        num_heads=num_heads,
        num_splits=NUM_SPLITS,
        **shared,
    )
    return out


def naive_attention(
    q: torch.Tensor, span: AttendSpan, cache: DeviceLayerCache, rule: PagedRule
) -> torch.Tensor:
    """Twin of `paged_attention` in plain torch: a piece of the context at a time, in order; a decoded token's, too."""
    num_heads, head_dim = q.shape[1:]
    sequences, length = span.shape.sequences, span.shape.length
    group = num_heads // cache.kv_heads
    # The heads that share a key head are rows of one matrix: [sequences, kv_heads, length, group, head_dim].
    rows = q.view(sequences, length, cache.kv_heads, group, head_dim).transpose(1, 2)
    rows = rows.to(cache.operand).float() * rule.scale
    step = max(_MAX_SCORES // (sequences * num_heads * _PIECE_POSITIONS), 1)
    out = torch.empty((len(q), num_heads, cache.value_dim), dtype=torch.float32, device=q.device)
    found = out.view(sequences, length, cache.kv_heads, group, cache.value_dim).transpose(1, 2)
    for start in range(0, length, step):
        part = slice(start, start + step)
        mine = span.positions[:, part]
        some = _naive_rows(rows[:, :, part].flatten(2, 3), mine, span, cache, rule)
        found[:, :, part] = some.unflatten(2, (-1, group))  # type: ignore[no-untyped-call] # torch's own
    return out


def _naive_rows(
    q: torch.Tensor,
    positions: torch.Tensor,
    span: AttendSpan,
    cache: DeviceLayerCache,
    rule: PagedRule,
) -> torch.Tensor:
    """Return attention of q [sequences, kv_heads, tokens * group, head_dim], whose tokens have these positions."""
    end = positions[:, -1:] + 1 - span.first[:, None]
    begin = torch.zeros_like(end)
    if rule.window:
        begin = (rule.first_seen(positions[:, :1]) - span.first[:, None]).clamp_min(0)
    most, sequences = int((end - begin).max()), len(q)
    # A token's scores are few, so that pieces can be longer.
    tokens = positions.shape[1]
    step = _PIECE_POSITIONS if tokens > 1 else max(_LONG_PIECE // sequences, _PIECE_POSITIONS)
    mine = positions.repeat_interleave(q.shape[2] // tokens, dim=1)[:, None, :, None]
    top = q.new_full(q.shape[:3], -torch.inf)
    total, sums = torch.zeros_like(top), q.new_zeros((*q.shape[:3], cache.value_dim))
    for start in range(0, most, step):
        at = begin + torch.arange(start, min(start + step, most), device=q.device)
        there = at < end
        at = at.where(there, 0)
        slots = span.tables.gather(1, at // cache.block_tokens) * cache.block_tokens
        keys, values = cache.read(slots + at % cache.block_tokens)
        scores = q @ keys.transpose(2, 3)
        at = (span.first[:, None] + at)[:, None, None]
        hidden = at > mine
        if rule.window:
            hidden |= at < rule.first_seen(mine)
        # Values that nobody sees may be NaN, which even a weight of zero would spread.
        if not there.all():
            hidden = hidden | ~there[:, None, None]
            values.masked_fill_(~there[:, None, :, None], 0)
        if hidden.any():
            scores.masked_fill_(hidden, -torch.inf)
        higher = torch.maximum(top, scores.amax(dim=-1))
        base = higher.masked_fill(higher == -torch.inf, 0)
        weights = scores.sub_(base.unsqueeze(-1)).exp2_()
        kept = torch.exp2(top - base)
        total = total * kept + weights.sum(dim=-1)
        sums = sums.mul_(kept.unsqueeze(-1)).add_(weights.to(cache.operand).float() @ values)
        top = higher
    if rule.sinks is not None:
        # Rows are tokens times the heads that share a key head.
        sink = rule.sinks.view(1, cache.kv_heads, -1).repeat(1, 1, tokens)
        higher = torch.maximum(top, sink)
        kept = torch.exp2(top - higher)
        total, sums = total * kept + torch.exp2(sink - higher), sums * kept.unsqueeze(-1)
    return sums / total.masked_fill(total == 0, 1).unsqueeze(-1)
