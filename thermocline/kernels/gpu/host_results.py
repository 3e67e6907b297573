"""Pinned memory for what a device's results are copied to, each piece used again when nobody has it any more.

torch's own allocator records an event on the stream of a piece when that is freed. Results are let go by any thread,
maybe while another one captures work of that stream, which breaks the capture or a later use of the event. Knows no
result.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from numpy.typing import NDArray

_LEAST_BYTES: Final = 4096
MAX_BYTES: Final = 16 << 20
"""Larger results are rare, and as fast through ordinary memory as they are used up."""


class HostResults:
    """One device's pieces, of powers of two. Any thread."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, deque[torch.Tensor]] = {}
        self.num_bytes = 0
        """Of all pieces, used or not."""

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, NDArray[Any]]:
        """Return memory of at most `MAX_BYTES` with anything in it, as a tensor and an array.

        It is used again when the array and its views are gone; the tensor may not be kept longer.
        """
        count = 1
        for size in shape:
            count *= size
        nbytes = count * dtype.itemsize
        assert nbytes <= MAX_BYTES, f"{nbytes} bytes are no piece"
        size = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length()) if nbytes else _LEAST_BYTES
        free = self._free.setdefault(size, deque())
        try:
            piece = free.popleft()
        except IndexError:
            piece = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
            self.num_bytes += size
        given = piece[:nbytes].view(dtype).view(tuple(shape))
        array = given.numpy()
        # Views of an array on foreign memory hold that array, not just the memory.
        weakref.finalize(array, free.append, piece)
        return given, array
