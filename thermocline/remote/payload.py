"""Numbers as they travel: float32, or halves of it. Pure.

Halves are rounded to nearest even; what a float16 can not hold becomes its largest number, so that an
outlier of the activations does not turn into infinity on its way.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from thermocline.messages import FloatArray

ALIGNMENT: Final = 64
_MAX_F16: Final = np.float32(65504.0)


class PayloadType(IntEnum):
    """How numbers travel; the value is part of the format. Sums are made in float32 at both ends."""

    # The enum's own hash is Python code.
    __hash__ = int.__hash__

    F32 = 0
    F16 = 1
    BF16 = 2

    @property
    def storage(self) -> np.dtype[Any]:
        """The array type of a travelling number; bfloat16 travels as its 16 bits."""
        return _STORAGE[self]


_STORAGE: Final[Mapping[PayloadType, np.dtype[Any]]] = {
    PayloadType.F32: np.dtype("<f4"),
    PayloadType.F16: np.dtype("<f2"),
    PayloadType.BF16: np.dtype("<u2"),
}

ITEM_BYTES: Final = tuple(_STORAGE[kind].itemsize for kind in PayloadType)
"""Of a travelling number, by the type's value."""


def pack_floats(values: FloatArray, kind: PayloadType) -> NDArray[Any]:
    """Return `values` as they travel: itself for float32."""
    match kind:
        case PayloadType.F32:
            return values
        case PayloadType.F16:
            return np.clip(values, -_MAX_F16, _MAX_F16).astype(np.float16)
        case PayloadType.BF16:
            bits = values.view(np.uint32)
            rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
            # Rounding up must not turn a NaN into an infinity.
            return (np.where(np.isnan(values), bits | 0x400000, rounded) >> 16).astype(np.uint16)


def unpack_floats(packed: NDArray[Any], kind: PayloadType) -> FloatArray:
    """Return float32 of the same shape; the array itself where nothing has to change."""
    if kind is PayloadType.BF16:
        return (packed.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return packed.astype(np.float32, copy=False)
