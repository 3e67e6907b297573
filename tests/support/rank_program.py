"""A rank as a process of its own, for tests that end some of them: `python -m tests.support.rank_program FOLDER`.

Writes its process id into the folder, on rank 0 that it has begun and its answers as JSON, and at its end why it ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from thermocline.cli.ranks import as_rank
from thermocline.config import (
    CpuConfig,
    EngineConfig,
    HeatConfig,
    MemoryConfig,
    ParallelConfig,
    PlacementConfig,
    SpeculationConfig,
)
from thermocline.demo import DEMO_MODEL_PATH
from thermocline.engine.api import Engine
from thermocline.engine.follower import follow
from thermocline.errors import ThermoclineError

TIMEOUT_S = 1.5
NUM_ANSWERS, NUM_TURNS = 6, 3


def config_of(**parallel: object) -> EngineConfig:
    """Return the config of all ranks, and of the process that they are compared with."""
    return EngineConfig(
        parallel=ParallelConfig(timeout_s=TIMEOUT_S, **parallel),
        cpu=CpuConfig(threads=1),
        memory=MemoryConfig(max_context_tokens=512),
        placement=PlacementConfig(hot_device="none", trunk_device="cpu"),
        heat=HeatConfig(enabled=False),
        speculation=SpeculationConfig(drafters="off"),
    )


async def all_answers(config: EngineConfig, on_open=lambda: None) -> list[list[int]]:
    """Return the answers to some prompts at a time, several times."""
    async with Engine.open(DEMO_MODEL_PATH, config) as engine:
        on_open()

        async def one(number: int) -> list[int]:
            prompt = list(range(3 + number, 23 + 8 * number))
            events = engine.generate(prompt, max_tokens=40, ignore_eos=True)
            return [token async for event in events for token in event.token_ids]

        found = []
        for turn in range(NUM_TURNS):
            numbers = range(turn * NUM_ANSWERS, (turn + 1) * NUM_ANSWERS)
            found += await asyncio.gather(*map(one, numbers))
        return found


def main(folder: Path) -> int:
    """Be a rank to the end; the exit code is 3 for an error."""
    tp = int(os.environ.get("TEST_TP", "1"))
    may_compute_alone = "TEST_ALONE" in os.environ
    transport = os.environ.get("TEST_TRANSPORT", "auto")
    found = config_of(tp=tp, may_compute_alone=may_compute_alone, transport=transport)
    config = as_rank(found)
    config = replace(config, cpu=CpuConfig(threads=1))
    rank = config.parallel.rank or 0
    (folder / f"rank{rank}").write_text(str(os.getpid()))
    error_text = ""
    try:
        if rank:
            follow(DEMO_MODEL_PATH, config)
        else:
            begun = folder / "begun"
            answers = asyncio.run(all_answers(config, begun.touch))
            (folder / "answers").write_text(json.dumps(answers))
    except ThermoclineError as error:
        error_text = f"{type(error).__name__}: {error}"
    (folder / f"end{rank}").write_text(error_text)
    return 3 if error_text else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
