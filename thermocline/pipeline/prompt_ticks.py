"""Tells requests how far their prompts have come while a chunk is on its way, which takes seconds on a large model.

Runs on the engine's thread. Knows neither how chunks are executed nor what is done with the figures.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from thermocline.messages import SegmentKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from thermocline.messages import Chunk, ChunkId, RequestId
    from thermocline.pipeline.generation import Generation

# As often as a person can read it.
PERIOD_S: Final = 0.25


class PromptTicks:
    """Looks at the prompt chunks in flight from time to time. `begin` and `end` each; no timer runs without any."""

    def __init__(
        self, generations: Mapping[RequestId, Generation], share_done: Callable[[Chunk], float]
    ) -> None:
        """share_done: how much of a chunk's layers is behind it, 0 to 1."""
        self._generations = generations
        self._share_done = share_done
        self._chunks: dict[ChunkId, Chunk] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, chunk: Chunk) -> None:
        """Look at this chunk until its end, if it is a prompt's."""
        if chunk.is_prompt:
            self._chunks[chunk.id] = chunk
            self._arm()

    def end(self, chunk: Chunk) -> None:
        """Look at this chunk no more."""
        self._chunks.pop(chunk.id, None)
        if not self._chunks and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        for chunk in self._chunks.values():
            share = self._share_done(chunk)
            for segment in chunk.segments:
                generation = self._generations.get(segment.request)
                if generation is not None and segment.kind is SegmentKind.PROMPT:
                    first = int(chunk.positions[segment.start])
                    generation.prompt_under_way(first, int(segment.length * share))
        if self._chunks:
            self._arm()
