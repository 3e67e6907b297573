"""What does a worker process give? Usage `python -m benchmarks.expert_workers MODEL.gguf`.

One computing thread here and one in a worker, against one thread alone; by mode, payload and transport, with a
worker of full speed and one that takes four times as long. Calls and bytes are those of one prompt. All sides in
turns.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.engine_side import random_prompt, time_request
from benchmarks.measure import (
    QuietRounds,
    Row,
    describe_machine,
    paired_ratios,
    table,
    verdict,
    write_rows,
)
from benchmarks.model_options import add_patience, model_parser, parse, run_on_model
from thermocline import Engine, EngineConfig, RemoteConfig
from thermocline.config import CpuConfig, MemoryConfig, SchedulerConfig

if TYPE_CHECKING:
    import argparse

    from thermocline.engine.statistics import EngineStatistics

_NAME: Final = "expert_workers"
_ALONE: Final = "alone"
_MIN_SPEEDUP: Final = 1.5
_MIN_AUTO: Final = 0.9
_SLOW_FACTOR: Final = 4.0


@dataclass(slots=True)
class Side:
    """What one setting took: seconds of each prompt, and tokens per second of each answer; calls and bytes.

    num_late: parts that were computed here as well, since the worker's answer was later than usual.
    """

    prompt_s: list[float] = field(default_factory=list)
    decode_tokens_per_s: list[float] = field(default_factory=list)
    calls: int = 0
    mib: float = 0.0
    wait_s: float = 0.0
    num_late: int = 0


def sides_of(worker: str) -> dict[str, RemoteConfig]:
    """Return the settings by name, for a worker at this address."""
    address = (worker,)
    return {
        _ALONE: RemoteConfig(),
        "stream": RemoteConfig(address, mode="stream"),
        "batched": RemoteConfig(address, mode="batched"),
        "batched, bf16": RemoteConfig(address, mode="batched", payload="bf16"),
        "batched, socket": RemoteConfig(address, mode="batched", transport="stream"),
        "auto": RemoteConfig(address, mode="auto"),
    }


def config(remote: RemoteConfig, context: int, chunk: int) -> EngineConfig:
    """Return the settings of one side: one computing thread in this process."""
    return EngineConfig(
        memory=MemoryConfig(max_context_tokens=context, max_full_contexts=1),
        scheduler=SchedulerConfig(prefill_chunk_tokens=chunk, prefix_cache=False),
        remote=remote,
        cpu=CpuConfig(threads=1),
    )


async def measure(
    model: Path, worker: str, options: argparse.Namespace, rounds: QuietRounds
) -> dict[str, Side]:
    """Return what each side took, measured in turns."""
    settings = sides_of(worker)
    sides = {name: Side() for name in settings}
    context = options.prompt + options.decode + 2
    async with AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(
                Engine.open(model, config(remote, context, options.chunk))
            )
            for name, remote in settings.items()
        }
        for one in rounds:
            taken = {}
            with one:
                for name, engine in engines.items():
                    prompt = random_prompt(engine.tokenizer.vocab_size, options.prompt, one.number)
                    before = engine.statistics()
                    prompt_s = (await time_request(engine, prompt, 1)).prompt_s
                    _count(sides[name], before, engine.statistics())
                    timings = await time_request(engine, prompt[: options.chunk], options.decode)
                    taken[name] = prompt_s, timings.decode_tokens_per_s
            if one.counts:
                for name, (prompt_s, tokens_per_s) in taken.items():
                    sides[name].prompt_s.append(prompt_s)
                    sides[name].decode_tokens_per_s.append(tokens_per_s)
    return sides


def _count(side: Side, before: EngineStatistics, after: EngineStatistics) -> None:
    if before.remote is None or after.remote is None:
        return
    side.num_late += after.remote.total_fallbacks - before.remote.total_fallbacks
    (first,), (last,) = before.remote.workers, after.remote.workers
    side.calls = last.total_calls - first.total_calls
    num_bytes = last.total_sent_bytes + last.total_received_bytes
    side.mib = (num_bytes - first.total_sent_bytes - first.total_received_bytes) / 2**20
    side.wait_s = (last.total_wait_ns - first.total_wait_ns) * 1e-9


def report(kind: str, sides: dict[str, Side], prompt_tokens: int) -> tuple[list[Row], list[bool]]:
    """Print a table and what must hold; return the rows, and whether each requirement held."""
    rows, cells, speedup = [], [], {}
    alone = sides[_ALONE]
    for name, side in sides.items():
        ratios = paired_ratios(alone.prompt_s, side.prompt_s)
        speedup[name] = statistics.median(ratios)
        speeds = tuple(prompt_tokens / seconds for seconds in side.prompt_s)
        decode = tuple(side.decode_tokens_per_s)
        case = f"{kind}, prompt {prompt_tokens}"
        note = f"{side.calls} calls, {side.mib:.1f} MiB, {side.wait_s:.2f} s waited, of one prompt"
        rows += [
            Row(_NAME, case, name, "prompt", "tokens/s", speeds, note),
            Row(_NAME, case, name, "prompt speed/alone", "ratio", ratios, note),
            Row(_NAME, case, name, "decode", "tokens/s", decode, note),
        ]
        cells.append(
            [
                name,
                str(side.calls),
                f"{side.mib:.1f}",
                f"{side.wait_s:.2f}",
                f"{statistics.median(speeds):.0f}",
                f"{speedup[name]:.2f}",
                f"{statistics.median(decode):.1f}",
            ]
        )
    print(f"\n{kind}\n")
    header = ("side", "calls", "MiB", "wait s", "prompt tokens/s", "of alone", "decode tokens/s")
    print(table(header, cells))
    for name, side in sides.items():
        if side.num_late:
            print(
                f"{name}: {side.num_late} parts were computed here, as the worker was late - DISTURBED, measure again when idle"
            )
    best = max(speedup[name] for name in sides if name != "auto")
    holds = [speedup["auto"] >= _MIN_AUTO * best]
    print(f"{verdict(holds[-1])}  auto: {speedup['auto']:.2f}, best of the fixed ones {best:.2f}")
    if kind == "full speed":
        holds.append(speedup["auto"] >= _MIN_SPEEDUP)
        print(f"{verdict(holds[-1])}  auto: at least {_MIN_SPEEDUP} times one thread alone")
        holds.append(sides["batched"].calls <= 0.1 * sides["stream"].calls)
        print(f"{verdict(holds[-1])}  batched: at most a tenth of the calls of stream")
        holds.append(sides["batched, bf16"].mib <= 0.55 * sides["batched"].mib)
        print(f"{verdict(holds[-1])}  bf16: at most 55 % of the bytes")
    return rows, holds


def run(options: argparse.Namespace, model: Path) -> int:
    """Measure `model`; 1 if a requirement does not hold."""
    facts = describe_machine(2)
    holds: list[bool] = []
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "slow"
        command = [sys.executable, "-m", "benchmarks.slow_worker", str(model), str(where)]
        slow = subprocess.Popen([*command, str(_SLOW_FACTOR)])
        try:
            kinds = {"full speed": "local:1", "four times as slow": f"unix:{where}"}
            for kind, worker in kinds.items():
                rounds = QuietRounds(options.repeats, patience=options.patience)
                sides = asyncio.run(measure(model, worker, options, rounds))
                rows, more_holds = report(kind, sides, options.prompt)
                holds += more_holds
                print(rounds)
                write_rows(options.out, rows, facts | rounds.facts())
        finally:
            slow.kill()
            slow.wait()
    return 0 if all(holds) else 1


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for; the status is 1 if a requirement does not hold."""
    parser = model_parser(_NAME, __doc__, "expert-workers.csv")
    parser.add_argument("--prompt", type=int, default=4000, metavar="TOKENS")
    parser.add_argument("--decode", type=int, default=32, metavar="TOKENS")
    parser.add_argument("--chunk", type=int, default=512, metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=3)
    add_patience(parser)
    quick = {"prompt": 64, "decode": 4, "chunk": 16, "repeats": 1}
    return run_on_model(parse(parser, arguments), quick, run)


if __name__ == "__main__":
    sys.exit(main())
