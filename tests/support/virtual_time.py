"""A clock that jumps: real scheduler, stages and channels over lanes whose jobs take given times.

Nothing waits for real; a schedule that loses an overlap shows in exact numbers, in milliseconds.
"""

from __future__ import annotations

import asyncio
import selectors
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from thermocline.experts.heat import ExpertHeat
from thermocline.experts.placement import uniform_placement
from thermocline.kernels.turns import Turns
from thermocline.messages import (
    LayerIndex,
    LayerSum,
    PartialSum,
    Routing,
    Tier,
)
from thermocline.pipeline.graph import moe_graph
from thermocline.stages.attend import AttendStage
from thermocline.stages.cold import ColdStage
from thermocline.stages.combine import CombineStage
from thermocline.stages.embed import EmbedStage
from thermocline.stages.head import HeadStage
from thermocline.stages.hot import HotStage
from thermocline.stages.router import RouterStage
from thermocline.traces.lanes import Name

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from thermocline.messages import Chunk, LayerWork, TierResult, TierWork
    from thermocline.pipeline.graph import Graph

HIDDEN, VOCAB = 4, 16


class _JumpingSelector(selectors.DefaultSelector):
    """Never sleeps: a wait moves the loop's clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("nothing will ever happen: a task waits for what nobody does")
        if not ready and timeout:
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is the sum of what was waited for."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-12  # of a time that is made of sums

    def time(self) -> float:
        """Return virtual seconds since the loop's making."""
        return self._jumping.now_s


def run_virtually(main: Coroutine[Any, Any, Any]) -> Any:
    """Return the coroutine's result, run on a loop with a clock that jumps."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class Busy(NamedTuple):
    """A job as a lane did it, in virtual seconds."""

    lane: str
    name: Name
    chunk: int
    layer: int | None
    start_s: float
    end_s: float


class VirtualLane:
    """A resource that does one job at a time, each for the seconds that `seconds_of` says."""

    def __init__(
        self,
        label: str,
        seconds_of: Callable[[Name, Chunk, Mapping[str, int]], float],
        done: list[Busy],
        slowdown: float = 2.0,
    ) -> None:
        self._label = label
        self._seconds_of = seconds_of
        self._done = done
        self._turns: Turns[Callable[[], None]] = Turns(slowdown)
        self._is_busy = False
        self._walked_s: float | None = None

    async def run(
        self, name: Name, job: Any, chunk: Chunk, layer: LayerIndex | None = None, **counts: int
    ) -> Any:
        """Do the job and return its result after its time; inside of a walk at once."""
        seconds = self._seconds_of(name, chunk, counts)
        if self._walked_s is not None:
            start_s = asyncio.get_running_loop().time() + self._walked_s
            self._walked_s += seconds
            self._done.append(Busy(self._label, name, chunk.id, layer, start_s, start_s + seconds))
            return job()

        def begin() -> None:
            now_s = asyncio.get_running_loop().time()
            self._done.append(Busy(self._label, name, chunk.id, layer, now_s, now_s + seconds))
            self._finish_after(seconds, job(), waiter, is_prompt=chunk.is_prompt)

        waiter = asyncio.get_running_loop().create_future()
        self._queue(begin, is_prompt=chunk.is_prompt)
        return await waiter

    async def walk(self, job: Any, chunk: Chunk) -> Any:
        """Do a whole decode step; it takes as long as the jobs that it runs here."""

        def begin() -> None:
            self._walked_s = 0.0
            result = job()
            seconds, self._walked_s = self._walked_s, None
            self._finish_after(seconds, result, waiter, is_prompt=False)

        waiter = asyncio.get_running_loop().create_future()
        self._queue(begin, is_prompt=False)
        return await waiter

    def _queue(self, begin: Callable[[], None], *, is_prompt: bool) -> None:
        self._turns.put(begin, is_prompt=is_prompt)
        self._start_next()

    def _start_next(self) -> None:
        if not self._is_busy and (begin := self._turns.take()) is not None:
            self._is_busy = True
            begin()

    def _finish_after(
        self, seconds: float, result: Any, waiter: asyncio.Future[Any], *, is_prompt: bool
    ) -> None:
        def finish() -> None:
            self._turns.ran(seconds, is_prompt=is_prompt)
            self._is_busy = False
            if not waiter.cancelled():
                waiter.set_result(result)
            self._start_next()

        asyncio.get_running_loop().call_later(seconds, finish)


@dataclass(frozen=True)
class _Spec:
    num_layers: int
    vocab_size: int = VOCAB


@dataclass
class FakeModel:
    """Tokens go to experts by their position; numbers are all zero."""

    num_layers: int
    num_experts: int = 8
    used: int = 2
    spec: _Spec = field(init=False)

    def __post_init__(self) -> None:
        self.spec = _Spec(self.num_layers)

    def embed(self, token_ids: Any) -> Any:
        return np.zeros((len(token_ids), HIDDEN), np.float32)

    def attend(self, layer: LayerIndex, chunk: Chunk, x: Any, pool: Any) -> Any:
        return x

    def route(self, layer: LayerIndex, x: Any) -> Any:
        first = (np.arange(len(x)) + layer)[:, None] * self.used
        ids = (first + np.arange(self.used)) % self.num_experts
        weights = np.full(ids.shape, 1 / self.used, np.float32)
        return x, Routing(ids.astype(np.int32), weights)

    def head(self, x: Any, *, prompt: bool) -> Any:
        return np.zeros((len(x), VOCAB), np.float32)


class FakeCompute:
    """A tier's experts on a lane, without arithmetic."""

    def __init__(self, tier: Tier, lane: VirtualLane) -> None:
        self.tier, self._lane = tier, lane

    async def compute_share(self, work: LayerWork, share: TierWork) -> TierResult:
        name = Name.HOT if self.tier is Tier.HOT else Name.COLD

        def job() -> TierResult:
            if len(share.rows) == work.routing.expert_ids.size:
                return LayerSum(work.chunk, work.layer, self.tier, work.residual)
            values = np.zeros((len(share.rows), HIDDEN), np.float32)
            return PartialSum(work.chunk, work.layer, self.tier, share.rows, share.slots, values)

        return await self._lane.run(
            name, job, work.chunk, work.layer, experts=len(share.experts), pairs=len(share.rows)
        )


class _FakeDense:
    def combine(self, residual: Any, parts: Any, num_slots: int) -> Any:
        return residual


def virtual_graph(
    model: FakeModel, cpu: VirtualLane, hot: VirtualLane | None, credits: int
) -> Graph:
    """Return the real ring of real stages over virtual lanes; half of the experts are hot with `hot`."""
    placement = uniform_placement(model.num_layers, model.num_experts, 0.5 if hot else 0.0)
    heat = ExpertHeat(model.num_layers, model.num_experts)
    stages: dict[str, Any] = {
        "embed": EmbedStage(model, cpu),
        "attend": AttendStage(model, None, cpu),
        "router": RouterStage(model, placement, heat, cpu),
        "cold": ColdStage(FakeCompute(Tier.COLD, cpu)),
        "combine": CombineStage(_FakeDense(), cpu),
        "head": HeadStage(model, cpu),
    }
    if hot is not None:
        stages["hot"] = HotStage(FakeCompute(Tier.HOT, hot))
    return moe_graph(stages, model.num_layers, credits)
