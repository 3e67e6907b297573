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

    def __init__(self, model: Model, lane: JobLane, *, reads_ahead: bool = False) -> None:
        """reads_ahead: a prompt's rows are asked for before one of them is waited for."""
        self._model = model
        self._lane = lane
        self._reads_ahead = reads_ahead

    async def __call__(self, chunk: Chunk) -> Hidden:
        """Look the chunk's tokens up."""
        return await self._lane.run(Name.EMBED, partial(self._embed, chunk), chunk)

    def _embed(self, chunk: Chunk) -> Hidden:
        model, ids, is_prompt = self._model, chunk.token_ids, chunk.is_prompt
        may_be_missing = self._reads_ahead and is_prompt
        x = model.embed(ids, may_be_missing=may_be_missing)
        own = model.embed_layers(ids, x, prompt=is_prompt, may_be_missing=may_be_missing)
        return Hidden(chunk if own is None else replace(chunk, embedded=own), LayerIndex(0), x)
