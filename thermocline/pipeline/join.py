"""Collects a layer's tier results until all that the router announced are there. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thermocline.messages import Joined, LayerSum, LayerWork, PartialSum, TierResult

if TYPE_CHECKING:
    from thermocline.messages import ChunkId, LayerIndex


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

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, message: LayerWork | TierResult) -> Joined | None:
        """Take one message; return the complete layer when this was its last part."""
        key = (message.chunk.id, message.layer)
        pending = self._pending.setdefault(key, _Pending())
        match message:
            case LayerWork():
                assert pending.work is None, f"work for {key} came twice"
                pending.work = message
            case PartialSum() | LayerSum():
                tiers = {result.tier for result in pending.results}
                assert message.tier not in tiers, f"{message.tier} sum for {key} came twice"
                pending.results.append(message)
        if pending.work is None or not pending.complete():
            return None
        del self._pending[key]
        return Joined(pending.work, tuple(pending.results))

    def discard(self, chunk: ChunkId) -> None:
        """Forget everything of a chunk that failed."""
        for key in [key for key in self._pending if key[0] == chunk]:
            del self._pending[key]
