"""One rank's part of a step: its replica's chunks, and what others need in rounds for which it has none.

The same on rank 0 and on those that follow it. Knows no scheduler and no request.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from thermocline.errors import GroupLostError
from thermocline.messages import StepResult
from thermocline.parallel.parts import nobodys_chunk
from thermocline.parallel.step_header import HeaderKind
from thermocline.pipeline.execution.rank_results import packed_results
from thermocline.workers.completion import HeldFuture
from thermocline.workers.lane_queue import Waits

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator

    from thermocline.messages import ChunkId
    from thermocline.parallel.rank import RankMember
    from thermocline.parallel.step_header import StepHeader
    from thermocline.pipeline.execution.runner import Runner
    from thermocline.workers.lane import LaneThread


class RankSteps:
    """Takes a rank's part of each step through its layers."""

    def __init__(self, member: RankMember, runner: Runner, lane: LaneThread) -> None:
        self._member, self._runner, self._lane = member, runner, lane

    async def run(self, header: StepHeader) -> list[StepResult | None]:
        """Return the results of this rank's replica, by round. Raises GroupLostError, once nothing is on its way."""
        member = self._member
        mine = [chunks[member.replica] for chunks in header.rounds]
        is_prompt = not header.has_answers
        idle = [
            asyncio.ensure_future(self._idle(number, is_prompt=is_prompt))
            for number, chunk in enumerate(mine)
            if chunk is None and not header.is_alone
        ]
        failures: list[BaseException] = []
        results: dict[ChunkId, StepResult] = {}
        for number, chunk in enumerate(mine):
            if chunk is not None:
                # Who asks for routing is on replica 0, and rank 0 notes it.
                is_noted = chunk.wants_routing and member.rank == 0
                own = member.own_part(number, replace(chunk, wants_routing=is_noted))
                self._runner.inject(own)
        for chunk in mine:
            if chunk is None:
                continue
            result = await self._runner.receive()
            if isinstance(result, StepResult):
                results[result.chunk.id] = result
            else:
                failures.append(result.error)
                member.give_up(str(result.error))
        ends = await asyncio.gather(*idle, return_exceptions=True)
        failures.extend(end for end in ends if end is not None)
        if failures:
            raise GroupLostError(f"a step was lost: {failures[0]}") from failures[0]
        return [None if chunk is None else results[chunk.id] for chunk in mine]

    async def _idle(self, number: int, *, is_prompt: bool) -> None:
        chunk = nobodys_chunk(is_prompt=is_prompt)
        try:
            await self._lane.drive(_driven(self._member.idle_round(number, chunk)), chunk)
        except Exception as error:
            self._member.give_up(str(error))
            raise


async def follow(member: RankMember, steps: RankSteps) -> None:
    """Take part in steps until rank 0 ends the service. Raises MeshEndedError when it ends in another way."""
    while True:
        try:
            header = await member.listen()
            match header.kind:
                case HeaderKind.END:
                    return
                case HeaderKind.ALIVE:
                    continue
                case HeaderKind.STEP:
                    results = await steps.run(header)
                    given = packed_results(results, is_leader=member.is_leader)
                    await member.results(given, ())
        except GroupLostError:
            await member.regroup()


def _driven(work: Coroutine[Any, Any, None]) -> Generator[Waits, None, None]:
    """Run a coroutine on a lane's thread, which has other jobs while it waits."""
    try:
        while True:
            try:
                future = work.send(None)
            except StopIteration:
                return
            yield Waits((future,), needs_lane=isinstance(future, HeldFuture))
    finally:
        work.close()
