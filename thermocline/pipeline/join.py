"""Collects a layer's partial sums until all that the router announced are there. Pure.

Chunks of one request leave a layer in the order in which they were routed, since the next layer's
attention of the later one reads what the earlier one writes. Chunks of other requests do not wait.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thermocline.messages import Joined, LayerSum, LayerWork, PartialSum, TierResult

if TYPE_CHECKING:
    from thermocline.messages import Chunk, ChunkId, LayerIndex, RequestId


@dataclass(slots=True)
class _Pending:
    work: LayerWork | None = None
    results: list[TierResult] = field(default_factory=list)

    def complete(self) -> bool:
        return self.work is not None and len(self.results) == len(self.work.expects)


class Join:
    """Matches each LayerWork with its tiers' results, in whatever order they come."""

    def __init__(self) -> None:
        self._pending: dict[tuple[ChunkId, LayerIndex], _Pending] = {}
        # Routed and not yet released chunks, oldest first.
        self._lines: defaultdict[tuple[RequestId, LayerIndex], deque[ChunkId]] = defaultdict(deque)

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, message: LayerWork | TierResult) -> tuple[Joined, ...]:
        """Take one message; return the layers that are complete and whose turn it is."""
        key = (message.chunk.id, message.layer)
        pending = self._pending.setdefault(key, _Pending())
        match message:
            case LayerWork():
                assert pending.work is None, f"work for {key} came twice"
                pending.work = message
                for request in message.chunk.requests:
                    self._lines[request, message.layer].append(message.chunk.id)
            case PartialSum() | LayerSum():
                tiers = {result.tier for result in pending.results}
                assert message.tier not in tiers, f"{message.tier} sum for {key} came twice"
                pending.results.append(message)
        if not pending.complete():
            return ()
        return self._release(message.chunk, message.layer)

    def discard(self, chunk: ChunkId) -> tuple[Joined, ...]:
        """Forget everything of a chunk that failed; return the layers that waited for it alone."""
        released: list[Joined] = []
        for key in [key for key in self._pending if key[0] == chunk]:
            work = self._pending.pop(key).work
            if work is not None:
                released += self._leave(work)
        return tuple(released)

    def _release(self, chunk: Chunk, layer: LayerIndex) -> tuple[Joined, ...]:
        pending = self._pending.get((chunk.id, layer))
        if pending is None or pending.work is None or not pending.complete():
            return ()
        if any(self._lines[request, layer][0] != chunk.id for request in chunk.requests):
            return ()
        del self._pending[chunk.id, layer]
        return (Joined(pending.work, tuple(pending.results)), *self._leave(pending.work))

    def _leave(self, work: LayerWork) -> list[Joined]:
        """Take a chunk out of its lines and return those that come to the front by it."""
        released: list[Joined] = []
        for request in work.chunk.requests:
            line = self._lines[request, work.layer]
            line.remove(work.chunk.id)
            if not line:
                del self._lines[request, work.layer]
                continue
            following = self._pending[line[0], work.layer].work
            assert following is not None, "a chunk stands in line from its routing on"
            released += self._release(following.chunk, work.layer)
        return released
