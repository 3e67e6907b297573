"""Owns the arrays of recurrent state. Knows no request: callers say which slot a sequence has.

Construction reserves address space, which becomes memory only where it is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.recurrent_contract import RecurrentStates
from thermocline.kv.memory import reserve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thermocline.kernels.recurrent_contract import StateShape
    from thermocline.kernels.weight import FloatArray
    from thermocline.messages import LayerIndex


class StatePool:
    """The recurrent states of all recurrent layers, by slot, and what else layers keep of a sequence in such slots."""

    def __init__(
        self,
        num_slots: int,
        layers: Mapping[LayerIndex, StateShape],
        further: Mapping[LayerIndex, StateShape] | None = None,
    ) -> None:
        """further: of what layers keep besides."""
        more = further or {}
        self._layers, self._further = (
            {layer: _states(num_slots, shape) for layer, shape in each.items()}
            for each in (layers, more)
        )
        self.num_slots = num_slots
        self.slot_bytes = sum(shape.num_bytes for shape in (*layers.values(), *more.values()))
        """Bytes of one sequence's state in all layers."""

    def __repr__(self) -> str:
        return f"StatePool({len(self._layers)} layers, {self.num_slots} slots)"

    @property
    def all_layers(self) -> tuple[RecurrentStates, ...]:
        """The states of each layer, in order, then what layers keep besides."""
        return (*self._layers.values(), *self._further.values())

    def layer(self, layer: LayerIndex) -> RecurrentStates:
        """Return one layer's states; they are valid as long as they are referenced."""
        return self._layers[layer]

    def further(self, layer: LayerIndex) -> RecurrentStates:
        """Return what the layer keeps besides; as for `layer`."""
        return self._further[layer]


def clear_state(states: RecurrentStates, slot: int) -> None:
    """Set a slot to the state before the first token."""
    states.conv[slot] = 0.0
    states.recurrent[slot] = 0.0


def copy_state(states: RecurrentStates, source: int, target: int) -> None:
    """Copy the state of slot `source` to slot `target`."""
    states.conv[target] = states.conv[source]
    states.recurrent[target] = states.recurrent[source]


def _states(num_slots: int, shape: StateShape) -> RecurrentStates:
    return RecurrentStates(_reserve((num_slots, *shape.conv)), _reserve((num_slots, *shape.heads)))


def _reserve(shape: tuple[int, ...]) -> FloatArray:
    num_bytes = 4 * int(np.prod(shape, dtype=np.int64))
    what, fix = "one layer's recurrent states", "accept fewer requests with --max-requests"
    return reserve(num_bytes, what, fix).view(np.float32).reshape(shape)
