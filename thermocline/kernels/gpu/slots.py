"""Inputs of the device's kernels: weights in device slots, and work that names slots. Owns no memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from thermocline.kernels.gpu.device_codebooks import device_codebook
from thermocline.kernels.gpu.formats import DEVICE_FORMATS
from thermocline.kernels.weight import ExpertActivation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from thermocline.kernels.weight import ExpertStack, SiluLimits
    from thermocline.modelfile.formats import BlockFormat


@dataclass(frozen=True, slots=True)
class SlotMatrix:
    """One matrix per slot, as its bytes lie in the file.

    raw: uint8 [slots, rows, bytes of a row] on the device. Rows lie one behind the other; slots may lie
    further apart (a multiple of 16 bytes), so that a slot can hold all three matrices of an expert.
    """

    format: BlockFormat
    raw: Tensor
    cols: int

    def __post_init__(self) -> None:
        row_bytes = self.format.row_bytes(self.cols)
        assert self.format.name in DEVICE_FORMATS, f"{self.format.name} is no format of the device"
        assert self.raw.shape[2] == row_bytes, "the bytes of a row do not fit the columns"
        assert self.raw.stride()[1:] == (row_bytes, 1), "the rows of a slot are not contiguous"
        apart = self.raw.stride(0)
        assert apart == self.rows * row_bytes or apart % 16 == 0, "slots are not aligned"
        assert self.raw.data_ptr() % 16 == 0, "the first slot is not aligned"

    @property
    def rows(self) -> int:
        """Number of output features."""
        return int(self.raw.shape[1])

    @property
    def codebook(self) -> Tensor:
        """What the kernels get as the format's codebook: for one without, memory that they do not read."""
        found = device_codebook(self.format.name, self.raw.device)
        return self.raw if found is None else found


@dataclass(frozen=True, slots=True)
class SlotBiases:
    """What is added to the products of experts: float32 [slots, rows] on the device, a stride of slots apart.

    gate: None where the activation has no gate.
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class ExpertSlots:
    """Experts of one layout: gate and up [slots, intermediate, hidden], down [slots, hidden, intermediate].

    gate: None where the activation has no gate. limits: of the activation, where it has them.
    """

    gate: SlotMatrix | None
    up: SlotMatrix
    down: SlotMatrix
    activation: ExpertActivation = ExpertActivation.SILU
    biases: SlotBiases | None = None
    limits: SiluLimits | None = None

    @classmethod
    def of(cls, stack: ExpertStack, parts: Sequence[SlotMatrix]) -> Self:
        """Return slots for experts like those of `stack`. parts: of `ExpertStack.parts`, in their order."""
        matrices = parts[: len(stack.matrices)]
        added = [part.raw.view(torch.float32).squeeze(1) for part in parts[len(matrices) :]]
        gate = matrices[0] if stack.activation.has_gate else None
        biases = None
        if added:
            biases = SlotBiases(None if gate is None else added[0], added[-2], added[-1])
        return cls(gate, matrices[-2], matrices[-1], stack.activation, biases, stack.limits)


@dataclass(frozen=True, slots=True)
class SlotWork:
    """`ExpertWork` on the device: pairs (token, slot of the router), sorted by expert.

    slots, counts: int32 [n], where each expert lies and how many pairs chose it, maybe none; x: float32
    [tokens, hidden]; rows: int32 [pairs], the token of each pair; scale: float32 [pairs], its routing
    weight. The first counts[0] pairs chose the expert in slots[0], and so on. An expert whose slot is below zero is
    not there. Its pairs are not computed, and neither are those behind the sum of counts: nobody reads what they get. gate_scale: float32 [pairs], what a pair's gate values are multiplied by; None without.
    Scales of up and down matrices are factors of `scale`; experts with biases have no scales.
    """

    experts: ExpertSlots
    slots: Tensor
    counts: Tensor
    x: Tensor
    rows: Tensor
    scale: Tensor
    gate_scale: Tensor | None = None
