"""Which rows of a layer go to which rank, and their bytes on the way. Pure.

A token goes to each rank at most once, however many of its experts are there. What goes to one rank is one run of
bytes: head, experts, counts, places, weights, rows. What comes back is the output of each (token, slot) pair, in the
pairs' order, and never a sum.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from thermocline.errors import MeshError
from thermocline.parallel.workspace import HEAD_BYTES, INT_BYTES
from thermocline.remote.payload import ITEM_BYTES, PayloadType, pack_floats, unpack_floats

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thermocline.messages import ExpertDispatch, FloatArray, IntArray

_HEAD: Final = struct.Struct("<IIIIIIII")
LENGTH_AT: Final = 7
"""Which number of a head is the part's length in bytes, where parts travel in blocks; 0 elsewhere."""

_INT: Final = np.dtype("<i4")
_FLOAT: Final = np.dtype("<f4")


class Part(NamedTuple):
    """What one rank computes for another. All int32 but weights, which are float32.

    tokens: [n], the rows of x that it needs, each once. experts, counts: [m], ascending, and the pairs of each. places:
    [pairs], each pair's index into `tokens`. pairs: [pairs], each pair's index into the dispatch.
    """

    tokens: IntArray
    experts: IntArray
    counts: IntArray
    places: IntArray
    weights: FloatArray
    pairs: IntArray


class Rows(NamedTuple):
    """A part as its owner receives it. x: float32 [tokens, hidden]; the others as in `Part`."""

    x: FloatArray
    experts: IntArray
    counts: IntArray
    places: IntArray
    weights: FloatArray
    is_prompt: bool

    @property
    def num_pairs(self) -> int:
        """The (token, slot) pairs."""
        return len(self.places)


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """parts: by the rank that computes it; a rank without pairs has none."""

    parts: dict[int, Part]
    num_ranks: int

    @property
    def rows_to(self) -> IntArray:
        """int32 [ranks]: the tokens that go to each rank, itself included."""
        rows = np.zeros(self.num_ranks, np.int32)
        for rank, part in self.parts.items():
            rows[rank] = len(part.tokens)
        return rows


def plan_dispatch(
    dispatch: ExpertDispatch, target: IntArray, num_ranks: int, tokens: range | None = None
) -> DispatchPlan:
    """Return what goes where. target: int32 [E], the rank that computes each expert for this one.

    tokens: the rows that this rank sends, all where it is None.
    """
    experts = np.repeat(dispatch.experts, dispatch.counts)
    ranks = target[experts]
    order = np.argsort(ranks, kind="stable").astype(np.int32)
    if tokens is not None:
        rows = dispatch.rows[order]
        order = order[(rows >= tokens.start) & (rows < tokens.stop)]
    parts: dict[int, Part] = {}
    ends = np.searchsorted(ranks[order], np.arange(num_ranks + 1))
    for rank in range(num_ranks):
        pairs = order[ends[rank] : ends[rank + 1]]
        if len(pairs):
            wanted, places = _numbered(dispatch.rows[pairs])
            per_expert = np.bincount(experts[pairs], minlength=len(target)).astype(np.int32)
            chosen = per_expert.nonzero()[0].astype(np.int32)
            parts[rank] = Part(
                wanted, chosen, per_expert[chosen], places, dispatch.weights[pairs], pairs
            )
    return DispatchPlan(parts, num_ranks)


def _numbered(rows: IntArray) -> tuple[IntArray, IntArray]:
    """Return the different rows, ascending, and each row's index among them: what np.unique returns, without sorting."""
    is_wanted = np.zeros(int(rows.max()) + 1, np.bool_)
    is_wanted[rows] = True
    number = is_wanted.cumsum(dtype=np.int32) - np.int32(1)
    return is_wanted.nonzero()[0].astype(np.int32), number[rows]


def part_bytes(part: Part | None, hidden: int, kind: PayloadType) -> int:
    """Return the bytes of a part on its way; 0 for none."""
    if part is None:
        return 0
    ints = 2 * len(part.experts) + 2 * len(part.places)
    return HEAD_BYTES + ints * INT_BYTES + len(part.tokens) * hidden * ITEM_BYTES[kind]


def pack_part(
    part: Part, x: FloatArray, kind: PayloadType, out: NDArray[np.uint8], *, is_prompt: bool
) -> None:
    """Write a part's bytes. x: float32 [T, hidden]; out: uint8 [part_bytes]."""
    num_tokens, num_experts, num_pairs = len(part.tokens), len(part.experts), len(part.places)
    head = _HEAD.pack(num_tokens, num_experts, num_pairs, x.shape[1], kind, is_prompt, 0, 0)
    out[:HEAD_BYTES] = np.frombuffer(head, np.uint8)
    ints = out[HEAD_BYTES : HEAD_BYTES + INT_BYTES * 2 * (num_experts + num_pairs)].view(_INT)
    ints[:num_experts] = part.experts
    ints[num_experts : 2 * num_experts] = part.counts
    ints[2 * num_experts : 2 * num_experts + num_pairs] = part.places
    ints[2 * num_experts + num_pairs :].view(_FLOAT)[:] = part.weights
    rows = out[HEAD_BYTES + ints.nbytes :].view(kind.storage).reshape(num_tokens, x.shape[1])
    if kind is PayloadType.F32:
        np.take(x, part.tokens, axis=0, out=rows)
    else:
        rows[:] = pack_floats(x[part.tokens], kind)


def unpack_part(packed: NDArray[np.uint8], hidden: int, num_experts: int) -> Rows:
    """Read a part. Raises MeshError for bytes that are not one: the ranks run different programs."""
    _require(len(packed) >= HEAD_BYTES, "is too short")
    num_tokens, num_chosen, num_pairs, width, number, is_prompt, *_ = _HEAD.unpack(
        packed[:HEAD_BYTES].tobytes()
    )
    _require(width == hidden and number in tuple(PayloadType), "is of another model")
    kind = PayloadType(number)
    num_ints = 2 * (num_chosen + num_pairs)
    nbytes = HEAD_BYTES + INT_BYTES * num_ints + num_tokens * hidden * ITEM_BYTES[kind]
    _require(nbytes == len(packed), "has another length")
    ints = packed[HEAD_BYTES : HEAD_BYTES + INT_BYTES * num_ints].view(_INT)
    experts, counts = ints[:num_chosen], ints[num_chosen : 2 * num_chosen]
    places = ints[2 * num_chosen : 2 * num_chosen + num_pairs]
    weights = ints[2 * num_chosen + num_pairs :].view(_FLOAT)
    _require(bool(((experts >= 0) & (experts < num_experts)).all()), "names an unknown expert")
    _require(int(counts.sum()) == num_pairs, "does not add up")
    _require(bool(((places >= 0) & (places < num_tokens)).all()), "names an unknown token")
    rows = packed[HEAD_BYTES + ints.nbytes :].view(kind.storage).reshape(num_tokens, hidden)
    return Rows(unpack_floats(rows, kind), experts, counts, places, weights, bool(is_prompt))


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise MeshError(
            f"what a rank sent {what}: start all ranks with the same version and model file"
        )
