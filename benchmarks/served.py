"""`thermocline serve` as a process of its own, as it is in production, and its counters."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

Figures = dict[tuple[str, ...], float]
"""Samples as {(name without prefix, label values...): value}."""


@dataclass(frozen=True, slots=True)
class Served:
    """A server in another process, and a client of it."""

    port: int
    client: aiohttp.ClientSession
    process: asyncio.subprocess.Process

    async def figures(self) -> Figures:
        """Return the samples of /metrics."""
        async with self.client.get("/metrics") as response:
            return parse_figures(await response.text())

    async def until_idle(self, num_tasks: float) -> Figures:
        """Wait until nothing is left of any request, and return the figures of then."""
        async with asyncio.timeout(10):
            while True:
                found = await self.figures()
                left = [found[name,] for name in ("requests_processing", "requests_deferred")]
                left += found["kv_cache_blocks", "held"], found["tasks",] - num_tasks
                if not any(left) and found["connections",] <= 1:
                    return found
                await asyncio.sleep(0.01)


def parse_figures(text: str) -> Figures:
    """Return the samples in Prometheus' text."""
    return {
        (sample.name.removeprefix("thermocline:"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@asynccontextmanager
async def served(model: Path | None, *flags: str, may_say: str = "(?!)") -> AsyncIterator[Served]:
    """Run the command while the context is open; it has to end well, and each line that it said to match `may_say`.

    model: None where the flags name the models.
    """
    models = () if model is None else (str(model),)
    with TemporaryFile() as said:  # a pipe that nobody reads would stop the server when it is full
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "thermocline", "serve", *models, "--port", "0", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=said,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert process.stdout is not None
        try:
            url = (await process.stdout.readline()).decode().split()[-1]
            async with aiohttp.ClientSession(base_url=url) as client:
                while (await client.get("/health")).status == 503:
                    pass
                yield Served(int(url.rpartition(":")[2]), client, process)
            if process.returncode is None:
                process.terminate()
            await process.communicate()
            said.seek(0)
            unexpected = [
                line for line in said.read().decode().splitlines() if not re.match(may_say, line)
            ]
            assert (process.returncode, unexpected) == (0, []), unexpected
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()
