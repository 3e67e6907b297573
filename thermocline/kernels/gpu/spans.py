"""What all recurrent layers on a device have in common: tokens by sequence, and the convolution over them.

Knows no rule and no request. Never waits for the device, so that it can be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from thermocline.kernels.gpu.cache import DeviceStates
    from thermocline.kernels.gpu.step import DeltaSpan, StateMoves


def each_span(
    parts: Sequence[torch.Tensor],
    spans: tuple[DeltaSpan, ...],
    states: DeviceStates,
    compute: Callable[[Sequence[torch.Tensor], StateMoves], torch.Tensor],
) -> torch.Tensor:
    """Return [T, width] from parts [T, ...], span after span; copies the states to save after each.

    compute: gives [sequences, length, width] of parts [sequences, length, ...], and moves the states in some slots on.
    """
    if any(span.rows is not None for span in spans):
        return _each_row(parts, spans, states, compute)
    outs = []
    for span in spans:
        rows, sequences = span.shape.rows, span.shape.sequences
        mine = [part[rows].view(sequences, -1, part.shape[1]) for part in parts]
        outs.append(compute(mine, span.moves).flatten(0, 1))
        for source, target in span.saves:
            states.copy(source, target)
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _each_row(
    parts: Sequence[torch.Tensor],
    spans: tuple[DeltaSpan, ...],
    states: DeviceStates,
    compute: Callable[[Sequence[torch.Tensor], StateMoves], torch.Tensor],
) -> torch.Tensor:
    """The same where some spans are apart. Rows of no span get zeros."""
    num_rows, out = len(parts[0]), None
    for span in spans:
        shape = span.shape
        rows = span.rows
        at = shape.rows if rows is None else rows
        # Rows of nobody read the last one, and write behind it.
        given = at if rows is None else rows.clamp_max(num_rows - 1)
        mine = [part[given].view(shape.sequences, -1, part.shape[1]) for part in parts]
        found = compute(mine, span.moves).flatten(0, 1)
        if out is None:
            out = found.new_zeros((num_rows + 1, found.shape[1]))
        out[at] = found
        for source, target in span.saves:
            states.copy(source, target)
    assert out is not None, "a step has rows"
    return out[:num_rows]


def convolve(
    fresh: torch.Tensor, conv: torch.Tensor, slots: StateMoves, states: DeviceStates
) -> torch.Tensor:
    """Return tokens [sequences, length, channels] convolved by channel; their last ones become the state.

    conv: [conv_width, channels], the oldest token's first.
    """
    before = torch.cat((states.conv[slots.before], fresh), dim=1)
    states.conv[slots.after] = before[:, fresh.shape[1] :]
    windows = before.unfold(1, len(conv), 1)  # [sequences, length, channels, conv_width]
    return (windows * conv.t()).sum(dim=-1)
