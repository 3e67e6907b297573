"""Token ids to the first residual stream."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from thermocline.messages import Hidden, LayerIndex
from thermocline.traces.lanes import Name

if TYPE_CHECKING:
    from thermocline.messages import Chunk
    from thermocline.models.contract import Model
    from thermocline.workers.lane import JobLane


class EmbedStage:
    """Chunk -> Hidden before layer 0."""

    def __init__(self, model: Model, lane: JobLane) -> None:
        self._model = model
        self._lane = lane

    async def __call__(self, chunk: Chunk) -> Hidden:
        """Look the chunk's tokens up."""
        return await self._lane.run(Name.EMBED, partial(self._embed, chunk), chunk)

    def _embed(self, chunk: Chunk) -> Hidden:
        x = self._model.embed(chunk.token_ids)
        own = self._model.embed_layers(chunk.token_ids, x, prompt=chunk.is_prompt)
        return Hidden(chunk if own is None else replace(chunk, embedded=own), LayerIndex(0), x)
