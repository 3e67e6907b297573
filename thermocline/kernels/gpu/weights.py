"""Weight matrices on a device, and products with them. Knows no layer.

All take the bytes that they have in the file, but for those that decide between experts. Blocks stay as they are, with
the matrix's own scale beside them. F32 and BF16 are plain numbers, multiplied by it when loaded (docs/decisions/0014).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from thermocline.kernels.gpu.product import (
    block_product,
    head_products,
    naive_block_product,
    naive_head_products,
)
from thermocline.kernels.gpu.slots import SlotMatrix
from thermocline.kernels.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.kernels.gpu.streams import DeviceStreams
    from thermocline.kernels.weight import FloatArray, IntArray, WeightStack

# Numbers, or bytes, that go through the host at a time while a matrix is loaded.
_AT_A_TIME = 1 << 24
_PLAIN = frozenset(["F32", "BF16"])


@dataclass(frozen=True, slots=True, eq=False)
class PlainMatrix:
    """numbers: float32 or bfloat16 [rows, cols]."""

    numbers: torch.Tensor

    def multiply(self, x: torch.Tensor, *, prompt: bool) -> torch.Tensor:
        """Return float32 [tokens, rows]: x [tokens, cols] times the transposed matrix."""
        return torch.mm(x.to(self.numbers.dtype), self.numbers.t()).float()


@dataclass(frozen=True, slots=True, eq=False)
class BlockMatrix:
    """blocks: the matrix as the only slot; scale: the factor on every product."""

    blocks: SlotMatrix
    scale: float = 1.0

    def multiply(self, x: torch.Tensor, *, prompt: bool) -> torch.Tensor:
        """Return float32 [tokens, rows]: x [tokens, cols] times the transposed matrix.

        prompt: the tokens are a prompt's, which has its own arithmetic.
        """
        product = block_product if x.is_cuda else naive_block_product
        return product(self.blocks, x, prompt=prompt, scale=self.scale)


DeviceMatrix: TypeAlias = PlainMatrix | BlockMatrix


@dataclass(frozen=True, slots=True, eq=False)
class PlainHeads:
    """numbers: float32 or bfloat16 [heads, rows, cols]; scales: as in `BlockHeads`."""

    numbers: torch.Tensor
    scales: torch.Tensor | None

    def multiply(self, x: torch.Tensor, *, prompt: bool) -> torch.Tensor:
        """Return float32 [tokens, heads, rows]: x [tokens, heads, cols] times each head's transposed matrix."""
        rows = x.transpose(0, 1).to(self.numbers.dtype)
        products = torch.bmm(rows, self.numbers.transpose(1, 2)).float()
        if self.scales is not None:
            products = products * self.scales[:, None, None]
        return products.transpose(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class BlockHeads:
    """blocks: a matrix per slot; scales: float32 [heads], the factor on each one's products, None for 1."""

    blocks: SlotMatrix
    scales: torch.Tensor | None

    def multiply(self, x: torch.Tensor, *, prompt: bool) -> torch.Tensor:
        """Return float32 [tokens, heads, rows]: x [tokens, heads, cols] times each head's transposed matrix.

        prompt: as in `BlockMatrix.multiply`.
        """
        products = head_products if x.is_cuda else naive_head_products
        return products(self.blocks, x, self.scales, prompt=prompt)


DeviceHeads: TypeAlias = PlainHeads | BlockHeads


class MatrixLoader:
    """Brings weights of the mapped file to one device."""

    def __init__(
        self, streams: DeviceStreams, decode_rows: Callable[[Weight, IntArray], FloatArray]
    ) -> None:
        """decode_rows: as `Kernels.decode_rows`."""
        self._streams = streams
        self._decode_rows = decode_rows

    def matrix(self, weight: Weight, *, exact: bool = False) -> DeviceMatrix:
        """Return the matrix. exact: in float32 whatever its type, for routers."""
        if weight.format.name not in _PLAIN and not exact:
            blocks = SlotMatrix(weight.format, self._blocks(weight)[None], weight.cols)
            return BlockMatrix(blocks, weight.scale)
        is_wide = exact or weight.format.name == "F32"
        return PlainMatrix(self._numbers(weight, torch.float32 if is_wide else torch.bfloat16))

    def heads(self, stack: WeightStack) -> DeviceHeads:
        """Return the matrices of all heads, [heads, rows, cols]."""
        heads, rows = stack.raw.shape[:2]
        factors = None if stack.scales is None else self.vector(stack.scales)
        one = Weight(stack.name, stack.format, stack.raw.reshape(heads * rows, -1), stack.cols)
        if stack.format.name not in _PLAIN:
            blocks = self._blocks(one).view(heads, rows, -1)
            return BlockHeads(SlotMatrix(stack.format, blocks, stack.cols), factors)
        kind = torch.float32 if stack.format.name == "F32" else torch.bfloat16
        return PlainHeads(self._numbers(one, kind).view(heads, rows, -1), factors)

    def vector(self, values: FloatArray) -> torch.Tensor:
        """Return float32 numbers of any shape."""
        return self._streams.upload(values)

    def _blocks(self, weight: Weight) -> torch.Tensor:
        blocks = torch.empty(weight.raw.shape, dtype=torch.uint8, device=self._streams.device)
        for rows in _slices(weight.rows, weight.raw.shape[1]):
            # Copied first, because torch has no read-only tensors and the mapped file is read-only.
            blocks[rows].copy_(torch.from_numpy(np.array(weight.raw[rows])))
        self._streams.check(blocks)
        return blocks

    def _numbers(self, weight: Weight, kind: torch.dtype) -> torch.Tensor:
        numbers = torch.empty((weight.rows, weight.cols), dtype=kind, device=self._streams.device)
        for rows in _slices(weight.rows, weight.cols):
            index = np.arange(rows.start, rows.stop, dtype=np.int32)
            decoded = torch.from_numpy(self._decode_rows(weight, index))
            # Rounded on the host: half of the bytes to copy.
            numbers[rows].copy_(decoded.to(kind))
        self._streams.check(numbers)
        return numbers


def _slices(num_rows: int, row_size: int) -> list[slice]:
    step = max(_AT_A_TIME // row_size, 1)
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
