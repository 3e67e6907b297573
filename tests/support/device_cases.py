"""What tests of the device's kernels share: every implementation, work in slots, guarded outputs.

To be imported once it is decided whether Triton interprets. Knows the kernels' interface and no kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from tests.support.device_rows import dequantize_rows
from tests.support.kernel_cases import exact_outputs
from thermocline.kernels.gpu import attention, dequant, expert_ffn, gather_combine
from thermocline.kernels.gpu.formats import WIDE_FORMATS
from thermocline.kernels.gpu.slots import ExpertSlots, SlotMatrix, SlotWork

if TYPE_CHECKING:
    from thermocline.kernels.contract import ExpertWork
    from thermocline.kernels.dense_contract import Attending
    from thermocline.kernels.weight import Weight, WeightStack

GUARD_ROWS = 2
POISON = -12345


class GuardedDeviceMemory:
    """Stands in for torch.empty: outputs start as NaN (-12345 for integers), with rows of it before and behind."""

    def __init__(self) -> None:
        self._empty = torch.empty
        self._guards: list[torch.Tensor] = []

    def empty(self, shape, *, dtype, device) -> torch.Tensor:
        """Return what torch.empty would, guarded."""
        whole = self._empty(
            (shape[0] + 2 * GUARD_ROWS, *shape[1:]), dtype=dtype, device=device
        ).fill_(float("nan") if dtype.is_floating_point else POISON)
        self._guards += [whole[:GUARD_ROWS], whole[GUARD_ROWS + shape[0] :]]
        return whole[GUARD_ROWS : GUARD_ROWS + shape[0]]

    def empty_like(self, other: torch.Tensor) -> torch.Tensor:
        """Return what torch.empty_like would, guarded as above."""
        return self.empty(other.shape, dtype=other.dtype, device=other.device)

    def check(self) -> None:
        """Fail if a guard row was written to."""
        for guard in self._guards:
            is_poison = guard.isnan() if guard.is_floating_point() else guard == POISON
            assert is_poison.all(), "written outside of the output"


def rounded_outputs(work: ExpertWork) -> np.ndarray:
    """Return `exact_outputs` of operands that are rounded as the device's matrix units want them."""
    stack = work.stack
    gate_up = [part.format.name for part in stack.matrices[:-1]]
    return exact_outputs(work, _rounding(*gate_up), _rounding(stack.down.format.name))


def _rounding(*formats: str):
    return _to_tf32 if WIDE_FORMATS.intersection(formats) else _to_bfloat16


def _to_tf32(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)  # the last digits are cut off
    return (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values.astype(np.float32)).bfloat16().double().numpy()


class DeviceKernels:
    """The operators of one implementation ("twin", "interpreter" or "cuda"), from NumPy to NumPy."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = torch.device("cuda" if name == "cuda" else "cpu")

    def widen_programs(self, monkeypatch) -> None:
        """Give each decoding program more rows, or more of a context: the interpreter's time goes by programs."""
        monkeypatch.setattr(expert_ffn, "DECODE", replace(expert_ffn.DECODE, block_rows=128))
        monkeypatch.setattr(attention, "NUM_SPLITS", 4)

    def tolerance(self, *, prompt: bool) -> str:
        """Return the entry of the table: only a device rounds to bfloat16."""
        return "device/bfloat16" if prompt and self.name == "cuda" else "device/float32"

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        """Return a copy on the device."""
        return torch.from_numpy(np.array(array)).to(self.device)

    def slots(self, stack: WeightStack, *, places: np.ndarray) -> SlotMatrix:
        """Return the stack's matrices in slots: expert e in slot places[e], others full of ones."""
        raw = np.full((places.max() + 2, *stack.raw.shape[1:]), 255, np.uint8)
        raw[places] = stack.raw
        return SlotMatrix(stack.format, self.tensor(raw), stack.cols)

    def slot_work(self, work: ExpertWork, places: np.ndarray) -> SlotWork:
        """Return the work with expert e in slot places[e]."""
        parts = [self.slots(part, places=places) for part in work.stack.parts]
        return SlotWork(
            ExpertSlots.of(work.stack, parts),
            self.tensor(places[work.experts].astype(np.int32)),
            *map(self.tensor, (work.counts, work.x, work.rows, work.scale)),
        )

    def expert_outputs(self, work: SlotWork, *, prompt: bool) -> np.ndarray:
        """See `expert_ffn.expert_outputs`."""
        if self.name == "twin":
            return expert_ffn.naive_expert_outputs(work).numpy()
        with np.errstate(over="ignore"):  # exponentials in the interpreter, which is NumPy
            return expert_ffn.expert_outputs(work, prompt=prompt).cpu().numpy()

    def dequantize(self, weight: Weight, rows: np.ndarray) -> np.ndarray:
        """Return rows of a matrix that lies in slot 1 of 2."""
        raw = self.tensor(np.stack([np.full_like(weight.raw, 255), weight.raw]))
        if self.name == "twin":
            return dequant.naive_dequantize(raw, weight.format)[1].numpy()[rows]
        matrix = SlotMatrix(weight.format, raw, weight.cols)
        return dequantize_rows(matrix, 1, self.tensor(rows)).cpu().numpy()

    def attention(self, q, span, cache, rule: Attending) -> np.ndarray:
        """See `attention.attention`, of one span."""
        is_twin = self.name == "twin"
        function = attention.naive_attention if is_twin else attention.paged_attention
        sinks = None if rule.sinks is None else self.tensor(rule.sinks) * attention.LOG2_E
        own = attention.rule_of(
            rule.scale, rule.window, sinks, chunked=rule.chunked, temperature=rule.temperature
        )
        there = attention.tempered(self.tensor(q), span, own)
        with np.errstate(all="ignore"):  # infinity less infinity, and what nobody sees
            return function(there, span, cache, own).cpu().numpy()

    def gather_combine(self, outputs, pair_of, residual) -> np.ndarray:
        """See `gather_combine.gather_combine`."""
        is_twin = self.name == "twin"
        function = gather_combine.naive_gather_combine if is_twin else gather_combine.gather_combine
        return function(*map(self.tensor, (outputs, pair_of, residual))).cpu().numpy()
