"""A chunk's numbers on a device: positions, cache slots and block tables in one integer array.

One array takes one copy, and stays at the same address for captured steps. Knows no chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class SpanShape:
    """Sequences of equally many rows: from row `start` on, `sequences` times `length` of them.

    width: blocks that each one's table has room for. is_apart: of recurrent layers, single rows that lie anywhere in the
    chunk, and whose state goes on in another slot than it came from: drafted rows.
    """

    start: int
    sequences: int
    length: int
    width: int = 0
    is_apart: bool = False

    @property
    def rows(self) -> slice:
        """Their rows in the chunk."""
        return slice(self.start, self.start + self.sequences * self.length)


@dataclass(frozen=True, slots=True)
class StepShape:
    """All sizes of a step; steps of equal shape run the same kernels. How long contexts are is no part of it.

    num_tokens: its rows; the last ones may be padding. windows: the different attention windows in tokens, 0 for full
    attention. attention: the spans of each. delta: the spans of recurrent layers, in order. copies: by window,
    how many rows of the cache are copied; () for none.
    """

    num_tokens: int
    is_prompt: bool
    windows: tuple[int, ...]
    attention: tuple[tuple[SpanShape, ...], ...]
    delta: tuple[SpanShape, ...] = ()
    copies: tuple[int, ...] = ()

    @property
    def num_numbers(self) -> int:
        """Length of the array."""
        tables = sum(
            span.sequences * (span.width + 1) for spans in self.attention for span in spans
        )
        states = sum(span.sequences * (3 if span.is_apart else 1) for span in self.delta)
        slots = (1 + len(self.windows)) * self.num_tokens + 2 * sum(self.copies)
        return slots + tables + states + 1


@dataclass(frozen=True, slots=True, eq=False)
class AttendSpan:
    """Some sequences' rows with the blocks that they attend to.

    positions: int64 [sequences, length], ascending; tables: int64 [sequences, width], of which what lies behind a
    sequence's last position is not read; first: int64 [sequences], the position of each table's first token.
    """

    shape: SpanShape
    positions: torch.Tensor
    tables: torch.Tensor
    first: torch.Tensor


class AttendInputs(NamedTuple):
    """What layers with one window need. slots: int64 [T], where keys and values go.

    copies: int64 [2, n], slots that are copied, and where to, once the chunk's own keys and values are there; None for none.
    """

    slots: torch.Tensor
    spans: tuple[AttendSpan, ...]
    copies: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DeltaSpan:
    """Some sequences' rows, and the slots of their states, int64 [sequences], different but for those of padding.

    saves: slots that are copied afterwards, (from, to). after: of a span apart, the slots to which the states go on; None
    for the same. rows: of such a span, int64 [sequences], the rows of the chunk; T is one of nobody.
    """

    shape: SpanShape
    slots: torch.Tensor
    saves: tuple[tuple[int, int], ...] = ()
    after: torch.Tensor | None = None
    rows: torch.Tensor | None = None

    @property
    def moves(self) -> StateMoves:
        """Where states come from, and go."""
        return StateMoves(self.slots, self.slots if self.after is None else self.after)


class StateMoves(NamedTuple):
    """Slots of recurrent state, int64 [sequences]: before some tokens, and after them."""

    before: torch.Tensor
    after: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """The array, cut. positions: int64 [T]; attention: by window; num_live: int64 [1], rows that are not padding."""

    is_prompt: bool
    positions: torch.Tensor
    attention: dict[int, AttendInputs]
    delta: tuple[DeltaSpan, ...]
    num_live: torch.Tensor


def cut_inputs(
    shape: StepShape, numbers: torch.Tensor, saves: tuple[tuple[tuple[int, int], ...], ...] = ()
) -> StepInputs:
    """Return views of `numbers`, int64 [shape.num_numbers]. saves: of each delta span, none if not given.

    The order: positions; for every window slots, then copies, then of every span first positions; of every delta span
    state slots, and of those apart the slots after it and the rows; the number of rows that are not padding; for every window, the first one last, of every span tables, block by block. So a step whose contexts
    are short sets only the beginning of the array.
    """
    place = 0

    def take(*dims: int) -> torch.Tensor:
        nonlocal place
        start, count = place, 1
        for dim in dims:
            count *= dim
        place += count
        return numbers[start:place].view(*dims)

    positions = take(shape.num_tokens)
    slots, firsts, copied = [], [], []
    for spans, num_copies in zip(
        shape.attention, shape.copies or (0,) * len(shape.attention), strict=True
    ):
        slots.append(take(shape.num_tokens))
        copied.append(take(2, num_copies) if num_copies else None)
        firsts.append([take(span.sequences) for span in spans])
    after = saves or ((),) * len(shape.delta)
    delta = []
    for span, copies in zip(shape.delta, after, strict=True):
        states = [take(span.sequences) for _ in range(3 if span.is_apart else 1)]
        delta.append(DeltaSpan(span, states[0], copies, *states[1:]))
    num_live = take(1)
    attention = {}
    for window in reversed(range(len(shape.windows))):
        cut = tuple(
            AttendSpan(
                span,
                positions[span.rows].view(span.sequences, span.length),
                take(span.width, span.sequences).t(),
                first,
            )
            for span, first in zip(shape.attention[window], firsts[window], strict=True)
        )
        attention[shape.windows[window]] = AttendInputs(slots[window], cut, copied[window])
    return StepInputs(shape.is_prompt, positions, attention, tuple(delta), num_live)
