"""Steps as bytes: what rank 0 tells the others."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from thermocline.errors import ConfigError, MeshError
from thermocline.messages import (
    CachePlaces,
    Chunk,
    ChunkId,
    RequestId,
    Segment,
    SegmentKind,
    StateUse,
)
from thermocline.parallel.mesh import make_mesh
from thermocline.parallel.step_header import (
    HeaderKind,
    StepHeader,
    decode_header,
    encode_header,
    step_of,
)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def full_chunk() -> Chunk:
    """Return a chunk in which everything that can be given is given."""
    state = StateUse(3, 5, ((2, 7), (4, 9)))
    first = Segment(RequestId(8), 0, 3, SegmentKind.DECODE, ints(4, 2), 2, state, 1, 2, 1)
    second = Segment(RequestId(9), 3, 1, SegmentKind.DECODE, ints(), 1)
    window = CachePlaces(ints(5, 6, 7, 8), (first, second))
    return Chunk(
        *(ChunkId(41), (first, second), ints(1, 2, 3, 4), ints(0, 1, 2, 9)),
        *(ints(64, 65, 66, 12), ints(1, 2, 3), True, window, ints(2)),
    )


def plain(value: object) -> object:
    """Return a message as values that compare."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if dataclasses.is_dataclass(value):
        return tuple(plain(getattr(value, each.name)) for each in dataclasses.fields(value))
    return value


def test_a_rank_reads_its_own_replicas_chunks() -> None:
    """Every field comes back; other replicas' chunks are not read."""
    chunk = full_chunk()
    small = Chunk(ChunkId(1), chunk.segments[1:], ints(4), ints(9), ints(12), ints(0))
    header = step_of([(chunk, None), (small, chunk)])
    assert header.most_tokens == (4, 4)
    data = encode_header(header)
    here = decode_header(data, 0)
    assert plain(here.rounds) == plain(((chunk, None), (small, None)))
    there = decode_header(data, 1)
    assert there.most_tokens == here.most_tokens == header.most_tokens
    assert plain(there.rounds) == plain(((None, None), (None, chunk)))
    assert here.divided == there.divided == ((False, False), (False, False))
    assert here.has_whole == (True, True)
    for kind in (HeaderKind.ALIVE, HeaderKind.END):
        assert decode_header(encode_header(StepHeader(kind)), 1) == StepHeader(kind)


def test_all_ranks_know_whose_chunks_are_divided():
    """By round and replica; ranks of the first replica have results for rank 0 where its chunk wants some."""
    chunk = full_chunk()
    quiet = dataclasses.replace(chunk, logits_rows=ints(), states_rows=None)
    divided = [(True, False), (False, False), (True, False)]
    header = step_of([(chunk, None), (None, chunk), (chunk, chunk)], divided)
    for replica in range(2):
        read = decode_header(encode_header(header), replica)
        assert read.divided == tuple(divided)
        assert read.has_whole == (False, True, True)
        assert read.has_results
    assert step_of([(chunk, None)], [(True, False)]).has_results
    assert not step_of([(chunk, None)]).has_results
    assert not step_of([(quiet, None)], [(True, False)]).has_results


def test_bytes_that_are_no_step_are_refused() -> None:
    """Cut or changed bytes raise MeshError."""
    data = encode_header(step_of([(full_chunk(),)]))
    for broken in (b"", data[:10], data[:60], b"\xff" * 40):
        with pytest.raises(MeshError):
            decode_header(broken, 0)


@pytest.mark.parametrize(
    ("size", "dp", "tp", "replicas"),
    [
        (1, None, None, ((0,),)),
        (2, None, None, ((0,), (1,))),
        (4, 2, None, ((0, 1), (2, 3))),
        (4, None, 2, ((0, 1), (2, 3))),
        (4, None, 4, ((0, 1, 2, 3),)),
    ],
)
def test_ranks_of_a_replica_are_neighbours(size, dp, tp, replicas) -> None:
    """dp times tp ranks; what is not given follows from the other."""
    assert make_mesh(size, dp, tp).replicas == replicas


def test_a_mesh_that_does_not_fit_is_refused_and_loses_ranks() -> None:
    """ConfigError says both numbers; without a rank, places move up and replicas keep their numbers."""
    with pytest.raises(ConfigError, match="6 ranks, but torchrun started 4"):
        make_mesh(4, 3, 2)
    mesh = make_mesh(4, 2, 2).without({1, 2, 3})
    assert (mesh.replicas, mesh.live_replicas, mesh.size) == (((0,), ()), (0,), 1)
    mesh = make_mesh(4, 2, 2).without({2})
    assert (mesh.place(3), mesh.replica_of(3), mesh.peers(3), mesh.peers(1)) == (2, 1, (2,), (0, 1))
