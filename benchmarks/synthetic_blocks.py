"""Draws weights in any block type at memory speed: a small pool of good blocks, repeated at random.

Where a quantiser exists the pool is quantised Gaussian noise; for other types it is random bits under
scales that give the wanted spread. Either way every weight is finite, and rows differ from each other.
Knows no model and no file.
"""

from __future__ import annotations

import functools
import math
import zlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from scripts.kquants import quantize as quantize_k
from thermocline.modelfile.formats import FORMATS_BY_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from thermocline.modelfile.formats import BlockFormat

Bytes = NDArray[np.uint8]

UNIT: Final = 256
"""Weights that are drawn together: the longest block of any type."""
_POOL_UNITS: Final = 2048
_CHUNK_BYTES: Final = 16 << 20

_BY_GGUF: Final = frozenset(
    {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0", "MXFP4"}
)
_BY_SCRIPT: Final = frozenset({"Q4_K", "Q5_K", "Q6_K"})
# Where random bits need a scale: byte offsets of the block's f16 scales, and their ratio to the first.
# Q2_K: the minimum takes away the mean of its levels 0..3.
_SCALES: Final[Mapping[str, tuple[tuple[int, float], ...]]] = MappingProxyType(
    {
        "Q2_K": ((80, 1.0), (82, 1.5)),
        "Q3_K": ((108, 1.0),),
        "IQ1_S": ((0, 1.0),),
        "IQ1_M": (),
        "IQ2_XXS": ((0, 1.0),),
        "IQ2_XS": ((0, 1.0),),
        "IQ2_S": ((0, 1.0),),
        "IQ3_XXS": ((0, 1.0),),
        "IQ3_S": ((0, 1.0),),
        "IQ4_NL": ((0, 1.0),),
        "IQ4_XS": ((0, 1.0),),
    }
)
DRAWABLE: Final = tuple(sorted(_BY_GGUF | _BY_SCRIPT | _SCALES.keys()))
"""Names of the types that can be drawn."""


class WeightSource:
    """Draws tensors; equal seeds and names give equal bytes, in whichever order they are drawn."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __repr__(self) -> str:
        return f"WeightSource(seed={self._seed})"

    def chunks(
        self, name: str, form: BlockFormat, num_weights: int, deviation: float
    ) -> Iterator[Bytes]:
        """Yield the bytes of tensor `name` in pieces of some MiB; each piece is valid until the next.

        num_weights must be a multiple of UNIT. deviation: of the weights, whose mean is about 0.
        """
        num_units, rest = divmod(num_weights, UNIT)
        if rest:
            raise ValueError(f"{name} has {num_weights} weights: pass a multiple of {UNIT}")
        pool = _make_pool(form.name, deviation, self._seed)
        rng = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        step = max(1, _CHUNK_BYTES // pool.shape[1])
        out = np.empty((min(step, num_units), pool.shape[1]), np.uint8)
        for start in range(0, num_units, step):
            count = min(step, num_units - start)
            picks = rng.integers(0, len(pool), count, dtype=np.uint16).astype(np.intp)
            # "clip" only because the default mode makes `take` fill a copy of `out` first.
            np.take(pool, picks, axis=0, out=out[:count], mode="clip")
            yield out[:count].reshape(-1)

    def matrix(
        self, name: str, format_name: str, rows: int, cols: int, deviation: float | None = None
    ) -> Bytes:
        """Return uint8 [rows, row_bytes]; by default products with unit activations are about 1."""
        form = FORMATS_BY_NAME[format_name]
        wanted = 1.0 / math.sqrt(cols) if deviation is None else deviation
        out = np.empty((rows, form.row_bytes(cols)), np.uint8)
        flat, at = out.reshape(-1), 0
        for piece in self.chunks(name, form, rows * cols, wanted):
            flat[at : at + piece.size] = piece
            at += piece.size
        return out


@functools.cache
def _make_pool(format_name: str, deviation: float, seed: int) -> Bytes:
    """Return uint8 [units, bytes of a unit]."""
    rng = np.random.default_rng([seed, zlib.crc32(format_name.encode())])
    if format_name in _SCALES:
        return _random_bits(format_name, deviation, rng)
    x = (rng.standard_normal((_POOL_UNITS, UNIT)) * deviation).astype(np.float32)
    if format_name in _BY_SCRIPT:
        return quantize_k(x, format_name)
    if format_name not in _BY_GGUF:
        raise ValueError(f"no weights of type {format_name!r}: choose one of {', '.join(DRAWABLE)}")
    raw = quantize(x, GGMLQuantizationType[format_name])
    return np.ascontiguousarray(raw).view(np.uint8).reshape(_POOL_UNITS, -1)


def _random_bits(format_name: str, deviation: float, rng: np.random.Generator) -> Bytes:
    form = FORMATS_BY_NAME[format_name]
    per_unit = UNIT // form.block_elements
    blocks = rng.integers(0, 256, (_POOL_UNITS * per_unit, form.block_bytes), dtype=np.uint8)
    _set_scale(blocks, format_name, 1.0)
    unscaled = dequantize(blocks, GGMLQuantizationType[format_name])
    _set_scale(blocks, format_name, deviation / float(np.sqrt(np.mean(np.square(unscaled)))))
    return blocks.reshape(_POOL_UNITS, -1)


def _set_scale(blocks: Bytes, format_name: str, scale: float) -> None:
    for offset, factor in _SCALES[format_name]:
        raw = np.frombuffer(np.float16(scale * factor).tobytes(), np.uint8)
        blocks[:, offset : offset + 2] = raw
    if format_name == "IQ1_M":
        # Its f16 scale lies in the upper nibbles of four 16-bit words at the block's end.
        bits = int(np.float16(scale).view(np.uint16))
        for word in range(4):
            high = 48 + 2 * word + 1
            blocks[:, high] = (blocks[:, high] & 0x0F) | (((bits >> (4 * word)) & 0xF) << 4)
