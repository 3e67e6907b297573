"""Finds, checks and hands out a model's tensors: views of the mapped file, never copies.

Only norm gains (a few kilobytes) are decoded once. Knows no architecture; each architecture asks for
tensors by name and shape, and `finish` refuses a file with tensors that no architecture took.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.kernels.reference import decode_blocks
from thermocline.kernels.weight import (
    SUPPORTED_FORMATS,
    ByteArray,
    ExpertActivation,
    ExpertBiases,
    ExpertStack,
    FloatArray,
    IntArray,
    Weight,
    WeightStack,
)
from thermocline.modelfile.formats import FORMATS_BY_NAME
from thermocline.modelfile.layout import without_padding

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thermocline.modelfile.layout import TensorInfo
    from thermocline.modelfile.reader import ModelFile


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """The experts of one layer, and where in the file they are."""

    stack: ExpertStack
    tensors: tuple[TensorInfo, ...]
    """Where gate, up and down (or both and down) lie, then biases, in the order in which an expert reads them."""


class WeightMap:
    """Typed access to one file's tensors; remembers which were taken."""

    def __init__(self, file: ModelFile, *, ids: tuple[str, ...] = ()) -> None:
        """ids: names of tensors that hold token ids, see there. Raises UnsupportedModelError for formats that nothing computes with."""
        self._file, self._ids = file, ids
        self._taken: set[str] = set()
        file.require_formats(SUPPORTED_FORMATS, but_for=ids)

    def __contains__(self, name: str) -> bool:
        return name in self._file.tensors

    def num_rows(self, name: str, cols: int) -> int:
        """Return how many rows of `cols` numbers tensor `name` has. Raises ModelFileError."""
        return math.prod(self._info(name).shape) // cols

    def matrix(self, name: str, rows: int, cols: int) -> Weight:
        """Return tensor `name` [rows, cols] as a view of the map, with its scale. Raises ModelFileError."""
        scales = self._scales(name, 1)
        return replace(
            self.table(name, rows, cols), scale=1.0 if scales is None else float(scales[0])
        )

    def matrices(self, name: str, rows: tuple[int, ...], cols: int) -> tuple[Weight, ...]:
        """Return the matrices that lie one after another in tensor `name`. Raises ModelFileError."""
        whole, ends = self.matrix(name, sum(rows), cols), np.cumsum(rows)
        return tuple(
            replace(whole, raw=whole.raw[end - count : end])
            for count, end in zip(rows, ends, strict=True)
        )

    def equal_matrices(self, name: str, shape: tuple[int, int, int]) -> WeightStack:
        """Return the matrices [count, rows, cols] that lie one after another in tensor `name`. Raises ModelFileError."""
        count, rows, cols = shape
        whole = self.matrix(name, count * rows, cols)
        scales = None if whole.scale == 1.0 else np.full(count, whole.scale, np.float32)
        return WeightStack(name, whole.format, whole.raw.reshape(count, rows, -1), cols, scales)

    def table(self, name: str, rows: int, cols: int) -> Weight:
        """Return tensor `name` [rows, cols], of which rows are looked up. Raises ModelFileError."""
        info = self._checked(name, (rows, cols))
        return Weight(name, info.format, self._raw(name, rows), cols)

    def row(self, name: str, cols: int) -> Weight:
        """Return tensor `name` [cols] as a matrix of one row, a view of the map. Raises ModelFileError."""
        return self.matrix(name, 1, cols)

    def vector(self, name: str, length: int) -> FloatArray:
        """Return tensor `name` [length] decoded to float32. Raises ModelFileError."""
        return self.array(name, (length,))

    def ids(self, name: str) -> NDArray[np.int64]:
        """Return tensor `name` of the map's `ids`, int64 [count]. Raises ModelFileError."""
        assert name in self._ids, "whoever opens the file names such tensors"
        info = self._info(name)
        if info.format.name != "I64" or len(info.shape) != 1:
            what = f"is {info.format.name} of shape {list(info.shape)}, but a list of I64 is wanted"
            raise self._bad(name, what)
        self._taken.add(name)
        # A file's tensors are aligned by its metadata, which may be less than a number takes.
        return np.frombuffer(self._file.view(name).tobytes(), np.int64)

    def choices(self, name: str, shape: tuple[int, int], count: int) -> IntArray:
        """Return tensor `name` of the map's `ids`, int32 of this shape, all below `count`. Raises ModelFileError."""
        assert name in self._ids, "whoever opens the file names such tensors"
        info = self._checked(name, shape)
        if info.format.name != "I32":
            raise self._bad(name, f"is {info.format.name}, but numbers of I32 are wanted")
        # As in `ids`.
        table = np.frombuffer(self._file.view(name).tobytes(), np.int32).reshape(shape)
        if table.min(initial=0) < 0 or table.max(initial=0) >= count:
            raise self._bad(name, f"names an expert beyond the {count} that there are")
        return table

    def positive(self, name: str, length: int) -> FloatArray:
        """Return tensor `name` [length], all of whose numbers are finite and above zero. Raises ModelFileError."""
        values = self.vector(name, length)
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise ModelFileError(
                self._file.path,
                f"tensor {name!r} has numbers that are not positive",
                fix="convert or download the model again",
            )
        return values

    def experts(
        self,
        prefix: str,
        num_experts: int,
        intermediate: int,
        hidden: int,
        activation: ExpertActivation = ExpertActivation.SILU,
    ) -> StackedExperts:
        """Return the stacked experts `prefix`ffn_{gate,up,down}_exps, with biases where the file has them.

        Gate and up may be one tensor, ffn_gate_up_exps, the rows of the gate first. Raises ModelFileError, and
        UnsupportedModelError for a tensor per expert, as converters wrote until April 2024.
        """
        if f"{prefix}ffn_up.0.weight" in self:
            raise UnsupportedModelError(
                self._file.path,
                "the file has a tensor per expert, as converters wrote until April 2024",
                unsupported=(f"{prefix}ffn_up.0.weight",),
                fix="download a newer file of the model, or convert its checkpoint again; llama-quantize can not "
                "rewrite such a file, which llama.cpp does not read any more either",
            )
        if f"{prefix}ffn_gate_up_exps.weight" in self:
            found = self._fused_experts(prefix, num_experts, intermediate, hidden, activation)
        else:
            inner, outer = (num_experts, intermediate, hidden), (num_experts, hidden, intermediate)
            shapes = {"gate": inner} if activation.has_gate else {}
            found = self._separate_experts(
                prefix, shapes | {"up": inner, "down": outer}, activation
            )
        self.check_scales(found.stack)
        return found

    def _separate_experts(
        self, prefix: str, shapes: dict[str, tuple[int, int, int]], activation: ExpertActivation
    ) -> StackedExperts:
        names = {role: f"{prefix}ffn_{role}_exps" for role in shapes}
        read = {role: self._stack(f"{names[role]}.weight", shapes[role]) for role in shapes}
        given = {}
        if any(f"{name}.bias" in self for name in names.values()):
            given = {role: self._bias_stack(f"{names[role]}.bias", shapes[role]) for role in shapes}
        stacks = {role: stack for role, (stack, _) in read.items()}
        added = {role: stack for role, (stack, _) in given.items()}
        biases = ExpertBiases(added.get("gate"), added["up"], added["down"]) if added else None
        stack = ExpertStack(stacks.get("gate"), stacks["up"], stacks["down"], activation, biases)
        return StackedExperts(stack, tuple(info for _, info in (*read.values(), *given.values())))

    def _bias_stack(self, name: str, shape: tuple[int, int, int]) -> tuple[WeightStack, TensorInfo]:
        """Return tensor `name` [experts, rows] of matrices of this shape: a row of numbers for each expert."""
        info = self._checked(name, shape[:2])
        if info.format.name != "F32":
            raise self._bad(name, f"is {info.format.name}, but biases of experts are read as F32")
        return WeightStack(name, info.format, self._raw(name, shape[0], 1), shape[1]), info

    def check_scales(self, stack: ExpertStack) -> None:
        """Refuse scales of matrices that the formula of the experts does not allow. Raises ModelError."""
        scaled = [part for part in stack.matrices if part.scales is not None]
        up = stack.up.scales
        is_square = stack.activation is ExpertActivation.SQUARED_RELU
        if is_square and up is not None and not (up > 0).all():
            raise self._bad(stack.up.name, "has a scale that is not positive")
        if scaled and (
            stack.biases is not None or not (is_square or stack.activation.is_linear_in_up)
        ):
            raise UnsupportedModelError(
                self._file.path,
                f"the experts {scaled[0].name} have scales beside their own formula or biases",
                unsupported=tuple(part.name for part in scaled),
                fix="use a file of another quantisation than NVFP4, or one without biases of its feed-forward",
            )

    def _fused_experts(
        self,
        prefix: str,
        num_experts: int,
        intermediate: int,
        hidden: int,
        activation: ExpertActivation,
    ) -> StackedExperts:
        both_name, down_name = (f"{prefix}ffn_{role}_exps.weight" for role in ("gate_up", "down"))
        both, both_info = self._stack(both_name, (num_experts, 2 * intermediate, hidden))
        down, down_info = self._stack(down_name, (num_experts, hidden, intermediate))
        gate, up = (
            replace(both, raw=part)
            for part in (both.raw[:, :intermediate], both.raw[:, intermediate:])
        )
        return StackedExperts(ExpertStack(gate, up, down, activation), (both_info, down_info))

    def stack(self, name: str, shape: tuple[int, int, int]) -> WeightStack:
        """Return tensor `name` [matrices, rows, cols]. Raises ModelFileError."""
        return self._stack(name, shape)[0]

    def _stack(self, name: str, shape: tuple[int, int, int]) -> tuple[WeightStack, TensorInfo]:
        info = self._checked(name, shape)
        scales = self._scales(name, shape[0])
        raw = self._raw(name, *shape[:2])
        return WeightStack(name, info.format, raw, shape[2], scales), info

    def expert(
        self,
        prefix: str,
        suffix: str,
        intermediate: int,
        hidden: int,
        activation: ExpertActivation = ExpertActivation.SILU,
    ) -> ExpertStack:
        """Return the matrices `prefix`ffn_{gate,up,down}`suffix` as a stack of one, with biases where the file has them.

        Gate and up may be one tensor, ffn_up, the rows of the gate first. Raises ModelFileError.
        """
        gate, up, down = (f"{prefix}ffn_{role}{suffix}.weight" for role in ("gate", "up", "down"))
        read: dict[str, Weight] = {}
        if activation.has_gate and self._holds_both(gate, up, intermediate, hidden):
            read["gate"], read["up"] = self.matrices(up, (intermediate,) * 2, hidden)
        else:
            read["up"] = self.matrix(up, intermediate, hidden)
            if activation.has_gate:
                read["gate"] = self.matrix(gate, intermediate, hidden)
        read["down"] = self.matrix(down, hidden, intermediate)
        found = {role: _stack_of(weight) for role, weight in read.items()}
        biases = self._biases_of_one(f"{prefix}ffn_", suffix, found)
        stack = ExpertStack(found.get("gate"), found["up"], found["down"], activation, biases)
        self.check_scales(stack)
        return stack

    def _holds_both(self, gate: str, up: str, intermediate: int, hidden: int) -> bool:
        """Whether tensor `up` has the rows of a gate, too, which is no tensor of its own."""
        return gate not in self and self.num_rows(up, hidden) == 2 * intermediate

    def _biases_of_one(
        self, start: str, suffix: str, matrices: dict[str, WeightStack]
    ) -> ExpertBiases | None:
        """Return the biases beside a stack of one, zeros for one that the file lacks; None if it lacks all."""
        names = {role: f"{start}{role}{suffix}.bias" for role in matrices}
        if not any(name in self for name in names.values()):
            return None
        found = {}
        for role, name in names.items():
            count = matrices[role].raw.shape[1]
            values = self.vector(name, count) if name in self else np.zeros(count, np.float32)
            raw = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(1, 1, -1)
            found[role] = WeightStack(name, FORMATS_BY_NAME["F32"], raw, count)
        return ExpertBiases(found.get("gate"), found["up"], found["down"])

    def part(self, weight: Weight, rows: IntArray) -> Weight:
        """Return some rows of a small matrix as one of their own, a copy."""
        return replace(weight, raw=np.ascontiguousarray(weight.raw[rows]))

    def array(self, name: str, shape: tuple[int, ...]) -> FloatArray:
        """Return tensor `name` decoded to float32. Raises ModelFileError."""
        info = self._checked(name, shape)
        raw = self._raw(name, math.prod(shape[:-1]))
        return decode_blocks(raw, info.format.type_id).reshape(shape)

    def leave_out(self, prefix: str) -> None:
        """Let the tensors whose names begin so count as taken."""
        self._taken.update(name for name in self._file.tensors if name.startswith(prefix))

    def finish(self, prefix: str = "") -> None:
        """Refuse the file if it has tensors that were not taken: they would change the result.

        prefix: of the names that count.
        """
        rest = sorted(name for name in self._file.tensors if name.startswith(prefix))
        rest = [name for name in rest if name not in self._taken]
        if rest:
            raise UnsupportedModelError(
                self._file.path,
                f"{len(rest)} tensors have no place in architecture {self._file.architecture!r}",
                unsupported=tuple(rest[:8]) + (("...",) if len(rest) > 8 else ()),
                fix="convert the model again with a current converter, or use another file",
            )

    def _scales(self, name: str, count: int) -> FloatArray | None:
        """Return the scale of each matrix of tensor `name`; None where the file has none.

        `.scale` beside `.weight` is one number per matrix. `.input_scale` rounds activations on hardware that
        computes with four bits; here they keep more, as in llama.cpp.
        """
        stem = name.removesuffix(".weight")
        if f"{stem}.input_scale" in self:
            self._taken.add(f"{stem}.input_scale")
        if f"{stem}.scale" not in self:
            return None
        scales = self.vector(f"{stem}.scale", count)
        if not np.isfinite(scales).all():
            raise self._bad(f"{stem}.scale", "holds a number that is not finite")
        return scales

    def _info(self, name: str) -> TensorInfo:
        info = self._file.tensors.get(name)
        if info is None:
            raise self._bad(name, "is missing")
        return info

    def _raw(self, name: str, *rows: int) -> ByteArray:
        """Return a tensor's bytes [*rows, bytes of a row], however the file pads its shape."""
        return self._file.view(name).reshape(*rows, -1)

    def _checked(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        """Return where a tensor lies, in the shape that was asked for."""
        info = self._info(name)
        if without_padding(info.shape) != without_padding(shape):
            what = f"has shape {list(info.shape)}, but the metadata ask for {list(shape)}"
            raise self._bad(name, what)
        self._taken.add(name)
        return replace(info, shape=shape)

    def _bad(self, name: str, what: str) -> ModelFileError:
        info = self._file.tensors.get(name)
        return ModelFileError(
            self._file.path if info is None else info.path,
            f"tensor {name!r} {what}",
            offset=None if info is None else info.offset,
            fix="convert or download the model again",
        )


def _stack_of(weight: Weight) -> WeightStack:
    scales = None if weight.scale == 1.0 else np.array([weight.scale], np.float32)
    return WeightStack(weight.name, weight.format, weight.raw[None], weight.cols, scales)
