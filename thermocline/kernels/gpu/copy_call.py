"""The driver's function that copies to a device, found by its name, for the core to call many times in a row.

Knows no stream's owner and nothing of what is copied.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final, Self

from thermocline.kernels.native import load_native

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LIBRARY: Final = "libcuda.so.1"
_FUNCTION: Final = "cuMemcpyHtoDAsync_v2"
# Where on the device, from where, bytes, stream; 0 for success.
_CALL: Final = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
)


class CopyCall:
    """A function that copies from the host's memory to a device's, queued on a stream."""

    def __init__(self, function: object | None) -> None:
        """function: a ctypes function that lives as long as this; None where there is none."""
        self._function = function

    @classmethod
    def of_driver(cls) -> Self:
        """Return CUDA's; without one where this system's driver has none by that name."""
        try:
            return cls(getattr(ctypes.CDLL(_LIBRARY), _FUNCTION))
        except (OSError, AttributeError):
            return cls(None)

    @classmethod
    def of_memory(cls) -> Self:
        """Return one for a device whose memory is the host's: it copies at once."""
        return cls(_CALL(_copy_at_once))

    def __repr__(self) -> str:
        return f"CopyCall({self._function})"

    @property
    def is_there(self) -> bool:
        """Whether this system has the function."""
        return self._function is not None

    def __call__(self, copies: NDArray[np.int64], stream: int) -> None:
        """Queue copies, int64 [n, 3]: addresses there and here, and bytes. Raises RuntimeError with the driver's first error."""
        function: object | None = self._function
        assert function is not None, "without the function nothing is locked to be copied from"
        address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type] # a function, which it takes
        if error := load_native().queue_copies(address or 0, copies, stream):
            raise RuntimeError(
                f"the driver copies nothing to the device ({_FUNCTION} returned {error})"
            )


def _copy_at_once(there: int, here: int, nbytes: int, _: int) -> int:
    ctypes.memmove(there, here, nbytes)
    return 0
