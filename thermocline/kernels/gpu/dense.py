"""The parts of a layer that are not products with weights, on tensors: norms, rotary positions, gates, routing.

Twins of `DenseKernels`, in float32, on any device. Nothing here waits for the device, so that everything can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi, sqrt
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional

from thermocline.kernels.dense_contract import NEAR_BEST_RANGE, Activation, Gating
from thermocline.kernels.gpu.routing_kernels import choose_experts
from thermocline.kernels.gpu.row_kernels import norm_rows, turn_rows

if TYPE_CHECKING:
    from thermocline.kernels.dense_contract import RoutingRule

_GELU_SLOPE: Final = 2 * sqrt(2 / pi)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRope:
    """Cosines and sines, float32 [tokens, rotary_dims / 2]; pairs: as in `RopeTable`."""

    cosines: torch.Tensor
    sines: torch.Tensor
    pairs: bool = False

    def at(self, positions: torch.Tensor) -> DeviceRope:
        """Return the rows of these positions."""
        return DeviceRope(self.cosines[positions], self.sines[positions], self.pairs)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRouting:
    """A `RoutingRule` whose biases lie on the device."""

    rule: RoutingRule
    bias: torch.Tensor | None
    logit_bias: torch.Tensor | None


def rms_norm(x: torch.Tensor, gain: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) * gain over the last axis."""
    if x.is_cuda and gain.dim() == 1:
        return norm_rows(x, gain, epsilon)
    return naive_rms_norm(x, gain, epsilon)


def layer_norm(
    x: torch.Tensor, gain: torch.Tensor, epsilon: float, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the same of x - mean(x), plus the bias where there is one."""
    if x.is_cuda:
        return norm_rows(x, gain, epsilon, centers=True, bias=bias)
    return naive_layer_norm(x, gain, epsilon, bias)


def naive_rms_norm(x: torch.Tensor, gain: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return `rms_norm` in plain torch."""
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon)
    return x * scale * gain


def naive_layer_norm(
    x: torch.Tensor, gain: torch.Tensor, epsilon: float, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `layer_norm` in plain torch."""
    normed = naive_rms_norm(x - x.mean(dim=-1, keepdim=True), gain, epsilon)
    return normed if bias is None else normed + bias


@dataclass(frozen=True, slots=True, eq=False)
class DeviceNorm:
    """A norm of the residual stream. bias: see `Centering`; centers: whether there is that."""

    gain: torch.Tensor
    epsilon: float
    centers: bool
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the twin of `models.norms.norm_rows`."""
        if self.centers:
            return layer_norm(x, self.gain, self.epsilon, self.bias)
        return rms_norm(x, self.gain, self.epsilon)


@dataclass(frozen=True, slots=True, eq=False)
class DevicePostNorm:
    """A `PostNorm` whose gains lie on the device."""

    gain: torch.Tensor
    epsilon: float
    scale: float
    parts: tuple[torch.Tensor, torch.Tensor] | None

    def add(
        self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `DenseKernels.add_normed`."""
        y = first
        if self.parts is not None and second is not None:
            one, other = self.parts
            y = rms_norm(first, one, self.epsilon) + rms_norm(second, other, self.epsilon)
        elif second is not None:
            y = first + second
        return (x + rms_norm(y, self.gain, self.epsilon)) * self.scale


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Return cap * tanh(x / cap)."""
    return torch.tanh(x / cap) * cap


def rotate(x: torch.Tensor, rope: DeviceRope) -> torch.Tensor:
    """Return x [tokens, heads, head_dim] with its first dimensions turned."""
    if x.is_cuda:
        return turn_rows(x, rope.cosines, rope.sines, pairs=rope.pairs)
    return naive_rotate(x, rope)


def naive_rotate(x: torch.Tensor, rope: DeviceRope) -> torch.Tensor:
    """Return `rotate` in plain torch."""
    half = rope.cosines.shape[1]
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    cos, sin = rope.cosines[:, None, :], rope.sines[:, None, :]
    if rope.pairs:
        a, b = turning[..., 0::2], turning[..., 1::2]
    else:
        a, b = turning[..., :half], turning[..., half:]
    first, second = a * cos - b * sin, b * cos + a * sin
    if rope.pairs:
        turned = torch.stack((first, second), dim=-1).reshape(turning.shape)
    else:
        turned = torch.cat((first, second), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def gate(x: torch.Tensor, gates: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return x [rows, width] times the activation of gates, which is [rows, width] or [rows, 1]."""
    match activation:
        case Activation.SIGMOID:
            return x * torch.sigmoid(gates)
        case Activation.SOFTPLUS:
            return x * functional.softplus(gates)
        case Activation.GELU:
            # (1 + tanh(u)) / 2 is the sigmoid of 2 u, which does not cancel far below zero.
            bent = _GELU_SLOPE * (gates + 0.044715 * gates**3)
            return x * gates * torch.sigmoid(bent)


def route(logits: torch.Tensor, given: DeviceRouting) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids int64, weights float32), each [tokens, chosen]: best first, ties by lower id."""
    if logits.is_cuda and given.rule.groups == 1:
        return choose_experts(logits, given.rule, given.bias, given.logit_bias)
    return naive_route(logits, given)


def naive_route(logits: torch.Tensor, given: DeviceRouting) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `route` in plain torch."""
    rule = given.rule
    if given.logit_bias is not None:
        logits = logits + given.logit_bias
    probabilities = _probabilities(logits, rule.gating)
    is_plain = rule.gating is Gating.SOFTMAX and given.bias is None and rule.groups == 1
    scores = logits if is_plain else probabilities
    if given.bias is not None:
        scores = scores + given.bias
    if rule.groups > 1:
        scores = _best_groups(scores, rule)
    # Sorted, because top-k does not define the order of ties.
    ids = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, : rule.chosen]
    weights = torch.gather(probabilities, 1, ids)
    if rule.gating is Gating.SOFTMAX_CHOSEN:
        weights = torch.softmax(weights, dim=-1)
    elif rule.gating is Gating.NEAR_BEST:
        weights = _near_shares(logits, ids)
    if rule.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(rule.min_sum)
    return ids, weights * rule.scale


def _probabilities(logits: torch.Tensor, gating: Gating) -> torch.Tensor:
    """Return what weights are taken from; logits where that is known only of the chosen ones."""
    match gating:
        case Gating.SOFTMAX:
            return torch.softmax(logits, dim=-1)
        case Gating.SIGMOID:
            return torch.sigmoid(logits)
        case Gating.SQRT_SOFTPLUS:
            return torch.sqrt(functional.softplus(logits))
        case Gating.SOFTMAX_CHOSEN | Gating.NEAR_BEST:
            return logits


def _near_shares(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the weights [tokens, chosen] of `Gating.NEAR_BEST`."""
    left, shares = logits, []
    for place in range(ids.shape[1]):
        own_id = ids[:, place : place + 1]
        own = torch.gather(logits, 1, own_id)
        is_far = own - left > NEAR_BEST_RANGE * torch.maximum(left.abs(), own)
        near = left.masked_fill(is_far, -torch.inf)
        shares.append(1.0 / torch.exp(near - own).sum(dim=-1, keepdim=True))
        left = left.scatter(1, own_id, -torch.inf)
    return torch.cat(shares, dim=1)


def _best_groups(scores: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """Return the scores, minus infinity for experts outside of the best groups."""
    by_group = scores.reshape(len(scores), rule.groups, -1)
    totals = by_group.topk(rule.group_best, dim=-1).values.sum(dim=-1)
    order = torch.sort(totals, dim=-1, descending=True, stable=True).indices
    worse = order[:, rule.groups_used :, None].expand(-1, -1, by_group.shape[-1])
    return by_group.scatter(1, worse, -torch.inf).reshape(scores.shape)
