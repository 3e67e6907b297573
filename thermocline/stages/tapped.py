"""A stage whose input is kept, for a drafter that reads what some layers get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from thermocline.messages import Hidden
    from thermocline.stages.contract import Stage


class LayerInputs(Protocol):
    """What keeps the inputs of layers."""

    def note(self, hidden: Hidden) -> None:
        """Keep a layer's input, if it is wanted."""
        ...


class TappedStage:
    """The same stage."""

    def __init__(self, stage: Stage[Hidden, Hidden], tap: LayerInputs) -> None:
        self._stage = stage
        self._tap = tap

    async def __call__(self, hidden: Hidden) -> Hidden:
        """Note the input, and run the stage."""
        self._tap.note(hidden)
        return await self._stage(hidden)
