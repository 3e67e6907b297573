"""The step loops of several replicas behind the interface of one: who gets a request, and who takes it over.

A replica's requests have their caches there, so each has a scheduler and a loop of its own. Knows no rank and no chunk.
"""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from typing import TYPE_CHECKING, TypeAlias

from thermocline.errors import EngineError
from thermocline.pipeline.scheduling.cache_snapshot import CacheSnapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.messages import Chunk, RequestId
    from thermocline.pipeline.execution.replicas import Conductor
    from thermocline.pipeline.generation import Generation
    from thermocline.pipeline.scheduling.scheduler import SchedulerSnapshot
    from thermocline.pipeline.step_loop import StepLoop


class ReplicaLoops:
    """Step loops as one; see `StepLoop`, whose methods these are. The first replica is never lost: rank 0 is in it."""

    drafting = None
    spilling = None
    """Nothing is drafted on several ranks."""

    def __init__(self, loops: Sequence[StepLoop], conductor: Conductor) -> None:
        self._loops = tuple(loops)
        self._conductor = conductor
        self._home: dict[RequestId, int] = {}
        self._live = [True] * len(self._loops)
        conductor.on_lost = self._on_lost

    def __repr__(self) -> str:
        return f"ReplicaLoops({sum(self._live)} of {len(self._loops)} replicas, {self.num_requests} requests)"

    @property
    def num_requests(self) -> int:
        """Requests accepted and not ended."""
        return sum(loop.num_requests for loop in self._loops)

    def busy_ns(self) -> int:
        """Return how long this thread has been busy with steps."""
        return sum(loop.busy_ns() for loop in self._loops)

    def snapshot(self) -> SchedulerSnapshot:
        """Return what is running and waiting in all replicas together."""
        return merged([loop.snapshot() for loop in self._loops])

    def submit(self, generation: Generation) -> None:
        """Accept a request, in the replica that has the fewest. Raises what `StepLoop.submit` raises."""
        # Routing is noted on rank 0, so who asks for it goes to its replica.
        home = 0 if generation.options.wants_routing else self._emptiest()
        self._loops[home].submit(generation)
        running = {request for loop in self._loops for request in loop.requests}
        self._home = {each: at for each, at in self._home.items() if each in running}
        self._home[generation.request] = home

    def abort(self, request: RequestId) -> bool:
        """End a request now; False when it has ended already."""
        return self._loop_of(request).abort(request)

    def resume(self, request: RequestId) -> None:
        """The reader took the last logits: compute the next."""
        self._loop_of(request).resume(request)

    def check_model(self) -> None:
        """Look whether the model's files were changed."""
        for loop in self._loops:
            loop.check_model()

    async def run(self) -> None:
        """Run steps until `close`. Raises what ends a loop, and MeshEndedError."""
        tasks = [asyncio.ensure_future(loop.run()) for loop in self._loops]
        tasks.append(asyncio.ensure_future(self._conductor.run()))
        try:
            await asyncio.gather(*tasks)
        except EngineError:
            self.close()
            raise
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        """End every request; `run` returns when no chunk is in flight. Further calls do nothing."""
        for loop in self._loops:
            loop.close()

    def check_integrity(self) -> None:
        """Assert that every loop is consistent."""
        for loop in self._loops:
            loop.check_integrity()

    def _emptiest(self) -> int:
        live = [number for number, lives in enumerate(self._live) if lives]
        return min(live, key=lambda number: self._loops[number].num_requests)

    def _loop_of(self, request: RequestId) -> StepLoop:
        return self._loops[self._home.get(request, 0)]

    def _on_lost(self, replica: int, chunks: list[Chunk], is_gone: bool) -> None:
        """Have requests computed again from their tokens: where they were, or, of a replica that is gone, elsewhere."""
        moved = self._loops[replica].give_up(chunks, everything=is_gone)
        if is_gone:
            self._live[replica] = False
        for each in moved:
            home = self._emptiest() if is_gone else replica
            self._home[each[0].request] = home
            self._loops[home].adopt([each])


AnyStepLoop: TypeAlias = "StepLoop | ReplicaLoops"


def merged(snapshots: Sequence[SchedulerSnapshot]) -> SchedulerSnapshot:
    """Return the sums of snapshots; the limit of a chunk is that of each."""
    first = snapshots[0]
    names = ("num_waiting", "num_running", "num_decoding", "num_prompt_chunks", "num_decode_chunks")
    totals = ("total_preemptions", "total_prompt_tokens", "total_output_tokens")
    sums = {name: sum(getattr(each, name) for each in snapshots) for name in (*names, *totals)}
    return replace(
        first,
        **sums,
        cache=_merged_cache([each.cache for each in snapshots]),
        requests=tuple(request for each in snapshots for request in each.requests),
    )


def _merged_cache(caches: Sequence[CacheSnapshot]) -> CacheSnapshot:
    # Every field is a count.
    names = [field.name for field in fields(CacheSnapshot)]
    return CacheSnapshot(*(sum(getattr(each, name) for each in caches) for name in names))
