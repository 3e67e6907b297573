"""Results of divided and of whole chunks come together again, whichever ranks had them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.chunks import make_chunk
from thermocline.messages import Chunk, StepResult
from thermocline.parallel.mesh import make_mesh
from thermocline.parallel.parts import part_of
from thermocline.parallel.step_header import step_of
from thermocline.pipeline.execution.rank_results import (
    all_results,
    expected_bytes,
    packed_results,
)

SIZES = VOCAB, HIDDEN = 5, 3


def wishing(chunk_id: int, tokens: int, logits: list[int], states: list[int] | None) -> Chunk:
    """Return a chunk that wants the logits of some rows and the states of others."""
    rows = None if states is None else np.array(states, np.int32)
    chunk = make_chunk(chunk_id, num_tokens=tokens)
    return replace(chunk, logits_rows=np.array(logits, np.int32), states_rows=rows)


def computed(chunk: Chunk, first: int) -> StepResult:
    """Return results that name their chunk and their row of the whole one. first: the whole's row of row 0."""
    logits = np.empty((len(chunk.logits_rows), VOCAB), np.float32)
    logits[:] = (1000 * chunk.id + first + chunk.logits_rows)[:, None]
    if chunk.states_rows is None:
        return StepResult(chunk, logits)
    states = np.empty((len(chunk.states_rows), HIDDEN), np.float32)
    states[:] = -(1000 * chunk.id + first + chunk.states_rows)[:, None]
    return StepResult(chunk, logits, states)


@pytest.mark.parametrize(("dp", "tp", "lost"), [(1, 2, ()), (2, 2, ()), (2, 3, (4,)), (2, 2, (1,))])
def test_rank_0_gets_every_row_once_and_in_order(dp, tp, lost):
    """Two rounds, one of them divided; others' bytes are as many as rank 0 expects."""
    mesh = make_mesh(dp * tp, dp, tp).without(lost)
    divided, whole = [], []
    for replica in range(dp):
        divided.append(wishing(1 + replica, 40, [3, 19, 20, 39], [0, 38, 39]))
        whole.append(wishing(11 + replica, 6, [5], None))
    whole[0] = None
    are_divided = tuple(len(ranks) > 1 for ranks in mesh.replicas)
    rounds = [tuple(divided), tuple(whole)]
    header = step_of(rounds, [are_divided, (False,) * dp])
    mine, given = None, [b""] * mesh.size
    for replica, ranks in enumerate(mesh.replicas):
        for index, rank in enumerate(ranks):
            results = []
            for chunk, parts in ((divided[replica], are_divided[replica]), (whole[replica], False)):
                own = part_of(chunk, len(ranks), index) if parts else chunk
                first = own.rows.start if parts else 0
                results.append(None if own is None else computed(own, first))
            if rank == 0:
                mine = results
            else:
                given[mesh.place(rank)] = packed_results(results, is_leader=index == 0)
    assert [len(each) for each in given] == expected_bytes(header, mesh, SIZES)
    theirs = [np.frombuffer(each, np.uint8) for each in given]
    found = list(all_results(header, mesh, mine, theirs, SIZES))
    chunks = [(replica, chunk) for each in rounds for replica, chunk in enumerate(each) if chunk]
    assert [(replica, result.chunk.id) for replica, result in found] == [
        (replica, chunk.id) for replica, chunk in chunks
    ]
    for (_, result), (_, chunk) in zip(found, chunks, strict=True):
        expected = computed(chunk, 0)
        assert result.chunk.num_tokens == chunk.num_tokens
        assert result.logits.tobytes() == expected.logits.tobytes()
        assert (result.states is None) == (expected.states is None)
        if expected.states is not None:
            assert result.states.tobytes() == expected.states.tobytes()
