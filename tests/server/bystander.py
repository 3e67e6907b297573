"""Somebody who only reads a stream while others send what is heavy, and what the server's process took meanwhile."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.served import Served


@dataclass
class Bystander:
    """The longest silence of the streams that one client reads, one after the other."""

    served: Served
    gap_s: float = 0.0
    num_chunks: int = 0

    def take_gap_s(self) -> float:
        """Return the longest silence since the last call."""
        gap_s, self.gap_s = self.gap_s, 0.0
        return gap_s

    async def until_read(self, num_chunks: int) -> None:
        """Wait until so many more chunks were read."""
        end = self.num_chunks + num_chunks
        while self.num_chunks < end:  # noqa: ASYNC110 - there is no event for what another process does
            await asyncio.sleep(0.01)

    async def read(self) -> None:
        """Read until cancelled. Raises AssertionError for an answer that is no stream."""
        body = {"prompt": "the cat", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        body["model"] = "demo-moe"
        while True:
            async with self.served.client.post("/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                last_s: float | None = None  # before its first token a stream waits for its turn
                async for _ in response.content:
                    now_s = time.perf_counter()
                    if last_s is not None:
                        self.gap_s = max(self.gap_s, now_s - last_s)
                    last_s = now_s
                    self.num_chunks += 1


@asynccontextmanager
async def bystander(served: Served) -> AsyncIterator[Bystander]:
    """Read streams while the context is open."""
    reader = Bystander(served)
    task = asyncio.create_task(reader.read())
    try:
        yield reader
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.wait({task})


def resident_mib(pid: int, *, peak: bool = False) -> float:
    """Return the memory of a process now, or its peak since `forget_peak`."""
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def forget_peak(pid: int) -> None:
    """Begin to measure the peak anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def waited_s(pid: int) -> dict[str, float]:
    """Return for how long each thread of a process was ready to run and had no processor."""
    waited = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            waited[task.name] = int((task / "schedstat").read_text().split()[1]) * 1e-9
    return waited
