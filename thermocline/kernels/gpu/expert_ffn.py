"""The experts of one layer on the device, over raw blocks in slots: two launches for any batch.

Gate, up and their activation in the first, down and routing weight in the second, behind a small one that lays out tiles.
Pairs stay where they are: a tile is a run of pairs of one expert, and no pair is padded. The caller's `prompt`
alone decides between the two arithmetics (docs/numerics.md). Knows no store and no stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import triton

from thermocline.kernels.gpu.activations import activate
from thermocline.kernels.gpu.dequant import naive_dequantize
from thermocline.kernels.gpu.expert_rows import down_rows_kernel, gate_up_rows_kernel
from thermocline.kernels.gpu.expert_tiles import down_tiles_kernel, gate_up_tiles_kernel
from thermocline.kernels.gpu.formats import WIDE_FORMATS
from thermocline.kernels.gpu.tile_schedule import tile_schedule
from thermocline.kernels.weight import SiluLimits

if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

    from thermocline.kernels.gpu.slots import SlotMatrix, SlotWork


@dataclass(frozen=True, slots=True)
class TileForm:
    """One arithmetic: its kernels, and how they cut work into programs.

    block_rows: rows of a matrix per program; tile_pairs: the sizes that a tile of pairs may have.
    """

    gate_up: Any
    down: Any
    block_rows: int
    tile_pairs: tuple[int, ...]
    num_warps: int
    num_stages: int

    def pairs_per_tile(self, num_pairs: int, num_experts: int) -> int:
        """Return the smallest size that holds an average expert's pairs; results do not depend on it."""
        fitting = (size for size in self.tile_pairs if size * num_experts >= num_pairs)
        return next(fitting, self.tile_pairs[-1])

    def grid(self, num_tiles: int, num_rows: int) -> tuple[int, int]:
        """Return the grid of a product. Programs start along the first number.

        So those that read the same rows of a matrix for different tokens run next to each other, and the rows come
        from memory once. The other way a head that no cache holds was read once per tile.
        """
        return num_tiles, triton.cdiv(num_rows, self.block_rows)

    def options(self, tile_pairs: int) -> dict[str, int | bool]:
        """Return the arguments of a launch that the form decides."""
        return {
            "block_rows": self.block_rows,
            "num_pairs": tile_pairs,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }


# 8 rows times 128 bytes are one load of 16 bytes per thread of two warps. Four pairs at a time would no
# longer fit a thread's registers.
DECODE = TileForm(gate_up_rows_kernel, down_rows_kernel, 8, (1, 2), num_warps=2, num_stages=1)
_NO_LIMITS = SiluLimits(math.inf, math.inf)
PROMPT = TileForm(
    gate_up_tiles_kernel, down_tiles_kernel, 64, (16, 32, 64), num_warps=8, num_stages=1
)


def expert_outputs(work: SlotWork, *, prompt: bool = False, out: Tensor | None = None) -> Tensor:
    """Return float32 [pairs, hidden]: scale * down(inner) of each pair, inner the activation of gate and up of x[row].

    out: where they go, if given; rows of pairs whose expert has no slot stay as they are. Only queues work on the current stream; needs nothing from the host but shapes. Decoding computes in
    float32; prompts round both operands of each product to bfloat16 (TF32 with an F16 or F32 matrix).
    """
    form, experts, num_pairs = PROMPT if prompt else DECODE, work.experts, len(work.rows)
    if out is None:
        out = torch.empty((num_pairs, experts.down.rows), dtype=torch.float32, device=work.x.device)
    if not num_pairs:
        return out
    tile_pairs = form.pairs_per_tile(num_pairs, len(work.slots))
    tiles = tile_schedule(work.slots, work.counts, num_pairs, tile_pairs)
    inner = _gate_up(work, form, tiles, tile_pairs)
    down, biases = experts.down, experts.biases
    added = work.scale if biases is None else biases.down
    form.down[form.grid(len(tiles), down.rows)](
        *(out, inner, down.raw, down.codebook, tiles, work.scale, added),
        *(down.raw.stride(0), added.stride(0)),
        row_bytes=down.raw.shape[2],
        num_rows=down.rows,
        cols=down.cols,
        fmt=down.format.name,
        has_bias=biases is not None,
        **form.options(tile_pairs),
    )
    return out


def with_operands(work: SlotWork, *, prompt: bool) -> SlotWork:
    """Return work whose x is as products take it, for several calls with the same x."""
    gate, up = work.experts.gate or work.experts.up, work.experts.up
    return replace(work, x=work.x.to(operand_type(PROMPT if prompt else DECODE, gate, up)))


def _gate_up(work: SlotWork, form: TileForm, tiles: Tensor, tile_pairs: int) -> Tensor:
    """Return the activation of gate x and up x [pairs, intermediate], in the type that the down product takes."""
    experts, biases = work.experts, work.experts.biases
    # Where there is no gate, or no bias, other memory stands for it, which is not read.
    up, gate = experts.up, experts.up if experts.gate is None else experts.gate
    up_bias = work.scale if biases is None else biases.up
    gate_bias = up_bias if biases is None or biases.gate is None else biases.gate
    assert up_bias.stride(0) == gate_bias.stride(0), "biases lie in slots of one size"
    limits = experts.limits or _NO_LIMITS
    kind = operand_type(form, experts.down)
    inner = torch.empty((len(work.rows), up.rows), dtype=kind, device=work.x.device)
    form.gate_up[form.grid(len(tiles), up.rows)](
        *(inner, work.x.to(operand_type(form, gate, up)), gate.raw, up.raw),
        *(gate.codebook, up.codebook, tiles, work.rows),
        *(work.scale if work.gate_scale is None else work.gate_scale,),
        *(gate_bias, up_bias, gate.raw.stride(0), up.raw.stride(0), up_bias.stride(0)),
        *(limits.gate, limits.up),
        gate_row_bytes=gate.raw.shape[2],
        up_row_bytes=up.raw.shape[2],
        num_rows=up.rows,
        cols=up.cols,
        gate_fmt=gate.format.name,
        up_fmt=up.format.name,
        is_scaled=work.gate_scale is not None and experts.gate is not None,
        activation=experts.activation.name,
        has_gate=experts.gate is not None,
        has_bias=biases is not None,
        **form.options(tile_pairs),
    )
    return inner


def operand_type(form: TileForm, *matrices: SlotMatrix) -> torch.dtype:
    """Return what activations are given as: float32 goes through the matrix units as TF32.

    Triton's interpreter multiplies bfloat16 as if their bits were integers: there all is float32.
    """
    has_digits = any(matrix.format.name in WIDE_FORMATS for matrix in matrices)
    is_exact = form is DECODE or has_digits or triton.knobs.runtime.interpret
    return torch.float32 if is_exact else torch.bfloat16


def naive_expert_outputs(work: SlotWork, *, out: Tensor | None = None) -> Tensor:
    """Twin of `expert_outputs` in plain torch and float32, expert by expert; reads `counts` on the host."""
    experts, start = work.experts, 0
    if out is None:
        out = work.x.new_zeros((len(work.rows), experts.down.rows))
    for slot, count in zip(work.slots.tolist(), work.counts.tolist(), strict=True):
        if slot < 0:
            start += count
            continue
        pairs = slice(start, start + count)
        inner = _naive_inner(work, slot, pairs)
        found = inner @ naive_dequantize(experts.down.raw[slot], experts.down.format).T
        if experts.biases is not None:
            found = found + experts.biases.down[slot]
        out[pairs] = found * work.scale[pairs, None]
        start += count
    return out


def _naive_inner(work: SlotWork, slot: int, pairs: slice) -> Tensor:
    experts, biases = work.experts, work.experts.biases
    x = work.x[work.rows[pairs].long()]
    up, gate = x @ naive_dequantize(experts.up.raw[slot], experts.up.format).T, None
    if biases is not None:
        up = up + biases.up[slot]
    if experts.gate is not None:
        gate = x @ naive_dequantize(experts.gate.raw[slot], experts.gate.format).T
        if work.gate_scale is not None:
            gate = gate * work.gate_scale[pairs, None]
        if biases is not None and biases.gate is not None:
            gate = gate + biases.gate[slot]
    return activate(experts.activation, gate, up, experts.limits)
