"""Ranks that divide a chunk give each other their rows, in so many bytes as the formula says."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from tests.support.chunks import make_chunk
from tests.support.thread_ranks import ThreadWorld
from thermocline.kernels.cache_format import CacheShape, CacheType, write_cache
from thermocline.kernels.dense_contract import LayerCache
from thermocline.messages import LayerIndex
from thermocline.parallel.exchange_jobs import ExchangeFigures, ExchangeJobs
from thermocline.parallel.mesh import make_mesh
from thermocline.parallel.parts import bounds_of, part_of
from thermocline.parallel.rank import _arena
from thermocline.parallel.replica_rows import ReplicaRows
from thermocline.parallel.turns import TurnThread
from thermocline.parallel.workspace import Dividing, Traffic, WorkspaceLockedError, arena_sizes
from thermocline.traces.recorder import NullRecorder

LAYER, HIDDEN = LayerIndex(2), 6


class Ranks:
    """Ranks of all replicas, each on a thread."""

    def __init__(self, dp: int, tp: int, row_bytes: int, chunk_tokens: int) -> None:
        self.mesh, self.world = make_mesh(dp * tp, dp, tp), ThreadWorld(10.0)
        divided = Dividing(dp * tp, tp, chunk_tokens, row_bytes)
        self.traffic = Traffic(dp, chunk_tokens, 1, 1, HIDDEN, 4, dp * tp, divided=divided)
        self.threads = [TurnThread() for _ in self.mesh.ranks]
        self.figures = [ExchangeFigures() for _ in self.mesh.ranks]
        self.arenas = [_arena(self.traffic, 1) for _ in self.mesh.ranks]
        self.rows = []
        for rank, thread in enumerate(self.threads):
            jobs = ExchangeJobs(thread, NullRecorder(), self.figures[rank])
            group = self.world.connector(rank)(0, rank, self.mesh.size)
            peers = self.mesh.peers(rank)
            mine = ReplicaRows(jobs, self.figures[rank], group, peers, self.arenas[rank])
            self.rows.append(mine)

    def run(self, job) -> list:
        """Return what each rank's coroutine returns."""
        with ThreadPoolExecutor(self.mesh.size) as pool:
            return list(pool.map(lambda rank: asyncio.run(job(rank)), self.mesh.ranks))

    def close(self) -> None:
        """End the threads."""
        for thread in self.threads:
            thread.close()


@pytest.mark.parametrize("cache_type", [CacheType.F16, CacheType.Q8_0])
@pytest.mark.parametrize(("dp", "tp", "tokens"), [(1, 2, 7), (1, 4, 64), (2, 2, 33), (1, 3, 512)])
def test_all_ranks_have_the_whole_cache_afterwards(cache_type, dp, tp, tokens):
    """Replica 0 divides its chunk, another one has none and takes part with nothing. Bytes are the formula's."""
    shape = CacheShape(cache_type, 40, 16, 2, 32)
    rng = np.random.default_rng(3)
    slots = rng.permutation(640)[:tokens].astype(np.int32)
    whole = replace(make_chunk(num_tokens=tokens), kv_slots=slots)
    k, v = (rng.standard_normal((tokens, 2, 32)).astype(np.float32) for _ in range(2))
    caches = [
        LayerCache(shape, *(np.zeros(shape.array_shape, np.uint8) for _ in range(2)))
        for _ in range(dp * tp)
    ]
    bounds = bounds_of(tokens, tp)
    ranks = Ranks(dp, tp, shape.token_bytes, tokens)

    async def share(rank: int) -> None:
        if rank >= tp:
            ranks.rows[rank].give_nothing(0, whole, LAYER)
            return
        part, cache = part_of(whole, tp, rank), caches[rank]
        mine = part.rows
        write_cache(shape, cache.keys, cache.values, slots[mine], k[mine], v[mine])
        await ranks.rows[rank].share_cache(0, part, LAYER, cache, window=False, is_only=True)

    ranks.run(share)
    ranks.close()
    expected = LayerCache(shape, *(np.zeros(shape.array_shape, np.uint8) for _ in range(2)))
    write_cache(shape, expected.keys, expected.values, slots, k, v)
    sizes = arena_sizes(ranks.traffic, 1)
    for rank in range(tp):
        assert caches[rank].keys.tobytes() == expected.keys.tobytes()
        assert caches[rank].values.tobytes() == expected.values.tobytes()
        num_rows = bounds[rank + 1] - bounds[rank]
        figures, peaks = ranks.figures[rank], ranks.arenas[rank].peak_bytes
        assert figures.total_mixed_bytes == num_rows * (tp - 1) * shape.token_bytes
        assert figures.total_sent_bytes == figures.total_mixed_bytes
        assert peaks["mixed"] == (tokens - num_rows) * shape.token_bytes
    peaks = [arena.peak_bytes for arena in ranks.arenas[:tp]]
    assert max(peak["mix"] for peak in peaks) == sizes["mix"], "the largest part, to the byte"
    assert max(peak["mixed"] for peak in peaks) == sizes["mixed"]
    assert all(not figures.total_sent_bytes for figures in ranks.figures[tp:])


def test_hidden_rows_of_all_come_together():
    """In the chunk's order; a chunk of more tokens than the workspace was made for is refused."""
    tokens, tp = 11, 3
    whole = make_chunk(num_tokens=tokens)
    x = np.random.default_rng(1).standard_normal((tokens, HIDDEN)).astype(np.float32)
    ranks = Ranks(1, tp, 4 * HIDDEN, tokens)

    async def gather(rank: int) -> np.ndarray:
        part = part_of(whole, tp, rank)
        return await ranks.rows[rank].gather(0, part, LAYER, x[part.rows], is_only=False)

    for found in ranks.run(gather):
        assert found.tobytes() == x.tobytes()
    larger = part_of(make_chunk(num_tokens=20), tp, 0)
    with pytest.raises(WorkspaceLockedError, match="rows for a rank's own replica"):
        asyncio.run(
            ranks.rows[0].gather(1, larger, LAYER, np.zeros((6, HIDDEN), np.float32), is_only=False)
        )
    ranks.close()
