"""Choosing experts, and finding the slots of what was chosen, on a device: a launch each.

Twins are in `dense` and `resident`. Knows no weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from thermocline.kernels.dense_contract import NEAR_BEST_RANGE

if TYPE_CHECKING:
    from torch import Tensor

    from thermocline.kernels.dense_contract import RoutingRule


def choose_experts(
    logits: Tensor, rule: RoutingRule, bias: Tensor | None, logit_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (ids int64, weights float32), each [tokens, chosen]: best first, ties by lower id.

    logits: float32 [tokens, experts]; the rule has one group. bias, logit_bias: float32 [experts].
    """
    tokens, experts = logits.shape
    ids = torch.empty((tokens, rule.chosen), dtype=torch.int64, device=logits.device)
    weights = torch.empty((tokens, rule.chosen), dtype=torch.float32, device=logits.device)
    if tokens:
        choose_kernel[(tokens,)](
            *(ids, weights, logits.contiguous(), logits if bias is None else bias),
            *(logits if logit_bias is None else logit_bias, rule.min_sum, rule.scale),
            experts=experts,
            chosen=rule.chosen,
            gating=rule.gating.name,
            has_bias=bias is not None,
            has_logit_bias=logit_bias is not None,
            normalize=rule.normalize,
            near_range=NEAR_BEST_RANGE,
            block=max(triton.next_power_of_2(experts), 32),
            block_chosen=triton.next_power_of_2(rule.chosen),
            num_warps=1,
        )
    return ids, weights


def find_slots(
    ids: Tensor, table: Tensor, num_live: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return slots, counts and rows, int32 [tokens * chosen], and pair_of, int32 [tokens, chosen], of few unsorted pairs.

    ids: int64 [tokens, chosen]; table: int32 [experts], the slot of each, below zero for those that are not
    there; num_live: int64 [1], the first rows, which are tokens. A count is 1, and 0 for padding; pair_of is the number of
    the pair, and -1 for padding and where there is no slot.
    """
    tokens, chosen = ids.shape
    found = torch.empty((3, tokens * chosen), dtype=torch.int32, device=ids.device)
    pair_of = torch.empty((tokens, chosen), dtype=torch.int32, device=ids.device)
    slots, counts, rows = found
    if tokens:
        slots_kernel[(1,)](
            *(slots, counts, rows, pair_of, ids.contiguous(), table, num_live, tokens * chosen),
            chosen=chosen,
            block=triton.next_power_of_2(tokens * chosen),
            num_warps=1,
        )
    return slots, counts, rows, pair_of


@triton.jit
def choose_kernel(
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    logit_bias_ptr: tl.tensor,
    min_sum: tl.tensor,
    scale: tl.tensor,
    experts: tl.constexpr,
    chosen: tl.constexpr,
    gating: tl.constexpr,
    has_bias: tl.constexpr,
    has_logit_bias: tl.constexpr,
    normalize: tl.constexpr,
    near_range: tl.constexpr,
    block: tl.constexpr,
    block_chosen: tl.constexpr,
) -> None:
    """A program: one token."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, block)
    live = i < experts
    logits = tl.load(logits_ptr + token * experts + i, mask=live, other=float("-inf"))
    if has_logit_bias:
        logits += tl.load(logit_bias_ptr + i, mask=live, other=0.0)
    given = scores_of(logits, gating)
    scores = given
    # The softmax may round two experts' logits to one probability.
    if gating == "SOFTMAX" and not has_bias:
        scores = logits
    if has_bias:
        scores += tl.load(bias_ptr + i, mask=live, other=0.0)
    scores = tl.where(live, scores, float("-inf"))
    slot = tl.arange(0, block_chosen)
    ids = tl.zeros((block_chosen,), tl.int32)
    weights = tl.full(
        (block_chosen,), float("-inf") if gating == "SOFTMAX_CHOSEN" else 0.0, tl.float32
    )
    left = live
    for place in tl.static_range(chosen):
        best = tl.max(tl.where(left, scores, float("-inf")), 0)
        # Where no score is a number, the first that is left.
        is_best = left & (scores == best)
        first = tl.min(tl.where(is_best, i, block), 0)
        taken = tl.where(first < block, first, tl.min(tl.where(left, i, block), 0))
        ids = tl.where(slot == place, taken, ids)
        own = tl.sum(tl.where(i == taken, given, 0.0), 0)
        if gating == "NEAR_BEST":
            own = near_share(given, left, own, near_range)
        weights = tl.where(slot == place, own, weights)
        left = left & (i != taken)
    if gating == "SOFTMAX_CHOSEN":
        weights = tl.exp(weights - tl.max(weights, 0))
        weights = weights / tl.sum(weights, 0)
    if normalize:
        weights = weights / tl.maximum(tl.sum(weights, 0), min_sum)
    at = token * chosen + slot
    tl.store(ids_ptr + at, ids.to(tl.int64), mask=slot < chosen)
    tl.store(weights_ptr + at, weights * scale, mask=slot < chosen)


@triton.jit
def scores_of(logits: tl.tensor, gating: tl.constexpr) -> tl.tensor:
    """Return what weights are taken from; logits where that is known only of the chosen ones."""
    scores = logits
    if gating == "SOFTMAX":
        shares = tl.exp(logits - tl.max(logits, 0))
        scores = shares / tl.sum(shares, 0)
    elif gating == "SIGMOID":
        scores = 1.0 / (1.0 + tl.exp(-logits))
    elif gating == "SQRT_SOFTPLUS":
        scores = tl.sqrt_rn(softplus(logits))
    return scores


@triton.jit
def near_share(
    logits: tl.tensor, left: tl.tensor, own: tl.tensor, near_range: tl.constexpr
) -> tl.tensor:
    """Return the share of a logit `own` in a softmax of those that are left and near it; see `Gating.NEAR_BEST`."""
    is_far = own - logits > near_range * tl.maximum(tl.abs(logits), own)
    return 1.0 / tl.sum(tl.where(left & (is_far == 0), tl.exp(logits - own), 0.0), 0)


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """Return ln(1 + e^x), to float32's precision far below zero, too.

    It is max(x, 0) + ln(1 + y) of y = e^-|x|, and ln(1 + y) = 2 artanh(y / (2 + y)), whose series ends after eight terms.
    """
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)
    square = s * s
    series = 1.0 / 15
    for term in tl.static_range(7):
        series = series * square + 1.0 / (13 - 2 * term)
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def slots_kernel(
    slots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    pair_of_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    table_ptr: tl.tensor,
    num_live_ptr: tl.tensor,
    num_pairs: tl.tensor,
    chosen: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """The only program: all pairs."""
    pair = tl.arange(0, block)
    there = pair < num_pairs
    slot = tl.load(table_ptr + tl.load(ids_ptr + pair, mask=there, other=0), mask=there, other=-1)
    row = pair // chosen
    is_live = row < tl.load(num_live_ptr)
    tl.store(slots_ptr + pair, slot, mask=there)
    tl.store(counts_ptr + pair, is_live.to(tl.int32), mask=there)
    tl.store(rows_ptr + pair, row, mask=there)
    tl.store(pair_of_ptr + pair, tl.where(is_live & (slot >= 0), pair, -1), mask=there)
