"""What rank 0 tells the others before each step: the chunks of every replica, as bytes. Pure; never pickle.

A step has one or two rounds, whose layers take turns; in each, a replica has a chunk or none.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from thermocline.errors import MeshError
from thermocline.messages import (
    CachePlaces,
    Chunk,
    ChunkId,
    IntArray,
    RequestId,
    Segment,
    SegmentKind,
    StateUse,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_HEAD: Final = struct.Struct("<IIII")
_INT: Final = np.dtype("<i4")


class HeaderKind(IntEnum):
    """What follows."""

    STEP = 1
    ALIVE = 2
    """Nothing: rank 0 has no work, and is there."""
    END = 3
    """Nothing: the service ends."""


@dataclass(frozen=True, slots=True)
class StepHeader:
    """rounds: in each, the chunk of every replica."""

    kind: HeaderKind
    rounds: tuple[tuple[Chunk | None, ...], ...] = ()
    most_tokens: tuple[int, ...] = ()
    """Tokens of the largest chunk of each round, whoever reads it."""
    is_alone: bool = False
    """Whether each rank computes every expert of its own tokens: nothing is exchanged but the results."""
    has_results: bool = True
    """Whether others have results for rank 0: replicas behind the first, or ranks that divide a chunk of the first."""
    divided: tuple[tuple[bool, ...], ...] = ()
    """By round and replica, whether ranks divide the chunk's rows."""
    has_whole: tuple[bool, ...] = ()
    """By round, whether some chunk is not divided."""

    @property
    def has_answers(self) -> bool:
        """Whether some of its tokens are those of answers."""
        chunks = (chunk for each in self.rounds for chunk in each)
        return any(chunk is not None and not chunk.is_prompt for chunk in chunks)


def step_of(
    rounds: Sequence[tuple[Chunk | None, ...]],
    divided: Sequence[tuple[bool, ...]] | None = None,
    *,
    is_alone: bool = False,
) -> StepHeader:
    """Return the header of a step. divided: by round and replica; None for no chunk."""
    divided = [(False,) * len(each) for each in rounds] if divided is None else divided
    has_whole = tuple(
        any(chunk is not None and not part for chunk, part in zip(chunks, parts, strict=True))
        for chunks, parts in zip(rounds, divided, strict=True)
    )
    most = (max(0 if chunk is None else chunk.num_tokens for chunk in each) for each in rounds)
    has_results = any(chunk is not None for each in rounds for chunk in each[1:]) or any(
        parts[0] and chunks[0] is not None and _has_results(chunks[0])
        for chunks, parts in zip(rounds, divided, strict=True)
    )
    return StepHeader(
        HeaderKind.STEP,
        tuple(rounds),
        tuple(most),
        is_alone,
        has_results,
        tuple(divided),
        has_whole,
    )


def _has_results(chunk: Chunk) -> bool:
    return bool(len(chunk.logits_rows)) or chunk.states_rows is not None


def encode_header(header: StepHeader) -> bytes:
    """Return a header's bytes."""
    chunks = [b"" if chunk is None else _encode(chunk) for each in header.rounds for chunk in each]
    num_replicas = len(header.rounds[0]) if header.rounds else 0
    lengths = np.array([len(chunk) for chunk in chunks], _INT).tobytes()
    most = np.array(header.most_tokens, _INT).tobytes()
    ways = np.empty((len(header.rounds), num_replicas + 1), _INT)
    for number, parts in enumerate(header.divided):
        ways[number] = (*parts, header.has_whole[number])
    head = _HEAD.pack(
        header.kind, len(header.rounds), num_replicas, header.is_alone + 2 * header.has_results
    )
    return head + most + ways.tobytes() + lengths + b"".join(chunks)


def decode_header(data: bytes, replica: int) -> StepHeader:
    """Read a header, of its chunks those of `replica` alone; the others are None. Raises MeshError."""
    try:
        kind, num_rounds, num_replicas, flags = _HEAD.unpack_from(data)
        most = np.frombuffer(data, _INT, num_rounds, _HEAD.size)
        start = _HEAD.size + most.nbytes
        ways = np.frombuffer(data, _INT, num_rounds * (num_replicas + 1), start)
        start += ways.nbytes
        lengths = np.frombuffer(data, _INT, num_rounds * num_replicas, start)
        ends = np.cumsum(lengths) + start + lengths.nbytes
        rounds = []
        for number in range(num_rounds):
            chunks: list[Chunk | None] = [None] * num_replicas
            index = number * num_replicas + replica
            if lengths[index]:
                chunks[replica] = _decode(data[ends[index] - lengths[index] : ends[index]])
            rounds.append(tuple(chunks))
        most_tokens, is_alone, has_results = tuple(most.tolist()), bool(flags & 1), bool(flags & 2)
        table = [
            tuple(map(bool, each)) for each in ways.reshape(num_rounds, num_replicas + 1).tolist()
        ]
        return StepHeader(
            HeaderKind(kind),
            tuple(rounds),
            most_tokens,
            is_alone,
            has_results,
            tuple(each[:-1] for each in table),
            tuple(each[-1] for each in table),
        )
    except (ValueError, TypeError, struct.error, LookupError, OverflowError) as error:
        raise MeshError(
            f"rank 0 sent a step that can not be read ({error}): start all ranks with the same version"
        ) from error


def _encode(chunk: Chunk) -> bytes:
    arrays: list[IntArray] = []

    def put(values: IntArray | None) -> int | None:
        if values is None:
            return None
        arrays.append(values)
        return len(values)

    def put_segments(segments: Sequence[Segment]) -> list[Any]:
        return [
            [
                *(each.request, each.start, each.length, str(each.kind), put(each.block_table)),
                *(each.num_logits, each.state, each.num_states, each.num_expanded),
                each.num_drafted,
            ]
            for each in segments
        ]

    window = chunk.window_places
    about = {
        "id": chunk.id,
        "segments": put_segments(chunk.segments),
        "tokens": put(chunk.token_ids),
        "positions": put(chunk.positions),
        "slots": put(chunk.kv_slots),
        "logits": put(chunk.logits_rows),
        "states": put(chunk.states_rows),
        "routing": chunk.wants_routing,
        "window": window and [put(window.slots), put_segments(window.segments)],
    }
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _INT.itemsize)
    ints = b"".join(each.astype(_INT, copy=False).tobytes() for each in arrays)
    return struct.pack("<I", len(text)) + text + ints


def _decode(data: bytes) -> Chunk:
    (length,) = struct.unpack_from("<I", data)
    about = json.loads(data[4 : 4 + length])
    offset = 4 + length

    def get(count: int | None) -> Any:  # noqa: ANN401 - None for None
        nonlocal offset
        if count is None:
            return None
        values = np.frombuffer(data, _INT, count, offset).copy()
        offset += values.nbytes
        return values

    def get_segments(given: list[Any]) -> tuple[Segment, ...]:
        return tuple(
            Segment(
                RequestId(request),
                start,
                count,
                SegmentKind(kind),
                get(table),
                num_logits,
                state and StateUse(state[0], state[1], tuple(map(tuple, state[2]))),
                *numbers,
            )
            for request, start, count, kind, table, num_logits, state, *numbers in given
        )

    segments = get_segments(about["segments"])
    tokens, positions, slots = (get(about[name]) for name in ("tokens", "positions", "slots"))
    logits, states = get(about["logits"]), get(about["states"])
    window = about["window"]
    places = None if window is None else CachePlaces(get(window[0]), get_segments(window[1]))
    return Chunk(
        ChunkId(about["id"]),
        segments,
        tokens,
        positions,
        slots,
        logits,
        about["routing"],
        places,
        states,
    )
