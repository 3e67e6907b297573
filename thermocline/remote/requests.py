"""Requests and answers: their arrays, written and read with every bound checked. Pure.

The arrays lie behind a fixed part of 64 bytes: in the frame, or in a slot of shared memory. Ids of experts
are the worker's own: places in the list that it was given. Knows no transport and no handshake.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from thermocline.remote.payload import (
    ALIGNMENT,
    ITEM_BYTES,
    PayloadType,
    pack_floats,
    unpack_floats,
)
from thermocline.remote.wire import MAX_TEXT_BYTES, Kind, broken, require
from thermocline.units import align_up

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from thermocline.messages import FloatArray, IntArray

HEAD_BYTES: Final = 64
INLINE: Final = 0xFFFFFFFF
"""In place of a slot's number: the arrays are in the frame."""

MAX_PAIRS_LIMIT: Final = 1 << 16
_COMPUTE: Final = struct.Struct("<IIIII?43x")
_OUTPUTS: Final = struct.Struct("<IIQQ40x")

_INT: Final = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class WireShape:
    """What both sides agreed on. hidden: numbers of a row; max_pairs: token-expert pairs of one request."""

    hidden: int
    max_pairs: int
    payload: PayloadType

    def request_layout(self, num_rows: int, num_experts: int, num_pairs: int) -> tuple[int, int]:
        """Return where x begins, behind the tables, and the bytes of both."""
        start = align_up(8 * (num_experts + num_pairs), ALIGNMENT)
        return start, start + num_rows * self.hidden * ITEM_BYTES[self.payload]

    def outputs_bytes(self, num_pairs: int) -> int:
        """Return the bytes of an answer's values."""
        return num_pairs * self.hidden * ITEM_BYTES[self.payload]

    @property
    def max_payload_bytes(self) -> int:
        """Bytes of the longest request or answer, without the fixed part."""
        most = self.max_pairs
        return max(self.request_layout(most, most, most)[1], self.outputs_bytes(most))

    def worker_kinds(self, *, is_shared: bool) -> Mapping[Kind, int]:
        """Return what a worker may be sent from now on."""
        length = HEAD_BYTES + (0 if is_shared else self.max_payload_bytes)
        return {Kind.COMPUTE: length, Kind.CANCEL: 0, Kind.PING: 0}

    def client_kinds(self, *, is_shared: bool) -> Mapping[Kind, int]:
        """Return what a client may be sent from now on."""
        length = HEAD_BYTES + (0 if is_shared else self.max_payload_bytes)
        refusals = {Kind.FAILED: MAX_TEXT_BYTES, Kind.REFUSED: MAX_TEXT_BYTES}
        return {Kind.OUTPUTS: length, Kind.PONG: 0, **refusals}


class ExpertRequest(NamedTuple):
    """Token-expert pairs of one layer whose experts a worker holds, sorted by expert.

    x: float32 [tokens, hidden]; tokens: int [n], which of its rows go; experts: int32, the worker's ids;
    counts, rows (places in `tokens`), weights: as in `ExpertWork`. A tuple, since one is made per layer and step,
    and a frozen dataclass takes five times as long.
    """

    layer: int
    is_prompt: bool
    x: FloatArray
    tokens: NDArray[np.integer[Any]]
    experts: IntArray
    counts: IntArray
    rows: IntArray
    weights: FloatArray


class RequestHead(NamedTuple):
    """The fixed part of a request: what its arrays hold, and where they are (`slot`, or INLINE)."""

    layer: int
    slot: int
    num_rows: int
    num_experts: int
    num_pairs: int
    is_prompt: bool


_NO_INTS: Final = np.empty(0, _INT)
_NO_FLOATS: Final = np.empty(0, np.float32)
_NOTHING: Final = (_NO_FLOATS, _NO_INTS, _NO_INTS, _NO_INTS, _NO_INTS, _NO_FLOATS)


@cache
def no_values(hidden: int) -> FloatArray:
    """Return the outputs of no pair, float32 [0, hidden]."""
    return np.empty((0, hidden), np.float32)


def request_head(request: ExpertRequest, slot: int) -> bytes:
    """Return the fixed part of a request."""
    return _COMPUTE.pack(
        request.layer,
        slot,
        len(request.tokens),
        len(request.experts),
        len(request.rows),
        request.is_prompt,
    )


def decode_request_head(body: memoryview, shape: WireShape, num_layers: int) -> RequestHead:
    """Read the fixed part of a COMPUTE. Raises WireError."""
    if len(body) < HEAD_BYTES:
        raise broken("a request is too short")
    head = RequestHead._make(_COMPUTE.unpack_from(body))
    layer, _, num_rows, num_experts, num_pairs, _ = head
    if layer >= num_layers:
        raise broken("a request is for a layer beyond the last")
    most = shape.max_pairs
    if num_rows > most or num_experts > most or num_pairs > most:
        raise broken("a request is larger than agreed on")
    return head


def write_request(memory: memoryview, request: ExpertRequest, shape: WireShape) -> None:
    """Write a request's arrays; `memory` has exactly the bytes of their layout."""
    num_rows, num_experts, num_pairs = (
        len(request.tokens),
        len(request.experts),
        len(request.rows),
    )
    if not num_rows:
        return
    start, _ = shape.request_layout(num_rows, num_experts, num_pairs)
    tables = request.experts, request.counts, request.rows, request.weights.view(np.int32)
    np.concatenate(tables, out=np.frombuffer(memory, _INT, 2 * (num_experts + num_pairs)))
    place = np.frombuffer(memory, shape.payload.storage, offset=start)
    place = place.reshape(num_rows, shape.hidden)
    if shape.payload is PayloadType.F32:
        np.take(request.x, request.tokens, axis=0, out=place, mode="clip")
    else:
        pack_floats(request.x[request.tokens], shape.payload, place)


def read_request(
    memory: memoryview, head: RequestHead, shape: WireShape, num_held: int
) -> ExpertRequest:
    """Read a request's arrays, and check each number that leads to memory. Raises WireError.

    memory may be shared with the peer: what is checked is copied first, and only x is a view.
    """
    _, _, num_rows, num_experts, num_pairs, _ = head
    if not (num_rows or num_experts or num_pairs or len(memory)):
        return ExpertRequest(head.layer, head.is_prompt, *_NOTHING)
    start, num_bytes = shape.request_layout(num_rows, num_experts, num_pairs)
    require(len(memory) == num_bytes, "a request's arrays have another length")
    tables = np.frombuffer(memory, _INT, 2 * (num_experts + num_pairs)).astype(np.int32)
    experts, counts = tables[:num_experts], tables[num_experts : 2 * num_experts]
    pairs = tables[2 * num_experts :]
    rows, weights = pairs[:num_pairs], pairs[num_pairs:]
    require(_is_within(experts, num_held), "a request names experts that are not held")
    require(_is_within(rows, head.num_rows), "a request names tokens that it does not have")
    _require_sum(counts, num_pairs)
    packed = np.frombuffer(memory[start:], shape.payload.storage)
    x = unpack_floats(packed, shape.payload).reshape(head.num_rows, shape.hidden)
    tokens = np.arange(head.num_rows)
    return ExpertRequest(
        head.layer, head.is_prompt, x, tokens, experts, counts, rows, weights.view(np.float32)
    )


def outputs_head(num_pairs: int, slot: int, begin_ns: int, end_ns: int) -> bytes:
    """Return the fixed part of an answer."""
    return _OUTPUTS.pack(num_pairs, slot, begin_ns, end_ns)


def write_values(memory: memoryview, values: FloatArray, shape: WireShape) -> None:
    """Write an answer's values; `memory` has exactly their bytes."""
    if not values.size:
        return
    place = np.frombuffer(memory, shape.payload.storage, values.size).reshape(values.shape)
    pack_floats(values, shape.payload, place)


def decode_outputs_head(body: memoryview, num_pairs: int, slot: int) -> tuple[int, int]:
    """Return when the worker began and ended, in its nanoseconds. Raises WireError.

    num_pairs, slot: those of the request that is answered.
    """
    if len(body) < HEAD_BYTES:
        raise broken("an answer is too short")
    pairs, where, begin_ns, end_ns = _OUTPUTS.unpack_from(body)
    if pairs != num_pairs or where != slot:
        raise broken("an answer does not fit its request")
    if begin_ns > end_ns:
        raise broken("an answer ended before it began")
    return begin_ns, end_ns


def read_values(memory: memoryview, num_pairs: int, shape: WireShape) -> FloatArray:
    """Return an answer's values as float32 [pairs, hidden], a view where they travel so. Raises WireError."""
    if not (num_pairs or len(memory)):
        return no_values(shape.hidden)
    require(len(memory) == shape.outputs_bytes(num_pairs), "an answer's values have another length")
    packed: NDArray[Any] = np.frombuffer(memory, shape.payload.storage)
    return unpack_floats(packed, shape.payload).reshape(num_pairs, shape.hidden)


def _is_within(numbers: IntArray, limit: int) -> bool:
    # A negative number is a large one without its sign.
    return not len(numbers) or int(numbers.view(np.uint32).max()) < limit


def _require_sum(counts: IntArray, num_pairs: int) -> None:
    if len(counts):
        require(int(counts.min()) > 0, "a request has an expert without tokens")
    total = int(counts.sum(dtype=np.int64)) if len(counts) else 0
    require(total == num_pairs, "a request does not add up")
