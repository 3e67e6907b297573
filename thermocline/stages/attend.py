"""Attention of one layer, with the append to the key-value cache."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from thermocline.messages import Hidden
from thermocline.parallel.parts import ChunkPart, Mixing
from thermocline.traces.lanes import Name

if TYPE_CHECKING:
    from thermocline.kernels.dense_contract import LayerCache
    from thermocline.kv.cache import SequenceCache
    from thermocline.messages import FloatArray, LayerIndex
    from thermocline.models.contract import Model
    from thermocline.workers.lane import JobLane


class AttendStage:
    """Hidden before a layer -> Hidden inside it, after attention."""

    def __init__(self, model: Model, cache: SequenceCache, lane: JobLane) -> None:
        self._model = model
        self._cache = cache
        self._lane = lane

    async def __call__(self, hidden: Hidden) -> Hidden:
        """Attend; the chunk's keys and values are in the cache afterwards."""
        chunk, layer = hidden.chunk, hidden.layer
        job = partial(self._model.attend, layer, chunk, hidden.x, self._cache)
        return Hidden(chunk, layer, await self._lane.run(Name.ATTEND, job, chunk, layer))


class ReplicaRanks(Protocol):
    """What gives a rank the other ranks' rows of a chunk that they divide."""

    def mixing(self, layer: LayerIndex) -> Mixing:
        """Return what they give each other in a layer."""
        ...

    async def share_cache(self, part: ChunkPart, layer: LayerIndex, cache: LayerCache) -> None:
        """Have the keys and values of all rows in the layer's cache, of which this rank's are. Raises MeshError."""
        ...

    async def gather(self, part: ChunkPart, layer: LayerIndex, x: FloatArray) -> FloatArray:
        """Return all rows before a layer, float32 [T of the whole chunk, D]. Raises MeshError."""
        ...


class DividedAttendStage:
    """The same on a rank of several, which has all rows of a chunk or some: x is [rows, D] then, before and after.

    What some rows see of the others' comes between writing keys and values and reading them. Where a state moves on with
    every token, each rank computes all rows.
    """

    def __init__(
        self, model: Model, cache: SequenceCache, lane: JobLane, ranks: ReplicaRanks
    ) -> None:
        self._whole = AttendStage(model, cache, lane)
        self._model, self._cache, self._lane, self._ranks = model, cache, lane, ranks

    async def __call__(self, hidden: Hidden) -> Hidden:
        """Attend; the keys and values of all the chunk's rows are in the cache afterwards. Raises MeshError."""
        chunk, layer, x = hidden.chunk, hidden.layer, hidden.x
        if not isinstance(chunk, ChunkPart):
            return await self._whole(hidden)
        mixing = self._ranks.mixing(layer)
        if mixing is Mixing.HIDDEN:
            x = await self._ranks.gather(chunk, layer, x)
            job = partial(self._model.attend, layer, chunk.whole, x, self._cache)
            out = await self._lane.run(Name.ATTEND, job, chunk, layer)
            return Hidden(chunk, layer, out[chunk.rows])
        begin = partial(self._model.begin_attend, layer, chunk, x, self._cache)
        if mixing is Mixing.NOTHING:
            out = await self._lane.run(Name.ATTEND, lambda: begin()(), chunk, layer)
            return Hidden(chunk, layer, out)
        finish = await self._lane.run(Name.ATTEND, begin, chunk, layer)
        await self._ranks.share_cache(chunk, layer, self._cache.kv.layer(layer))
        return Hidden(chunk, layer, await self._lane.run(Name.ATTEND, finish, chunk, layer))
