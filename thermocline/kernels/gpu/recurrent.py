"""Short convolutions and Mamba2 on a device, in float32: a piece of each sequence's tokens at a time, as matrices.

The twins of `kernels.recurrent_reference`, and the layer that has one of them, or the first Mamba. Knows no request. Never
waits for the device, so that it can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from thermocline.kernels.gpu.dense import rms_norm
from thermocline.kernels.gpu.selective import DeviceSelective
from thermocline.kernels.gpu.spans import convolve, each_span
from thermocline.kernels.recurrent_contract import MambaRule, ShortConvRule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.kernels.gpu.cache import DeviceStates
    from thermocline.kernels.gpu.step import StateMoves, StepInputs
    from thermocline.kernels.gpu.weights import MatrixLoader
    from thermocline.kernels.recurrent_contract import MambaShape
    from thermocline.kernels.whole_layer import RecurrentWeights

# Tokens at a time: work within a piece grows with its square, while the number of pieces shrinks.
_PIECE_TOKENS = 64


@dataclass(frozen=True, slots=True, eq=False)
class DeviceShortConv:
    """A `ShortConvRule` whose numbers lie on the device."""

    conv: torch.Tensor

    def run(self, rows: torch.Tensor, slots: StateMoves, states: DeviceStates) -> torch.Tensor:
        """Return [sequences, length, channels] of rows [sequences, length, 3 * channels]; moves the states on."""
        b, c, x = rows.chunk(3, dim=-1)
        return c * convolve(b * x, self.conv, slots, states)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMamba:
    """A `MambaRule` whose numbers lie on the device."""

    shape: MambaShape
    conv: torch.Tensor
    conv_bias: torch.Tensor
    step_bias: torch.Tensor
    decay: torch.Tensor
    skip: torch.Tensor
    gain: torch.Tensor
    epsilon: float

    @classmethod
    def load(cls, load: MatrixLoader, given: MambaRule) -> DeviceMamba:
        """Bring a rule to the device."""
        return cls(
            given.shape,
            conv=load.vector(given.conv),
            conv_bias=load.vector(given.conv_bias),
            step_bias=load.vector(given.step_bias),
            decay=load.vector(given.decay),
            skip=load.vector(given.skip),
            gain=load.vector(given.gain),
            epsilon=given.epsilon,
        )

    def run(self, rows: torch.Tensor, slots: StateMoves, states: DeviceStates) -> torch.Tensor:
        """Return [sequences, length, width] of rows [sequences, length, row]; moves the states on."""
        shape = self.shape
        z, channels, steps = rows.tensor_split((shape.width, shape.width + shape.channels), dim=-1)
        convolved = convolve(channels, self.conv, slots, states)
        mixed = functional.silu(convolved + self.conv_bias)
        cuts = (shape.width, shape.width + shape.groups * shape.state_dim)
        x, keys, queries = mixed.tensor_split(cuts, dim=-1)
        # Heads before tokens; [sequences, groups, 1, length, state_dim], for the heads of each group.
        keys, queries = (self._by_group(part, shape.state_dim) for part in (keys, queries))
        x = self._by_group(x, shape.head_dim)
        step = self._by_group(functional.softplus(steps + self.step_bias), 1)
        decay, skip = (part.view(shape.groups, -1, 1, 1) for part in (self.decay, self.skip))
        log_decay = (step * decay).squeeze(-1)
        values = step * x
        # [sequences, groups, heads of a group, state_dim, head_dim]
        sizes = (len(slots.before), shape.groups, -1, shape.state_dim, shape.head_dim)
        state = states.recurrent[slots.before].view(sizes)
        reads = []
        for start in range(0, rows.shape[1], _PIECE_TOKENS):
            part = slice(start, start + _PIECE_TOKENS)
            read, state = _move_on(
                keys[..., part, :],
                queries[..., part, :],
                values[..., part, :],
                log_decay[..., part],
                state,
            )
            reads.append(read)
        states.recurrent[slots.after] = state.flatten(1, 2)
        read = torch.cat(reads, dim=-2) + x * skip
        # Heads behind tokens again: [sequences, length, width].
        read = read.flatten(1, 2).transpose(1, 2).flatten(2)
        gated = (read * functional.silu(z)).view(*z.shape[:-1], shape.groups, -1)
        return rms_norm(gated, self.gain.view(shape.groups, -1), self.epsilon).flatten(-2)

    def _by_group(self, x: torch.Tensor, size: int) -> torch.Tensor:
        """Return [sequences, groups, heads or 1, length, size] of x [sequences, length, groups * heads * size]."""
        return x.reshape(*x.shape[:-1], self.shape.groups, -1, size).movedim(1, 3)


def _move_on(
    keys: torch.Tensor,
    queries: torch.Tensor,
    values: torch.Tensor,
    log_decay: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a piece's tokens read, [sequences, groups, heads, tokens, head_dim], and the state after them.

    keys, queries: [..., 1, tokens, state_dim]; values: [..., heads, tokens, head_dim]. A token decays the state, adds
    its values under its key, and reads it with its query.
    """
    gone = log_decay.cumsum(dim=-1)
    tokens = gone.shape[-1]
    later = torch.ones((tokens, tokens), dtype=torch.bool, device=gone.device).triu(1)
    between = gone[..., :, None] - gone[..., None, :]
    kept = between.masked_fill(later, -torch.inf).exp()  # [..., t, i]: of i's values when t reads
    since = gone.exp().unsqueeze(-1)
    read = since * (queries @ state) + (kept * (queries @ keys.transpose(-1, -2))) @ values
    left = keys.transpose(-1, -2) @ (kept[..., -1, :].unsqueeze(-1) * values)
    return read, since[..., -1:, :] * state + left


class DeviceRecurrent:
    """`RecurrentWeights` on a device."""

    def __init__(self, load: MatrixLoader, given: RecurrentWeights) -> None:
        self._norm, self._epsilon = load.vector(given.norm), given.epsilon
        self._input, self._output = load.matrix(given.input), load.matrix(given.output)
        self._rule: DeviceShortConv | DeviceMamba | DeviceSelective
        if isinstance(given.rule, ShortConvRule):
            self._rule = DeviceShortConv(load.vector(given.rule.conv))
        elif isinstance(given.rule, MambaRule):
            self._rule = DeviceMamba.load(load, given.rule)
        else:
            assert given.products is not None, "the first Mamba has products of its own"
            self._rule = DeviceSelective(load, given.rule, given.products, given.epsilon)

    def __call__(self, x: torch.Tensor, inputs: StepInputs, states: DeviceStates) -> torch.Tensor:
        """Return x plus the mixer's output over it; updates the sequences' states."""
        prompt = inputs.is_prompt
        rows = self._input.multiply(rms_norm(x, self._norm, self._epsilon), prompt=prompt)

        def run(mine: Sequence[torch.Tensor], slots: StateMoves) -> torch.Tensor:
            if isinstance(self._rule, DeviceSelective):
                return self._rule.run(mine[0], slots, states, prompt=prompt)
            return self._rule.run(mine[0], slots, states)

        out = each_span((rows,), inputs.delta, states, run)
        return x + self._output.multiply(out, prompt=prompt)
