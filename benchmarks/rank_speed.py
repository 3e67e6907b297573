"""How fast are ranks of one core each? Usage `python -m benchmarks.rank_speed MODEL [--repeats N]`.

Sides, each opened once and asked in turns: one process with one core, one with all cores, and ranks with a core each
(as under torchrun, but started here). Cases: prompts of 512 tokens, one for each core; the answers of 8 requests at a
time; one answer; with `--prompt N`, one prompt of so many tokens. `--tp M` has M ranks in each replica. `--before FOLDER` adds
the ranks of another checkout, `--transports NAME ...` has ranks for each way to exchange. `--hosts a=10.9.0.1 b=10.9.0.2` runs each rank in
a network namespace of that name and address (docs/distributed.md makes two).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from thermocline import Engine, EngineConfig, SamplingParams
from thermocline.cli.ranks import as_rank
from thermocline.config import (
    CpuConfig,
    HeatConfig,
    MemoryConfig,
    ParallelConfig,
    PlacementConfig,
    RankTransport,
    SchedulerConfig,
    SpeculationConfig,
)
from thermocline.engine.follower import follow

if TYPE_CHECKING:
    from collections.abc import Sequence

_SEED: Final = 31
_WARM_UP: Final = {"kind": "answers", "requests": 2, "prompt": 16, "tokens": 4}


def config_of(options: argparse.Namespace) -> EngineConfig:
    """Return the settings of a side; a prompt that comes again is computed again."""
    parallel: dict[str, Any] = {"may_compute_alone": not options.always_exchange}
    parallel["transport"] = options.transport
    if options.tp is not None:
        parallel["tp"] = options.tp
    if options.expert_map is not None:
        parallel["expert_map"] = options.expert_map
    return EngineConfig(
        scheduler=SchedulerConfig(prefix_cache=False),
        memory=MemoryConfig(max_context_tokens=1024),
        placement=PlacementConfig(hot_device="none", trunk_device="cpu"),
        cpu=CpuConfig(threads=options.threads),
        heat=HeatConfig(enabled=options.heat_file is not None, file=options.heat_file, saved=False),
        speculation=SpeculationConfig(drafters="off"),
        parallel=ParallelConfig(**parallel),
    )


async def _answer(engine: Engine, seed: int, case: dict[str, Any]) -> list[float]:
    """Return when each token of an answer came, in seconds."""
    draw = random.Random(seed)
    prompt = [draw.randrange(engine.tokenizer.vocab_size - 1) for _ in range(case["prompt"])]
    params = SamplingParams(max_tokens=case["tokens"], ignore_eos=True)
    times: list[float] = []
    async for event in engine.generate(prompt, params):
        times += [time.perf_counter()] * len(event.token_ids)
    return times


async def measure(engine: Engine, case: dict[str, Any]) -> float:
    """Return tokens per second: of prompts, or of answers while all of them are running."""
    begin_s = time.perf_counter()
    asked = (_answer(engine, _SEED + number, case) for number in range(case["requests"]))
    times = await asyncio.gather(*asked)
    if case["kind"] == "prompts":
        num_tokens = case["requests"] * case["prompt"]
        return float(num_tokens / (max(each[0] for each in times) - begin_s))
    begin_s, end_s = max(each[0] for each in times), min(each[-1] for each in times)
    num_tokens = sum(begin_s < at <= end_s for each in times for at in each)
    return num_tokens / (end_s - begin_s)


async def _serve(path: str, config: EngineConfig) -> None:
    async with Engine.open(path, config) as engine:
        await measure(engine, _WARM_UP)
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(await measure(engine, json.loads(line)), flush=True)


def be_a_side(options: argparse.Namespace) -> int:
    """Answer one line after the other, or follow rank 0 to its end."""
    os.sched_setaffinity(0, options.cores)
    config = as_rank(config_of(options))
    if config.parallel.rank:
        follow(options.model, config)
    else:
        asyncio.run(_serve(options.model, config))
    return 0


@dataclass(frozen=True, slots=True)
class Side:
    """What is started. cores: of each process. hosts: the network namespace of each, and its address."""

    name: str
    folder: Path
    cores: tuple[tuple[int, ...], ...]
    flags: tuple[str, ...] = ()
    hosts: tuple[tuple[str, str], ...] = ()


class OpenSide:
    """A side that runs: processes, of which the first answers."""

    def __init__(self, side: Side, model: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        master = side.hosts[0][1] if side.hosts else "127.0.0.1"
        self._processes = []
        for rank, cores in enumerate(side.cores):
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.fspath(side.folder)}
            if len(side.cores) > 1:
                env |= {"RANK": str(rank), "WORLD_SIZE": str(len(side.cores))}
                env |= {"LOCAL_WORLD_SIZE": str(len(side.cores))}
                env |= {"MASTER_ADDR": master, "MASTER_PORT": str(port)}
            command = ["ip", "netns", "exec", side.hosts[rank][0]] if side.hosts else []
            command += [sys.executable, __file__, model, "--cores", *map(str, cores), *side.flags]
            command += ["--threads", str(len(cores))]
            started = subprocess.Popen(
                command,
                cwd=side.folder,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._processes.append(started)
        self._read()

    def _read(self) -> str:
        out = self._processes[0].stdout
        assert out is not None, "the answers are piped"
        line = out.readline()
        if not line:
            raise SystemExit("a side ended: see its message above")
        return line

    def ask(self, case: dict[str, Any]) -> float:
        """Return tokens per second."""
        pipe = self._processes[0].stdin
        assert pipe is not None, "requests are piped"
        pipe.write(json.dumps(case) + "\n")
        pipe.flush()
        return float(self._read())

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            assert process.stdin is not None, "requests are piped"
            process.stdin.close()
        for process in self._processes:
            process.wait(20)


def cases_of(options: argparse.Namespace, num_cores: int) -> dict[str, dict[str, Any]]:
    """Return what is asked, by name."""
    prompts = {"kind": "prompts", "requests": num_cores, "prompt": 512, "tokens": 1}
    some = {
        f"prompt {count}": {"kind": "prompts", "requests": 1, "prompt": count, "tokens": 1}
        for count in options.prompt
    }
    return some | {
        name: case
        for name, case in {
            "prompts": prompts,
            "8 answers": {
                "kind": "answers",
                "requests": 8,
                "prompt": 8,
                "tokens": 2 * options.tokens,
            },
            "1 answer": {"kind": "answers", "requests": 1, "prompt": 8, "tokens": options.tokens},
        }.items()
        if name.split()[0] in options.cases
    }


def run(options: argparse.Namespace) -> int:
    """Open all sides, ask them in turns and print medians and ratios to the first."""
    here, cores = Path(__file__).parents[1], sorted(os.sched_getaffinity(0))
    ranks = tuple((core,) for core in cores)
    flags: tuple[str, ...] = ("--always-exchange",) if options.always_exchange else ()
    flags += () if options.tp is None else ("--tp", str(options.tp))
    sides = [Side("1 core", here, (ranks[0],)), Side("all cores", here, (tuple(cores),))]
    mapped: tuple[str, ...] = ("--expert-map", options.expert_map) if options.expert_map else ()
    mapped += ("--heat-file", options.heat_file) if options.heat_file else ()
    if options.before is not None:
        sides.append(Side("ranks before", options.before.resolve(), ranks, flags))
    hosts = tuple((name, address) for name, _, address in (h.partition("=") for h in options.hosts))
    for way in options.transports:
        name = "ranks" if way == "auto" else f"ranks by {way}"
        way_flags = (*flags, *mapped, "--transport", way)
        sides.append(Side(name, here, ranks, way_flags, hosts))
    sides = [side for side in sides if not options.sides or side.name in options.sides]
    opened = [OpenSide(side, options.model) for side in sides]
    found: dict[str, dict[str, list[float]]] = {}
    cases = cases_of(options, len(cores))
    for name, case in cases.items():
        found[name] = {side.name: [] for side in sides}
        for turn in range(options.repeats + options.warm_turns):
            pairs = list(zip(sides, opened, strict=True))
            for side, each in pairs if turn % 2 else reversed(pairs):
                each.ask(case)  # after a pause of seconds the first is up to a third slower
                speed = each.ask(case)
                if turn >= options.warm_turns:  # the first find their way
                    found[name][side.name].append(speed)
    for each in opened:
        each.close()
    show(found)
    return 0


def show(found: dict[str, dict[str, list[float]]]) -> None:
    """Print a line for each case and side."""
    for name, speeds in found.items():
        first = next(iter(speeds.values()))
        for side, values in speeds.items():
            ratios = [a / b for a, b in zip(values, first, strict=True)]
            print(
                f"{name:10} {side:14} {statistics.median(values):8.1f} tokens/s "
                f"({', '.join(f'{value:.1f}' for value in values)})  {statistics.median(ratios):.2f}"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or be one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--warm-turns", type=int, default=2)
    parser.add_argument("--cases", nargs="*", default=["prompts", "8", "1"])
    parser.add_argument("--sides", nargs="*")
    parser.add_argument("--prompt", type=int, nargs="*", default=[])
    parser.add_argument("--tp", type=int)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--always-exchange", action="store_true")
    parser.add_argument("--expert-map")
    parser.add_argument("--heat-file")
    parser.add_argument(
        "--transports", nargs="+", default=["auto"], choices=get_args(RankTransport)
    )
    parser.add_argument("--hosts", nargs="+", default=[], metavar="NAMESPACE=ADDRESS")
    parser.add_argument("--transport", default="auto", help="of a process that is measured")
    parser.add_argument("--cores", type=int, nargs="+", help="of a process that is measured")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args(arguments)
    return run(options) if options.cores is None else be_a_side(options)


if __name__ == "__main__":
    sys.exit(main())
