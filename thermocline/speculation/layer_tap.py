"""Keeps what some layers of the model got, from a chunk's way through them to its end: drafters read it there.

Used by one thread at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.speculation.contract import NO_INPUTS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from thermocline.messages import ChunkId, FloatArray, Hidden, LayerIndex


class LayerTap:
    """The inputs of some layers, of the chunks in flight."""

    def __init__(self, layers: Collection[LayerIndex]) -> None:
        self.layers = frozenset(layers)
        """Those whose inputs somebody reads."""
        self._kept: dict[ChunkId, dict[LayerIndex, FloatArray]] = {}

    def __repr__(self) -> str:
        return f"LayerTap(layers {sorted(self.layers)}, {len(self._kept)} chunks)"

    def note(self, hidden: Hidden) -> None:
        """Keep a layer's input, if it is wanted."""
        if hidden.layer in self.layers:
            self._kept.setdefault(hidden.chunk.id, {})[hidden.layer] = hidden.x

    def inputs(self, chunk: ChunkId) -> Mapping[LayerIndex, FloatArray]:
        """Return what was kept of a chunk."""
        return self._kept.get(chunk, NO_INPUTS)

    def forget(self, chunk: ChunkId) -> None:
        """Drop what was kept of a chunk that has ended, however it did."""
        self._kept.pop(chunk, None)
