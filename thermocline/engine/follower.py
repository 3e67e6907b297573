"""A rank that follows rank 0: it opens its part of the model, takes part in every step, and answers nobody."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from thermocline.engine.assembly import load_parts
from thermocline.engine.statistics import make_trace
from thermocline.engine.thread import fastest_loop
from thermocline.pipeline.execution.rank_steps import RankSteps
from thermocline.pipeline.execution.rank_steps import follow as follow_steps
from thermocline.traces.chrome import write_chrome

if TYPE_CHECKING:
    import os

    from thermocline.config import EngineConfig


def follow(
    path: str | os.PathLike[str], config: EngineConfig, trace: str | os.PathLike[str] | None = None
) -> None:
    """Follow rank 0 until it ends the service; blocks. Raises what opening raises, and MeshEndedError.

    trace: a file for this rank's timeline, which is written at the end. Raises ConfigError if it can not be.
    """
    with asyncio.Runner(loop_factory=fastest_loop()) as runner:
        runner.run(_follow(path, config, trace))


async def _follow(
    path: str | os.PathLike[str], config: EngineConfig, trace: str | os.PathLike[str] | None
) -> None:
    parts = load_parts(path, config)
    try:
        member, (cpu, *_) = parts.experts.member, parts.lanes
        assert member is not None, "a rank that follows has a group"
        await follow_steps(member, RankSteps(member, parts.runner, cpu))
        if trace is not None:
            made = make_trace(parts, parts.recorder.events(), None)
            write_chrome(trace, made.events, metadata=made.metadata, expert_use=made.expert_use)
    finally:
        parts.close()
