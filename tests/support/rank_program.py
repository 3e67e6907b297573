"""A rank as a process of its own, for tests that end some of them: `python -m tests.support.rank_program FOLDER`.

Writes its process id into the folder, on rank 0 that it has begun, that it has so many tokens (TEST_DUE) and its answers
as JSON, and at its end why it ended. Rank 0 asks for its last answers when something is in the pipe `hit`, if there is one.
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
NUM_ANSWERS, NUM_TURNS, NUM_TOKENS = 6, 3, 40
NUM_EARLY_TOKENS = NUM_ANSWERS * (NUM_TURNS - 1) * NUM_TOKENS
"""Tokens before the last answers are asked for."""


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


async def all_answers(config: EngineConfig, folder: Path | None = None) -> list[list[int]]:
    """Return the answers to some prompts at a time, several times. folder: where others see how far it is."""
    num_tokens = 0
    due = int(os.environ.get("TEST_DUE", "-1"))
    async with Engine.open(DEMO_MODEL_PATH, config) as engine:
        if folder is not None:
            (folder / "begun").touch()

        async def one(number: int) -> list[int]:
            nonlocal num_tokens
            prompt, found = list(range(3 + number, 23 + 8 * number)), []
            async for event in engine.generate(prompt, max_tokens=NUM_TOKENS, ignore_eos=True):
                found += event.token_ids
                if folder is not None and num_tokens <= due < num_tokens + len(event.token_ids):
                    (folder / "due").touch()
                num_tokens += len(event.token_ids)
            return found

        answers = []
        for turn in range(NUM_TURNS):
            if turn == NUM_TURNS - 1 and folder is not None and (folder / "hit").exists():
                await asyncio.to_thread(_wait_for_byte, folder / "hit")
            numbers = range(turn * NUM_ANSWERS, (turn + 1) * NUM_ANSWERS)
            answers += await asyncio.gather(*map(one, numbers))
        return answers


def _wait_for_byte(pipe: Path) -> None:
    with pipe.open("rb") as end:
        end.read(1)


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
            answers = asyncio.run(all_answers(config, folder))
            (folder / "answers").write_text(json.dumps(answers))
    except ThermoclineError as error:
        error_text = f"{type(error).__name__}: {error}"
    (folder / f"end{rank}").write_text(error_text)
    return 3 if error_text else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
