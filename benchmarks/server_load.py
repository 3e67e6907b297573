"""Does the server stay well with many streams at a time? Usage `python -m benchmarks.server_load [MODEL.gguf]`.

A server in a process of its own, and so many clients that ask again as soon as they were answered. Every
request has to end well or with 429, every answer to be the one that was given when nothing else ran, the
memory to stay and the server's event loop not to stall.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from benchmarks.measure import RESULTS, ForeignLoad, Row, describe_machine, verdict, write_rows
from benchmarks.served import served
from thermocline.demo import DEMO_MODEL_PATH

if TYPE_CHECKING:
    from benchmarks.served import Figures, Served

_NAME: Final = "server_load"
_MAX_LAG_S: Final = 0.02
_MAX_GROWTH_MIB: Final = 1.0
"""Per minute."""
_NUM_REQUESTS: Final = 12
_WORDS: Final = [
    "the",
    "a",
    "cat",
    "dog",
    "house",
    "tree",
    "river",
    "sun",
    "went",
    "saw",
    "was",
    "found",
    "big",
    "small",
    "and",
    "then",
    "said",
]


@dataclass(slots=True)
class Load:
    """What happened under load."""

    num_streams: int
    seconds: float
    statuses: Counter[int] = field(default_factory=Counter)
    num_different: int = 0
    """Answers that were not the one of the serial run."""
    max_silence_s: float = 0.0
    """Longest time between two events within an answer."""
    num_preemptions: float = 0.0
    num_tokens: float = 0.0
    memory: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since the start, and MiB."""
    lag: dict[float, float] = field(default_factory=dict)
    """Looks at the event loop, by upper bound of its lag in seconds."""
    stall: dict[float, float] = field(default_factory=dict)
    """The same without its waiting for a processor, which other programs had."""

    @property
    def growth_mib_per_min(self) -> float:
        """How the memory grew, after a third of the time in which caches fill."""
        late = [(at / 60, mib) for at, mib in self.memory if at > self.seconds / 3]
        return (
            statistics.linear_regression(*zip(*late, strict=True)).slope if len(late) > 2 else 0.0
        )


def share_at(looks: dict[float, float], share: float) -> float:
    """Return the bound below which this share of the looks found the loop, in seconds."""
    total = looks[math.inf]
    return next(bound for bound, count in looks.items() if count >= share * total)


def requests(max_tokens: int) -> list[dict[str, Any]]:
    """Return different requests, each with a seed."""
    rng = random.Random(1)
    return [
        {
            "prompt": " ".join(rng.choices(_WORDS, k=rng.choice([3, 20, 100]))),
            "seed": seed,
            "temperature": 0.8,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        for seed in range(_NUM_REQUESTS)
    ]


async def ask(port: int, body: bytes) -> tuple[int, str, float]:
    """Return status and text of one streamed completion over a socket of its own, and its longest silence in seconds.

    Reads hardly looking, so that the clients take little of the processor from the server.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    parts: list[bytes] = []
    last_s = silence_s = 0.0
    while part := await reader.read(1 << 16):
        parts.append(part)
        if b"data: " in part:
            now_s = time.monotonic()
            silence_s = max(silence_s, now_s - (last_s or now_s))
            last_s = now_s
    writer.close()
    head, _, content = b"".join(parts).partition(b"\r\n\r\n")
    status = int(head.split(maxsplit=2)[1])
    return status, _text(content) if status == 200 else "", silence_s


def _text(content: bytes) -> str:
    *events, last = [line[6:] for line in content.splitlines() if line.startswith(b"data: ")]
    if last != b"[DONE]":
        raise RuntimeError(f"a stream ended with {last!r}")
    choices = [choice for event in events for choice in msgspec.json.decode(event)["choices"]]
    return "".join(choice["text"] for choice in choices)


async def put_under_load(server: Served, num_streams: int, seconds: float, max_tokens: int) -> Load:
    """Keep so many streams running for so long."""
    bodies = [msgspec.json.encode(request) for request in requests(max_tokens)]
    alone = [(await ask(server.port, body))[1] for body in bodies]
    load = Load(num_streams, seconds)
    before, start = await server.figures(), time.monotonic()

    async def client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() - start < seconds:
            chosen = rng.randrange(len(bodies))
            status, text, silence_s = await ask(server.port, bodies[chosen])
            load.statuses[status] += 1
            load.max_silence_s = max(load.max_silence_s, silence_s)
            load.num_different += status == 200 and text != alone[chosen]

    async def watch() -> None:
        while True:
            found = await server.figures()
            load.memory.append((time.monotonic() - start, found["resident_memory_bytes",] / 2**20))
            await asyncio.sleep(seconds / 30)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*map(client, range(num_streams)))
    load.seconds = time.monotonic() - start
    watcher.cancel()
    after = await server.figures()
    load.num_preemptions = _grown("preemptions_total", before, after)
    load.num_tokens = _grown("tokens_predicted_total", before, after)
    load.lag = _looks("event_loop_lag_seconds_bucket", before, after)
    load.stall = _looks("event_loop_stall_seconds_bucket", before, after)
    return load


def _looks(name: str, before: Figures, after: Figures) -> dict[float, float]:
    return {float(key[1]): count - before[key] for key, count in after.items() if key[0] == name}


def _grown(name: str, before: Figures, after: Figures) -> float:
    return after[name,] - before[name,]


def checks(load: Load) -> list[tuple[str, bool]]:
    """Return each requirement in words, and whether it holds."""
    stall_s, growth = share_at(load.stall, 0.99), load.growth_mib_per_min
    return [
        (f"ends {dict(load.statuses)}, only 200 and 429", set(load.statuses) <= {200, 429}),
        (f"{load.num_different} answers differ from the serial run", not load.num_different),
        (f"event loop stalls p99 at most {stall_s:g} s, {_MAX_LAG_S} allowed", stall_s <= _MAX_LAG_S),
        (f"memory grows {growth:.2f} MiB a minute, below {_MAX_GROWTH_MIB}", growth < _MAX_GROWTH_MIB),
    ]  # fmt: skip


async def measure(
    model: Path, num_streams: int, seconds: float, max_tokens: int, *flags: str
) -> Load:
    """Serve `model` and put it under load. flags: further ones of the command."""
    async with served(model, *flags) as server:
        num_tasks = (await server.figures())["tasks",]
        load = await put_under_load(server, num_streams, seconds, max_tokens)
        await server.until_idle(num_tasks)
    return load


def rows(load: Load) -> list[Row]:
    """Return the figures for the CSV."""
    case = f"{load.num_streams} streams"
    found = [
        ("speed", "tokens/s", load.num_tokens / load.seconds),
        ("answers", "requests", load.statuses[200]),
        ("refused", "requests", load.statuses[429]),
        ("longest silence", "s", load.max_silence_s),
        ("preemptions", "", load.num_preemptions),
        ("lag p50", "s", share_at(load.lag, 0.5)),
        ("lag p99", "s", share_at(load.lag, 0.99)),
        ("stall p99", "s", share_at(load.stall, 0.99)),
        ("memory", "MiB", load.memory[-1][1]),
        ("memory growth", "MiB/min", load.growth_mib_per_min),
    ]
    return [Row(_NAME, case, "thermocline", name, unit, (value,)) for name, unit, value in found]


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for; the status is 1 if a requirement does not hold."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument(
        "model", type=Path, nargs="?", default=DEMO_MODEL_PATH, metavar="MODEL.gguf"
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS / "server-load.csv")
    options = parser.parse_args(arguments)
    with ForeignLoad() as foreign:
        load = asyncio.run(
            measure(options.model, options.streams, options.seconds, options.max_tokens)
        )
    for row in rows(load):
        print(f"{row.case:12} {row.metric:14} {row.median:10.4f} {row.unit}")
    verdicts = checks(load)
    for text, holds in verdicts:
        print(f"{verdict(holds)}  {text}")
    print(foreign)
    facts = describe_machine(2) | {"foreign_cores": f"{foreign.cores:.2f}"}
    write_rows(options.out, rows(load), facts)
    return 0 if all(holds for _, holds in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
