"""The end of a chunk's walk: logits for the rows that want them, and final hidden states for others."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from thermocline.messages import StepResult
from thermocline.traces.lanes import Name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from thermocline.messages import FloatArray, Hidden
    from thermocline.models.contract import Head
    from thermocline.speculation.contract import HiddenReader
    from thermocline.speculation.layer_tap import LayerTap
    from thermocline.workers.lane import JobLane


class HeadStage:
    """Hidden after the last layer -> StepResult."""

    def __init__(
        self,
        model: Head,
        lane: JobLane,
        final_norm: Callable[[FloatArray], FloatArray],
        readers: Sequence[HiddenReader] = (),
        tap: LayerTap | None = None,
        reading_lane: JobLane | None = None,
    ) -> None:
        """final_norm: see `Model.final_norm`. readers: drafters that read what the last layer gave. tap: has what they read
        of other layers; None for nothing. reading_lane: where they read and compute; None for `lane`.
        """
        self._model = model
        self._lane = lane
        self._final_norm = final_norm
        self._readers = tuple(readers)
        self._tap = tap
        self._reading_lane = reading_lane

    async def __call__(self, hidden: Hidden) -> StepResult:
        """Compute logits; a chunk in the middle of a prompt wants none, and ends here all the same."""
        chunk = hidden.chunk
        if self._reading_lane is not None and self._readers:
            # Drafters compute with the CPU's kernels, and on one thread, whatever has the head.
            await self._reading_lane.run(Name.DRAFT, partial(self._read, hidden), chunk)
        job, rows = partial(self._results, hidden), len(chunk.logits_rows)
        logits, states = await self._lane.run(Name.HEAD, job, chunk, rows=rows)
        return StepResult(chunk, logits, states)

    def _read(self, hidden: Hidden) -> None:
        for reader in self._readers:
            if self._tap is None:
                reader.hidden_computed(hidden.chunk, hidden.x)
            else:
                inputs = self._tap.inputs(hidden.chunk.id)
                reader.hidden_computed(hidden.chunk, hidden.x, inputs)

    def _results(self, hidden: Hidden) -> tuple[FloatArray, FloatArray | None]:
        chunk, states = hidden.chunk, None
        if self._reading_lane is None:
            self._read(hidden)
        if chunk.states_rows is not None:
            states = self._final_norm(hidden.x[chunk.states_rows])
        rows = hidden.x[chunk.logits_rows]
        if len(rows) == 0:
            return np.empty((0, self._model.spec.vocab_size), np.float32), states
        return self._model.head(rows, prompt=chunk.is_prompt), states
