"""Numbers in messages: float32, float16 or bfloat16. Pure.

Rounds to nearest even. Values beyond float16 become its largest number, so outliers of the activations do not become
infinite.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from thermocline.kernels.native import load_native

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from thermocline.messages import FloatArray

ALIGNMENT: Final = 64
_MAX_F16: Final = np.float32(65504.0)


class PayloadType(IntEnum):
    """The type of numbers in messages; the value is part of the format. Both sides sum in float32."""

    # The enum's own hash is Python code.
    __hash__ = int.__hash__

    F32 = 0
    F16 = 1
    BF16 = 2

    @property
    def storage(self) -> np.dtype[Any]:
        """The array type of a number; bfloat16 is sent as its 16 bits."""
        return _STORAGE[self]


_STORAGE: Final[Mapping[PayloadType, np.dtype[Any]]] = {
    PayloadType.F32: np.dtype("<f4"),
    PayloadType.F16: np.dtype("<f2"),
    PayloadType.BF16: np.dtype("<u2"),
}

ITEM_BYTES: Final = tuple(_STORAGE[kind].itemsize for kind in PayloadType)
"""Bytes of a number, by the type's value."""


def pack_floats(
    values: FloatArray, kind: PayloadType, out: NDArray[Any] | None = None
) -> NDArray[Any]:
    """Return `values` in the message's type; itself for float32 without `out`.

    out: where to write them, contiguous, of the same shape and of the message's type.
    """
    if kind is PayloadType.F32:
        if out is None:
            return values
        out[...] = values
        return out
    place = np.empty(values.shape, kind.storage) if out is None else out
    if kind is PayloadType.BF16:
        flat = np.ascontiguousarray(values).reshape(-1)
        load_native().pack_bfloats(flat, place.reshape(-1))
    else:
        place[...] = np.clip(values, -_MAX_F16, _MAX_F16)
    return place


def unpack_floats(packed: NDArray[Any], kind: PayloadType) -> FloatArray:
    """Return float32 of the same shape; the array itself where nothing has to change."""
    if kind is not PayloadType.BF16:
        return packed.astype(np.float32, copy=False)
    values = np.empty(packed.shape, np.float32)
    load_native().unpack_bfloats(np.ascontiguousarray(packed).reshape(-1), values.reshape(-1))
    return values
