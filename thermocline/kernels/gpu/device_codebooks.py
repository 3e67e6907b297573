"""The codebooks of the IQ types on a device, and the levels of IQ4: each lies there once. Knows no kernel."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.kernels.codebooks import CODEBOOK_SHAPES, codebook_table

if TYPE_CHECKING:
    import torch

    from thermocline.kernels.weight import ByteArray


IQ4_LEVELS: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the 4 bits of a weight stand for in IQ4_NL and IQ4_XS."""
_IQ4: Final = ("IQ4_NL", "IQ4_XS")


def device_codebook(format_name: str, device: torch.device) -> torch.Tensor | None:
    """Return the codebook of a format, uint8 [entries, weights of an entry]; None where it has none.

    Of IQ4_NL and IQ4_XS: each level plus 128.

    The first call for a device copies it there and waits, so it may not be captured.
    """
    has_one = format_name in CODEBOOK_SHAPES or format_name in _IQ4
    return _uploaded(format_name, device) if has_one else None


@cache
def _uploaded(format_name: str, device: torch.device) -> torch.Tensor:
    import torch

    if format_name == "IQ1_M":
        return _uploaded("IQ1_S", device)
    if format_name == "IQ4_XS":
        return _uploaded("IQ4_NL", device)
    with torch.inference_mode(mode=False):
        return torch.from_numpy(_table(format_name)).to(device)


def _table(format_name: str) -> ByteArray:
    if format_name in _IQ4:
        return (np.array(IQ4_LEVELS, np.int16)[:, None] + 128).astype(np.uint8)
    return codebook_table(format_name)
