"""What a step through all layers holds on a device that has no experts. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from thermocline.messages import IntArray


class StepStore(Protocol):
    """The experts of a device, as far as a step through all layers knows them; see `ExpertStore`."""

    @property
    def is_empty(self) -> bool:
        """Whether no expert is on the device."""
        ...

    def hold(self) -> tuple[IntArray, ...]:
        """Keep all slots as they are until `let_go`, and return them by layer: int32 [E], -1 for none."""
        ...

    def let_go(self) -> None:
        """End one hold."""
        ...


class EmptyStore:
    """`StepStore` of a device that never has any."""

    is_empty = True

    def __init__(self, num_layers: int, num_experts: int) -> None:
        """num_experts: per layer."""
        absent = np.full(num_experts, -1, np.int32)
        absent.flags.writeable = False
        self._rows = (absent,) * num_layers

    def hold(self) -> tuple[IntArray, ...]:
        """See `StepStore.hold`."""
        return self._rows

    def let_go(self) -> None:
        """Do nothing."""
