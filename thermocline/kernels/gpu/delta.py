"""The gated delta rule on a device, in float32: a piece of each sequence's tokens at a time, as matrices.

The twin of `kernels.delta_reference`. Knows no request. Never waits for the device, so that it can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from thermocline.kernels.gpu.spans import convolve, each_span

if TYPE_CHECKING:
    from thermocline.kernels.delta_contract import DeltaShape
    from thermocline.kernels.gpu.cache import DeviceStates
    from thermocline.kernels.gpu.step import DeltaSpan, StateMoves

_LENGTH_EPSILON = 1e-6
# Tokens at a time: work within a piece grows with its square, while the number of pieces shrinks.
_PIECE_TOKENS = 64
# The same where rows of a state decay apart: the decays between a piece's tokens are then a number for each row, 4 MB
# of 32 heads of 128 rows.
_CHANNEL_PIECE_TOKENS = 16


@dataclass(frozen=True, slots=True, eq=False)
class DeviceDeltaRule:
    """A `DeltaRule` whose numbers lie on the device; heads: int64 [value_heads], the key head of each."""

    shape: DeltaShape
    conv: torch.Tensor
    step_bias: torch.Tensor
    decay: torch.Tensor
    gain: torch.Tensor
    heads: torch.Tensor
    epsilon: float
    sigmoid_gate: bool = False


class DeltaTokens(NamedTuple):
    """A chunk's tokens: mixed [T, channels], z [T, value_width], alpha [T, steps], beta [T, value_heads]."""

    mixed: torch.Tensor
    z: torch.Tensor
    alpha: torch.Tensor
    beta: torch.Tensor


def key_heads(shape: DeltaShape) -> list[int]:
    """Return the key head that goes with each value head."""
    group = shape.value_heads // shape.key_heads
    return [h % shape.key_heads if shape.tiled else h // group for h in range(shape.value_heads)]


def delta_rule(
    given: DeltaTokens, rule: DeviceDeltaRule, spans: tuple[DeltaSpan, ...], states: DeviceStates
) -> torch.Tensor:
    """Return [T, value_width], span after span; updates the sequences' states, and copies those to save."""
    return each_span(
        given, spans, states, lambda mine, slots: _run(DeltaTokens(*mine), rule, slots, states)
    )


def _run(
    given: DeltaTokens, rule: DeviceDeltaRule, slots: StateMoves, states: DeviceStates
) -> torch.Tensor:
    """Return [sequences, length, value_width] of tokens [sequences, length, ...]."""
    shape = rule.shape
    length = given.mixed.shape[1]
    mixed = functional.silu(convolve(given.mixed, rule.conv, slots, states))
    key_width = shape.key_heads * shape.key_dim
    dims = (len(slots.before), length, -1)
    q, k = (
        _unit(part.reshape(*dims, shape.key_dim))[:, :, rule.heads]
        for part in (mixed[..., :key_width], mixed[..., key_width : 2 * key_width])
    )  # [sequences, length, value_heads, key_dim]
    v = mixed[..., 2 * key_width :].reshape(*dims, shape.value_dim)
    # By head, and by row of its state or for all of them: [sequences, length, value_heads, key_dim or 1].
    step = (given.alpha + rule.step_bias).view(*dims[:2], shape.value_heads, -1)
    if shape.lower_bound:
        log_decay = shape.lower_bound * torch.sigmoid(step * rule.decay.unsqueeze(-1))
    else:
        log_decay = functional.softplus(step) * rule.decay.unsqueeze(-1)
    rate = torch.sigmoid(given.beta)
    state = states.recurrent[slots.before]  # [sequences, value_heads, key_dim, value_dim]
    reads = []
    tokens = _CHANNEL_PIECE_TOKENS if shape.by_channel else _PIECE_TOKENS
    for start in range(0, length, tokens):
        part = slice(start, start + tokens)
        piece = _Piece(q[:, part], k[:, part], v[:, part], log_decay[:, part], rate[:, part])
        read, state = _move_on(piece, state)
        reads.append(read)
    states.recurrent[slots.after] = state
    read = torch.cat(reads, dim=1) * shape.key_dim**-0.5
    power = read.square().mean(dim=-1, keepdim=True)
    normed = read * torch.rsqrt(power + rule.epsilon) * rule.gain
    gates = torch.sigmoid(given.z) if rule.sigmoid_gate else functional.silu(given.z)
    out: torch.Tensor = normed.flatten(-2) * gates
    return out


class _Piece(NamedTuple):
    """Some tokens, [sequences, tokens, value_heads, ...]: all but the rate with a last axis, log_decay's maybe of 1."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    rate: torch.Tensor


def _move_on(piece: _Piece, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a piece's tokens read, [sequences, tokens, value_heads, value_dim], and the state after them.

    A token t changes the state by k_t u_t', where u_t = rate_t (v_t - what the state before it, decayed, holds
    under k_t). The state holds the changes of earlier tokens, so the u of a piece solve one triangular system.
    """
    q, k, v, log_decay, rate = (part.transpose(1, 2) for part in piece)  # heads before tokens
    gone = log_decay.cumsum(dim=-2)  # [..., tokens, rows or 1]
    tokens = gone.shape[-2]
    later = torch.ones((tokens, tokens), dtype=torch.bool, device=gone.device).triu(1)
    between = gone.unsqueeze(-2) - gone.unsqueeze(-3)
    # Of i's change when t reads: [..., t, i, rows or 1].
    kept = between.masked_fill(later.unsqueeze(-1), -torch.inf).exp()
    since = gone.exp()
    change = rate.unsqueeze(-1) * (v - (since * k) @ state)
    if tokens > 1:
        known = rate.unsqueeze(-1) * _products(k, k, kept)
        change = torch.linalg.solve_triangular(known, change, upper=False, unitriangular=True)
    read = (since * q) @ state + _products(q, k, kept) @ change
    left = (k * kept[..., -1, :, :]).transpose(-1, -2) @ change
    return read.transpose(1, 2), since[..., -1, :].unsqueeze(-1) * state + left


def _products(x: torch.Tensor, k: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return [..., t, i] of the products of x_t and k_i [..., tokens, key_dim], their numbers as far as they are kept."""
    if kept.shape[-1] == 1:
        return kept.squeeze(-1) * (x @ k.transpose(-1, -2))
    return ((kept * k.unsqueeze(-3)) @ x.unsqueeze(-1)).squeeze(-1)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _LENGTH_EPSILON)
