"""What a kernel implementation must do, and the shapes it is given. Knows no implementation.

Numeric contract (docs/numerics.md): a token's result depends on the weight's type and on the token
alone, never on how many rows are computed together, in which order, or by how many threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from thermocline.kernels.dense_contract import LayerCache
    from thermocline.modelfile.formats import BlockFormat

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int32]
ByteArray = NDArray[np.uint8]

SUPPORTED_FORMATS = frozenset({"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K"})
"""Block formats that every implementation computes from."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight matrix as it lies in the file.

    raw: uint8 [rows, bytes of a row], a view of the mapped file; it stays valid while the file is open.
    """

    name: str
    format: BlockFormat
    raw: ByteArray
    cols: int

    @property
    def rows(self) -> int:
        """Number of output features."""
        return int(self.raw.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes that one full read of the matrix touches."""
        return self.raw.nbytes


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert: gate and up [intermediate, hidden], down [hidden, intermediate]."""

    gate: Weight
    up: Weight
    down: Weight

    @property
    def nbytes(self) -> int:
        """Bytes that computing this expert once reads."""
        return self.gate.nbytes + self.up.nbytes + self.down.nbytes


@dataclass(frozen=True, slots=True)
class KVView:
    """One layer's cache as one sequence sees it.

    Position p lies in slot block_table[p // block_tokens] * block_tokens + p % block_tokens.
    """

    cache: LayerCache
    block_table: IntArray


class Kernels(Protocol):
    """One implementation of the layer's heavy work. All arrays are C-contiguous; outputs are new.

    Every method blocks until done and may be called from several threads at once.
    """

    @property
    def name(self) -> str:
        """Short name for reports: "native" or "reference"."""
        ...

    def decode_rows(self, weight: Weight, rows: IntArray) -> FloatArray:
        """Return float32 [len(rows), cols]: the rows of `weight`, decoded. rows < weight.rows."""
        ...

    def matmul(self, weight: Weight, x: FloatArray) -> FloatArray:
        """Return float32 [tokens, weight.rows] = x [tokens, cols] times the transposed weight."""
        ...

    def expert_ffn(
        self, expert: ExpertWeights, x: FloatArray, rows: IntArray, scale: FloatArray
    ) -> FloatArray:
        """Return float32 [len(rows), hidden]: scale * down(silu(gate(x[rows])) * up(x[rows])).

        x: [tokens, hidden]; rows: tokens that chose this expert; scale: their routing weights.
        """
        ...

    def attention(
        self, q: FloatArray, kv: KVView, positions: IntArray, *, scale: float
    ) -> FloatArray:
        """Return float32 [tokens, heads, head_dim]: causal attention of one sequence's tokens.

        q: [tokens, heads, head_dim]; token t sees positions 0..positions[t]; heads is a multiple of
        the cache's kv_heads, and query head h reads key head h // (heads // kv_heads).
        """
        ...
