"""One look at a model file, in a process of its own: `info`, `plan` or opening an engine, and what that took.

usage: python -m benchmarks.published_models.first_look START COMMAND MODEL.gguf [FLAGS...]
START is time.monotonic() before the process was made. One line of JSON goes to stdout; the process then waits until
its stdin is closed, so that it can be looked at. Knows no benchmark's limits.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTEXT_TOKENS: Final = 4096


def private_bytes(model: Path) -> int:
    """Return this process's pages that no other one has, without those of the map of `model`."""
    total, is_counted, name = 0, True, os.fspath(model.resolve())
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            is_counted = words[-1] != name
        elif is_counted and words[0] in ("Private_Clean:", "Private_Dirty:"):
            total += int(words[1]) << 10
    return total


def _run_command(arguments: Sequence[str]) -> None:
    from thermocline.cli import cli

    shown = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        cli.main(list(arguments), prog_name="thermocline", standalone_mode=False)
        sys.stdout.flush()
    finally:
        os.dup2(shown, 1)
        os.close(shown)
        os.close(nowhere)


async def _open_engine(model: Path, start: float) -> dict[str, float]:
    from thermocline import Engine, EngineConfig
    from thermocline.config import MemoryConfig

    config = EngineConfig(memory=MemoryConfig(max_context_tokens=CONTEXT_TOKENS))
    async with Engine.open(model, config):
        return _facts(model, start)


def _facts(model: Path, start: float) -> dict[str, float]:
    took, cpu = time.monotonic() - start, time.process_time()
    return {"time_s": took, "cpu_s": cpu, "private_bytes": private_bytes(model)}


def main(arguments: Sequence[str]) -> int:
    """Look, tell, and wait."""
    start, command, model = float(arguments[0]), arguments[1], Path(arguments[2])
    if command == "open":
        facts = asyncio.run(_open_engine(model, start))
    else:
        _run_command([command, os.fspath(model), *arguments[3:]])
        facts = _facts(model, start)
    print(json.dumps(facts), flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
