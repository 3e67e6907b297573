"""Parts of a layer's experts, which come to a device one after the other. Knows neither store nor device."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from thermocline.kernels.weight import IntArray
    from thermocline.messages import LayerIndex


class StreamPart(NamedTuple):
    """Experts of one layer, and a slot for each: int32 [n] both."""

    layer: LayerIndex
    experts: IntArray
    slots: IntArray
