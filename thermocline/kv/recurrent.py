"""Owns the arrays of recurrent state. Knows no request: callers say which slot a sequence has.

Construction reserves address space, which becomes memory only where it is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.recurrent_contract import RecurrentStates
from thermocline.kv.memory import reserve

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thermocline.kernels.recurrent_contract import StateShape
    from thermocline.kernels.weight import FloatArray
    from thermocline.messages import LayerIndex


class StatePool:
    """The recurrent states of all recurrent layers, by slot."""

    def __init__(self, layers: Iterable[LayerIndex], num_slots: int, shape: StateShape) -> None:
        conv, recurrent = (num_slots, *shape.conv), (num_slots, *shape.heads)
        self._layers = {
            layer: RecurrentStates(_reserve(conv), _reserve(recurrent)) for layer in layers
        }
        self.num_slots = num_slots
        self.slot_bytes = shape.num_bytes * len(self._layers)
        """Bytes of one sequence's state in all layers."""

    def __repr__(self) -> str:
        return f"StatePool({len(self._layers)} layers, {self.num_slots} slots)"

    @property
    def all_layers(self) -> tuple[RecurrentStates, ...]:
        """The states of each layer, in order."""
        return tuple(self._layers.values())

    def layer(self, layer: LayerIndex) -> RecurrentStates:
        """Return one layer's states; they are valid as long as they are referenced."""
        return self._layers[layer]


def clear_state(states: RecurrentStates, slot: int) -> None:
    """Set a slot to the state before the first token."""
    states.conv[slot] = 0.0
    states.recurrent[slot] = 0.0


def copy_state(states: RecurrentStates, source: int, target: int) -> None:
    """Copy the state of slot `source` to slot `target`."""
    states.conv[target] = states.conv[source]
    states.recurrent[target] = states.recurrent[source]


def _reserve(shape: tuple[int, ...]) -> FloatArray:
    num_bytes = 4 * int(np.prod(shape, dtype=np.int64))
    what, fix = "one layer's recurrent states", "accept fewer requests with --max-requests"
    return reserve(num_bytes, what, fix).view(np.float32).reshape(shape)
