"""A file's weights as the gguf package decodes them, without a line of thermocline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np
from gguf.quants import dequantize

if TYPE_CHECKING:
    from pathlib import Path


def decoded_weights(path: Path) -> dict[str, np.ndarray]:
    """Return every tensor of the file decoded to float32, in numpy order."""
    weights = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = dequantize(np.ascontiguousarray(tensor.data), tensor.tensor_type)
        shape = [int(n) for n in reversed(tensor.shape)]
        weights[tensor.name] = np.array(values, np.float32).reshape(shape)
    return weights
