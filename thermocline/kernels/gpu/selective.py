"""The first Mamba on a device, in float32: its convolution, the products behind that, and its scan by doubling.

The twin of `kernels.recurrent_reference`. Never waits for the device, so that it can be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from thermocline.kernels.gpu.dense import rms_norm
from thermocline.kernels.gpu.spans import convolve

if TYPE_CHECKING:
    from thermocline.kernels.gpu.cache import DeviceStates
    from thermocline.kernels.gpu.step import StateMoves
    from thermocline.kernels.gpu.weights import MatrixLoader
    from thermocline.kernels.recurrent_contract import SelectiveRule
    from thermocline.kernels.whole_layer import SelectiveProducts

# Tokens of a sequence at a time, and numbers of all sequences' states: each token has a state of its own on the way, 0.5 MiB
# of 16 numbers by 8,192, and there are some five arrays of them.
_PIECE_TOKENS = 64
_PIECE_NUMBERS = 1 << 23


class DeviceSelective:
    """A `SelectiveRule` with its products, on the device."""

    def __init__(
        self, load: MatrixLoader, rule: SelectiveRule, products: SelectiveProducts, epsilon: float
    ) -> None:
        self._conv, self._conv_bias = load.vector(rule.conv), load.vector(rule.conv_bias)
        self._step_bias, self._skip = load.vector(rule.step_bias), load.vector(rule.skip)
        self._decay, self._epsilon = load.vector(rule.decay), epsilon
        self._firsts = [load.matrix(weight) for weight in products.firsts]
        self._gains = [load.vector(gain) for gain in products.gains]
        self._steps = load.matrix(products.steps)

    def run(
        self, rows: torch.Tensor, slots: StateMoves, states: DeviceStates, *, prompt: bool
    ) -> torch.Tensor:
        """Return [sequences, length, width] of rows [sequences, length, 2 * width]; moves the states on."""
        x, z = rows.chunk(2, dim=-1)
        convolved = convolve(x, self._conv, slots, states) + self._conv_bias
        x = functional.silu(convolved)
        every = x.flatten(0, 1)
        low, keys, queries = (
            rms_norm(matrix.multiply(every, prompt=prompt), gain, self._epsilon)
            for matrix, gain in zip(self._firsts, self._gains, strict=True)
        )
        steps = self._steps.multiply(low, prompt=prompt) + self._step_bias
        read = self._scan(
            x,
            functional.softplus(steps).view(x.shape),
            keys.view(*x.shape[:2], -1),
            queries.view(*x.shape[:2], -1),
            slots,
            states,
        )
        return (read + x * self._skip) * functional.silu(z)

    def _scan(
        self,
        x: torch.Tensor,
        steps: torch.Tensor,
        keys: torch.Tensor,
        queries: torch.Tensor,
        slots: StateMoves,
        states: DeviceStates,
    ) -> torch.Tensor:
        """Return [sequences, length, width], what tokens read."""
        state, reads = states.recurrent[slots.before].squeeze(1), []
        piece = max(min(_PIECE_TOKENS, _PIECE_NUMBERS // state.numel()), 1)
        for start in range(0, x.shape[1], piece):
            part = slice(start, start + piece)
            decay = torch.exp(steps[:, part, None] * self._decay)
            change = keys[:, part, :, None] * (steps[:, part] * x[:, part]).unsqueeze(2)
            after = _move_on(decay, change, state)
            state = after[:, -1]
            reads.append((queries[:, part].unsqueeze(2) @ after).squeeze(2))
        states.recurrent[slots.after] = state.unsqueeze(1)
        return torch.cat(reads, dim=1)


def _move_on(decay: torch.Tensor, change: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return the state after each token of a piece, [sequences, tokens, state_dim, width].

    decay, change: as large; state: before the first. Changes of 1, 2, 4 ... tokens are put together in turns.
    """
    first = change[:, :1] + decay[:, :1] * state.unsqueeze(1)
    change = torch.cat((first, change[:, 1:]), dim=1)
    reach, tokens = 1, change.shape[1]
    while reach < tokens:
        added = change[:, reach:] + decay[:, reach:] * change[:, :-reach]
        decay = torch.cat((decay[:, :reach], decay[:, reach:] * decay[:, :-reach]), dim=1)
        change = torch.cat((change[:, :reach], added), dim=1)
        reach *= 2
    return change
