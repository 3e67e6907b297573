"""Keeps the walks of one request's chunks in order: each layer's attention reads what the chunk before wrote.

Chunks enter on the loop's thread, and move on the lane's. Knows neither stages nor lanes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thermocline.messages import Chunk, ChunkId, LayerIndex, RequestId


class WalkOrder:
    """Who walks behind whom, and how far each has come. Single operations are atomic under the lock of the
    interpreter, and a chunk's own are made by one thread at a time.
    """

    def __init__(self) -> None:
        self._lines: defaultdict[RequestId, deque[ChunkId]] = defaultdict(deque)
        self._attended: dict[ChunkId, int] = {}

    def __len__(self) -> int:
        return len(self._attended)

    def begin(self, chunk: Chunk) -> None:
        """Let a chunk line up behind its requests' earlier ones."""
        self._attended[chunk.id] = 0
        for request in chunk.requests:
            self._lines[request].append(chunk.id)

    def may_enter(self, chunk: Chunk, layer: LayerIndex) -> bool:
        """Whether every chunk in front has attention of `layer` behind it."""
        for request in chunk.requests:
            for other in tuple(self._lines[request]):
                if other == chunk.id:
                    break
                if self._attended.get(other, layer + 1) <= layer:
                    return False
        return True

    def attended(self, chunk: Chunk, layer: LayerIndex) -> None:
        """Note that attention of `layer` is done."""
        self._attended[chunk.id] = layer + 1

    def is_first(self, chunk: Chunk) -> bool:
        """Whether nothing is in front any more."""
        return all(self._lines[request][0] == chunk.id for request in chunk.requests)

    def end(self, chunk: Chunk) -> None:
        """Let a chunk leave, wherever it is."""
        del self._attended[chunk.id]
        for request in chunk.requests:
            line = self._lines[request]
            line.remove(chunk.id)
            if not line:
                del self._lines[request]
