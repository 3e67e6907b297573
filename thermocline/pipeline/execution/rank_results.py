"""The results of a step's chunks on their way to rank 0: which rank has which rows, and their bytes. Pure.

The first rank of a replica has those of its chunk, or where ranks divide it, each has those of its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from thermocline.messages import StepResult
from thermocline.parallel.parts import ChunkPart, part_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from thermocline.messages import Chunk
    from thermocline.parallel.mesh import Mesh
    from thermocline.parallel.step_header import StepHeader

_FLOAT: Final = np.dtype("<f4")


class _Piece(NamedTuple):
    """A rank's part of a chunk's results. chunk: the rows that it has."""

    rank: int
    chunk: Chunk


def packed_results(results: Sequence[StepResult | None], *, is_leader: bool) -> bytes:
    """Return the bytes of what a rank gives rank 0 of its results by round. is_leader: it is its replica's first."""
    parts: list[NDArray[np.float32]] = []
    for result in results:
        if result is not None and (is_leader or isinstance(result.chunk, ChunkPart)):
            parts.append(result.logits)
            if result.states is not None:
                parts.append(result.states)
    return b"".join(part.astype(_FLOAT, copy=False).tobytes() for part in parts)


def expected_bytes(header: StepHeader, mesh: Mesh, sizes: tuple[int, int]) -> list[int]:
    """Return how many bytes of results rank 0 gets from each place. sizes: the width of logits, and of hidden states."""
    found = [0] * mesh.size
    for _, _, _, pieces in _pieces(header, mesh):
        for rank, chunk in pieces:
            if rank != 0:
                found[mesh.place(rank)] += result_bytes(chunk, *sizes)
    return found


def all_results(
    header: StepHeader,
    mesh: Mesh,
    mine: Sequence[StepResult | None],
    theirs: Sequence[NDArray[np.uint8]],
    sizes: tuple[int, int],
) -> Iterator[tuple[int, StepResult]]:
    """Yield each chunk's replica and result, a replica's in the order of rounds.

    mine: rank 0's, by round. theirs: uint8 by place, of `expected_bytes`.
    """
    starts = [0] * mesh.size
    for number, replica, whole, pieces in _pieces(header, mesh):
        found = []
        for rank, chunk in pieces:
            result = mine[number] if rank == 0 else None
            if result is None:
                place = mesh.place(rank)
                end = starts[place] + result_bytes(chunk, *sizes)
                result = unpacked_result(chunk, theirs[place][starts[place] : end], *sizes)
                starts[place] = end
            found.append(result)
        yield replica, _joined(whole, found)


def result_bytes(chunk: Chunk, vocab_size: int, hidden: int) -> int:
    """Return the bytes of one chunk's results."""
    num_states = 0 if chunk.states_rows is None else len(chunk.states_rows)
    return _FLOAT.itemsize * (len(chunk.logits_rows) * vocab_size + num_states * hidden)


def unpacked_result(
    chunk: Chunk, data: NDArray[np.uint8], vocab_size: int, hidden: int
) -> StepResult:
    """Read one chunk's results; data: uint8 [result_bytes]."""
    values = data.copy().view(_FLOAT)
    end = len(chunk.logits_rows) * vocab_size
    logits = values[:end].reshape(len(chunk.logits_rows), vocab_size)
    states = None if chunk.states_rows is None else values[end:].reshape(-1, hidden)
    return StepResult(chunk, logits, states)


def _pieces(header: StepHeader, mesh: Mesh) -> Iterator[tuple[int, int, Chunk, list[_Piece]]]:
    """Yield (round, replica, chunk, who has which of its rows), by round, then by replica."""
    for number, chunks in enumerate(header.rounds):
        for replica, chunk in enumerate(chunks):
            if chunk is None:
                continue
            ranks = mesh.replicas[replica]
            pieces = [_Piece(ranks[0], chunk)]
            if header.divided[number][replica]:
                parts = (part_of(chunk, len(ranks), index) for index in range(len(ranks)))
                pieces = [_Piece(*each) for each in zip(ranks, parts, strict=True)]
            yield number, replica, chunk, pieces


def _joined(chunk: Chunk, results: Sequence[StepResult]) -> StepResult:
    """Return the results of all rows: those of each rank's, which are in the chunk's order."""
    if len(results) == 1:
        return results[0]
    logits = np.concatenate([each.logits for each in results])
    states = [each.states for each in results if each.states is not None]
    return StepResult(chunk, logits, np.concatenate(states) if states else None)
