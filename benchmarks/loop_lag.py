"""Does the user's own event loop stay awake beside a long prompt, and the processor quiet after it? Usage
`python -m benchmarks.loop_lag MODEL.gguf`.

A ticker wants to wake every millisecond while `engine.generate` computes a prompt in the same loop; how
late it wakes is the lag. Then the processor time of the whole process is read from 100 ms to 1100 ms
after the last token.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks.engine_side import engine_config, random_prompt, time_request
from benchmarks.measure import ForeignLoad, Row, describe_machine, verdict, write_rows
from benchmarks.model_options import model_parser, parse, run_on_model
from thermocline import Engine

if TYPE_CHECKING:
    from pathlib import Path

_NAME: Final = "loop_lag"
_TICK_S: Final = 0.001
_MAX_P99_MS: Final = 5.0
_MAX_IDLE_PERCENT: Final = 0.5
_REST_S: Final = 0.1
_WATCH_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Lag:
    """How late the ticker woke, in milliseconds."""

    p50: float
    p99: float
    max: float
    num_ticks: int

    @classmethod
    def of(cls, late_s: list[float]) -> Lag:
        """Summarise one or more ticks."""
        late = np.array(late_s) * 1e3
        return cls(
            float(np.percentile(late, 50)),
            float(np.percentile(late, 99)),
            float(late.max()),
            late.size,
        )

    def __str__(self) -> str:
        return f"p50 {self.p50:.2f} ms, p99 {self.p99:.2f} ms, max {self.max:.2f} ms ({self.num_ticks} ticks)"


async def tick(late_s: list[float], until: asyncio.Event) -> None:
    """Append how late each wish to sleep a millisecond was fulfilled."""
    while not until.is_set():
        wanted = time.perf_counter() + _TICK_S
        await asyncio.sleep(_TICK_S)
        late_s.append(time.perf_counter() - wanted)


async def quiet_lag(seconds: float) -> Lag:
    """Return the lag of a loop that has nothing else to do: what this machine gives at best."""
    late_s: list[float] = []
    until = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(tick(late_s, until))
        await asyncio.sleep(seconds)
        until.set()
    return Lag.of(late_s)


async def prompt_lag(engine: Engine, prompt: list[int]) -> tuple[Lag, float]:
    """Return the lag while `prompt` and one token are computed, and the prompt's tokens per second."""
    late_s: list[float] = []
    until = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(tick(late_s, until))
        timings = await time_request(engine, prompt, 1)
        until.set()
    return Lag.of(late_s), timings.prompt_tokens_per_s


async def idle_percent() -> float:
    """Return the process's processor time, of one core, from 100 ms to 1100 ms after the call."""
    await asyncio.sleep(_REST_S)
    start, used = time.perf_counter(), time.process_time()
    await asyncio.sleep(_WATCH_S)
    return (time.process_time() - used) / (time.perf_counter() - start) * 100


async def measure(options: argparse.Namespace, model: Path) -> tuple[list[Row], bool]:
    """Measure and print; return the rows and whether the requirements hold."""
    lags, speeds, idles = [], [], []
    async with Engine.open(model, engine_config(options.prompt + 2, options.threads)) as engine:
        vocab_size = engine.tokenizer.vocab_size
        await time_request(engine, random_prompt(vocab_size, 2, 0), 2)
        quiet = await quiet_lag(options.quiet_s)
        print(f"nothing running:        {quiet}")
        for index in range(options.repeats):
            prompt = random_prompt(vocab_size, options.prompt, index)
            lag, speed = await prompt_lag(engine, prompt)
            idle = await idle_percent()
            print(f"prompt of {options.prompt:5} tokens: {lag}, {speed:.0f} tokens/s")
            print(f"  then {idle:.2f}% of a core from 0.1 to 1.1 s after the last token")
            lags.append(lag)
            speeds.append(speed)
            idles.append(idle)
    case = f"prompt {options.prompt}"
    p99, idle = float(np.median([lag.p99 for lag in lags])), float(np.median(idles))
    lag_holds, idle_holds = p99 <= _MAX_P99_MS, idle <= _MAX_IDLE_PERCENT
    print(f"{verdict(lag_holds)}  event-loop lag p99 {p99:.2f} ms, at most {_MAX_P99_MS} ms")
    print(
        f"{verdict(idle_holds)}  idle after the last token {idle:.2f}%, at most {_MAX_IDLE_PERCENT}%"
    )
    rows = [
        Row(_NAME, "quiet", "asyncio", "lag p99", "ms", (quiet.p99,)),
        Row(_NAME, case, "thermocline", "lag p50", "ms", tuple(lag.p50 for lag in lags)),
        Row(_NAME, case, "thermocline", "lag p99", "ms", tuple(lag.p99 for lag in lags)),
        Row(_NAME, case, "thermocline", "lag max", "ms", tuple(lag.max for lag in lags)),
        Row(_NAME, case, "thermocline", "speed", "tokens/s", tuple(speeds)),
        Row(_NAME, "after the last token", "thermocline", "idle", "% of a core", tuple(idles)),
    ]
    return rows, lag_holds and idle_holds


def run(options: argparse.Namespace, model: Path) -> int:
    """Measure `model`; 1 if a requirement does not hold."""
    facts = describe_machine(options.threads)
    with ForeignLoad() as load:
        rows, holds = asyncio.run(measure(options, model))
    print(load)
    facts["foreign_cores"] = f"{load.cores:.2f}"
    write_rows(options.out, rows, facts)
    return 0 if holds else 1


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for; the status is 1 if a requirement does not hold."""
    parser = model_parser(_NAME, __doc__, "loop-lag.csv")
    parser.add_argument("--prompt", type=int, default=2048, metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quiet-s", type=float, default=2.0, help=argparse.SUPPRESS)
    quick = {"prompt": 64, "repeats": 1, "quiet_s": 0.05}
    return run_on_model(parse(parser, arguments), quick, run)


if __name__ == "__main__":
    sys.exit(main())
