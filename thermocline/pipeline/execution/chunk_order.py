"""Keeps the chunks of one request in order: each layer's attention reads what the chunk before wrote.

The one owner of order. Chunks line up on the loop's thread, and move on the lane's. Knows neither stages nor lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.workers.completion import Completion

if TYPE_CHECKING:
    from thermocline.messages import Chunk, ChunkId, LayerIndex


class ChunkOrder:
    """Which chunks are in front of which, and how far each has come. A chunk's own calls are made one at a time."""

    def __init__(self) -> None:
        self._chunks: dict[ChunkId, Chunk] = {}
        self._in_front: dict[ChunkId, tuple[ChunkId, ...]] = {}
        # Layers whose attention a chunk has behind it.
        self._attended: dict[ChunkId, int] = {}
        self._moves: dict[ChunkId, Completion[None]] = {}

    def __len__(self) -> int:
        return len(self._chunks)

    def begin(self, chunk: Chunk) -> None:
        """Let a chunk line up behind those that have tokens of its requests."""
        requests = set(chunk.requests)
        self._in_front[chunk.id] = tuple(
            other.id
            for other in tuple(self._chunks.values())
            if not requests.isdisjoint(other.requests)
        )
        self._attended[chunk.id] = 0
        self._chunks[chunk.id] = chunk

    def before_layer(self, chunk: Chunk, layer: LayerIndex) -> Completion[None] | None:
        """Return what to wait for before the chunk may enter `layer`, then to ask again; None if it may now.

        Every chunk in front must have attention of that layer behind it.
        """
        for other in self._in_front[chunk.id]:
            if self._attended.get(other, layer + 1) <= layer:
                return self._moves.setdefault(other, Completion())
        return None

    def before_end(self, chunk: Chunk) -> Completion[None] | None:
        """Return what to wait for before the chunk may end, then to ask again; None if none is in front."""
        for other in self._in_front[chunk.id]:
            if other in self._chunks:
                return self._moves.setdefault(other, Completion())
        return None

    def attended(self, chunk: Chunk, layer: LayerIndex) -> None:
        """Note that attention of `layer` is done."""
        self._attended[chunk.id] = layer + 1
        self._move(chunk.id)

    def num_attended(self, chunk: Chunk) -> int:
        """Return of how many layers attention is behind the chunk; 0 after its end. From any thread."""
        return self._attended.get(chunk.id, 0)

    def end(self, chunk: Chunk) -> None:
        """Let a chunk leave, wherever it is."""
        del self._chunks[chunk.id], self._attended[chunk.id], self._in_front[chunk.id]
        self._move(chunk.id)

    def _move(self, chunk: ChunkId) -> None:
        moved = self._moves.pop(chunk, None)
        if moved is not None:
            moved.settle(None, None)
