"""A file's weights as the gguf package decodes them, without a line of thermocline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np
from gguf.quants import dequantize

if TYPE_CHECKING:
    from pathlib import Path


def decoded_weights(path: Path) -> dict[str, np.ndarray]:
    """Return every tensor of the file decoded to float32, in numpy order, its scale multiplied in; tables as they are.

    A scale is a tensor beside the weight: a number for a matrix, or one for each expert's.
    """
    weights = {}
    for tensor in gguf.GGUFReader(path).tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        if tensor.tensor_type.name == "I32":
            weights[tensor.name] = np.array(tensor.data).reshape(shape)
            continue
        values = dequantize(np.ascontiguousarray(tensor.data), tensor.tensor_type)
        weights[tensor.name] = np.array(values, np.float32).reshape(shape)
    for name in [name for name in weights if name.endswith(".input_scale")]:
        del weights[name]  # of activations, where those are rounded to four bits
    scales_of = [name for name in weights if name.endswith(".scale")]
    # gemma4's is a gain of the router's input.
    for name in [name for name in scales_of if "ffn_gate_inp" not in name]:
        scales, weight = weights.pop(name), name.removesuffix("scale") + "weight"
        by_expert = (-1, 1, 1) if weights[weight].ndim == 3 else ()
        weights[weight] = weights[weight] * scales.reshape(by_expert or (1,) * weights[weight].ndim)
    return weights
