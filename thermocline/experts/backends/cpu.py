"""`ExpertBackend` of the CPU: computes from the mapped file, on one lane. Knows no stage and no schedule."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from thermocline.experts.dispatch.grouping import pairs_by_slot
from thermocline.kernels.contract import ExpertWork
from thermocline.messages import LayerSum, PartialSum
from thermocline.traces.lanes import Name

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.experts.catalog import ExpertCatalog
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.weight import FloatArray
    from thermocline.messages import (
        BackendRole,
        ExpertDispatch,
        ExpertResult,
        LayerWork,
    )
    from thermocline.workers.lane import JobLane

# Of the remote role the CPU computes what stays here, and what workers fail to answer.
_SPAN_OF_ROLE = {"hot": Name.HOT, "cold": Name.COLD, "remote": Name.COLD}


class CpuExpertBackend:
    """Experts computed by CPU kernels from the mapped bytes, on one lane."""

    def __init__(
        self,
        role: BackendRole,
        catalog: ExpertCatalog,
        kernels: Kernels,
        lane: JobLane,
        on_timed: Callable[[bool, int, float], None] | None = None,
        *,
        reads_ahead: Callable[[], bool] = lambda: False,
    ) -> None:
        """on_timed: called on the lane with (is_prompt, num_pairs, seconds) after each job. reads_ahead: whether experts are
        read from the file meanwhile, so that some may not be in memory yet.
        """
        self._on_timed = on_timed
        self._reads_ahead = reads_ahead
        self._role = role
        self._catalog = catalog
        self._kernels = kernels
        self._lane = lane

    def __repr__(self) -> str:
        return f"CpuExpertBackend({self._role}, {self._kernels.name}, {self._lane})"

    async def compute(self, work: LayerWork, dispatch: ExpertDispatch) -> ExpertResult:
        is_whole = len(dispatch.rows) == work.routing.expert_ids.size
        job = partial(self._sum if is_whole else self._outputs, work, dispatch)
        name, num_experts = _SPAN_OF_ROLE[self._role], len(dispatch.experts)
        values = await self._lane.run(name, job, work.chunk, work.layer, experts=num_experts)
        if is_whole:
            return LayerSum(work.chunk, work.layer, self._role, values)
        return PartialSum(work.chunk, work.layer, self._role, dispatch.rows, dispatch.slots, values)

    def _outputs(self, work: LayerWork, dispatch: ExpertDispatch) -> FloatArray:
        expert_work = self._expert_work(work, dispatch)
        start_s = time.perf_counter()
        values = self._kernels.expert_outputs(expert_work, prompt=work.chunk.is_prompt)
        if self._on_timed is not None:
            seconds = time.perf_counter() - start_s
            self._on_timed(work.chunk.is_prompt, len(dispatch.rows), seconds)
        return values

    def _sum(self, work: LayerWork, dispatch: ExpertDispatch) -> FloatArray:
        pair_of = pairs_by_slot(work.routing, dispatch)
        expert_work = self._expert_work(work, dispatch)
        return self._kernels.expert_sum(
            expert_work, pair_of, work.residual, prompt=work.chunk.is_prompt
        )

    def _expert_work(self, work: LayerWork, dispatch: ExpertDispatch) -> ExpertWork:
        stack = self._catalog.stack(work.layer)
        return ExpertWork(
            stack,
            dispatch.experts,
            dispatch.counts,
            work.x,
            dispatch.rows,
            dispatch.weights,
            may_be_missing=self._reads_ahead(),
        )
