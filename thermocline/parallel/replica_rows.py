"""What ranks of one replica give each other where they divide a chunk's rows: keys and values, or hidden rows.

One exchange in a layer, before what its rows see is read. Every rank has the whole cache afterwards, so a replica
goes on after the loss of a rank. Ranks without a part of the round take part with nothing.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.cache_format import put_cached, take_cached

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from thermocline.kernels.dense_contract import LayerCache
    from thermocline.messages import Chunk, FloatArray, LayerIndex
    from thermocline.parallel.exchange_jobs import ExchangeFigures, ExchangeJobs
    from thermocline.parallel.group import Group
    from thermocline.parallel.parts import ChunkPart
    from thermocline.parallel.workspace import Arena

    Bytes = NDArray[np.uint8]


class ReplicaRows:
    """One round's exchanges within a replica: at most one layer is under way in it."""

    def __init__(
        self,
        jobs: ExchangeJobs,
        figures: ExchangeFigures,
        group: Group,
        peers: tuple[int, ...],
        arena: Arena,
    ) -> None:
        """peers: the places of the replica's ranks. arena: has buffers "mix" and "mixed", for this round alone."""
        self._jobs, self._figures = jobs, figures
        self._group, self._peers, self._arena = group, peers, arena

    async def share_cache(
        self,
        turn: int,
        part: ChunkPart,
        layer: LayerIndex,
        cache: LayerCache,
        *,
        window: bool,
        is_only: bool,
    ) -> None:
        """Give the keys and values of this rank's rows to the others, and put theirs into the cache. Raises MeshError.

        window: whether the layer has a sliding window.
        """
        slots = partial(part.slots_of, window=window)
        shape = cache.shape
        mine = take_cached(shape, cache.keys, cache.values, slots(part.index), cache.index)

        def store(index: int, rows: Bytes) -> None:
            # On the thread of the exchange: a later chunk of the request finds them, whoever goes on first.
            put_cached(shape, cache.keys, cache.values, slots(index), rows, cache.index)

        await self._gather(turn, part, layer, mine, store, is_only=is_only)

    async def gather(
        self, turn: int, part: ChunkPart, layer: LayerIndex, x: FloatArray, *, is_only: bool
    ) -> FloatArray:
        """Return the residual stream of the whole chunk, float32 [T, D]. x: that of this rank's rows. Raises MeshError."""
        whole = np.empty((part.whole.num_tokens, x.shape[1]), np.float32)
        whole[part.rows] = x

        def store(index: int, rows: Bytes) -> None:
            start, end = part.bounds[index : index + 2]
            whole[start:end] = rows.view(np.float32)

        mine = np.ascontiguousarray(x).view(np.uint8)
        await self._gather(turn, part, layer, mine, store, is_only=is_only)
        return whole

    def give_nothing(self, turn: int, chunk: Chunk, layer: LayerIndex) -> None:
        """Take part in an exchange of others when its turn comes. Who waits for a later one hears of a failure."""
        nobody, size = [0] * self._group.size, np.empty(0, np.uint8)
        job = partial(self._group.exchange, size, nobody, size, nobody)
        self._jobs.thread.submit(turn, self._jobs.shown(job, chunk, layer, 0))

    async def _gather(
        self,
        turn: int,
        part: ChunkPart,
        layer: LayerIndex,
        mine: Bytes,
        store: Callable[[int, Bytes], None],
        *,
        is_only: bool,
    ) -> None:
        """Exchange rows within the replica. mine: uint8 [rows, bytes of one]; store: called with each other rank's index."""
        group, row_bytes = self._group, mine.shape[1]
        others = [(n, place) for n, place in enumerate(self._peers) if n != part.index]
        sent, back = [0] * group.size, [0] * group.size
        for index, place in others:
            sent[place] = mine.nbytes
            back[place] = (part.bounds[index + 1] - part.bounds[index]) * row_bytes
        send = self._arena.take("mix", sum(sent), "rows for a rank's own replica")
        send.reshape(len(others), *mine.shape)[:] = mine
        received = self._arena.take("mixed", sum(back), "rows of a rank's own replica")

        def job() -> None:
            group.exchange(send, sent, received, back)
            start = 0
            for index, place in others:  # ascending places
                rows = received[start : start + back[place]].reshape(-1, row_bytes)
                store(index, rows)
                start += back[place]

        self._figures.total_mixed_bytes += len(send)
        shown = self._jobs.shown(job, part, layer, len(send))
        await self._jobs.run(turn, shown, is_only=is_only)
