"""How near does `thermocline run` without flags come to the best of 20 sets of flags? Usage
`python -m benchmarks.settings MODEL.gguf|FOLDER ...`.

For each model and setting (no device, a simulated device of two sizes behind two links, less memory than the file) each
set of flags meets no flags in pairs, one right after the other, until it is clear whether it is faster by more than a
twentieth. The one that seems best meets no flags again, in rounds that count. A run opens the model, as `run` does, and
computes one prompt and its answer; with --warm-ups N an engine stays open, as a server's. Memory limits need the right to
make a memory group (root), and are left out without it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.engine_side import random_prompt, time_request
from benchmarks.flag_sets import NO_FLAGS, NUM_SETS, Setting, settings_for
from benchmarks.larger_than_ram import drop_pages, fill_pages, memory_group
from benchmarks.measure import (
    RESULTS,
    ForeignLoad,
    Row,
    describe_machine,
    spread,
    table,
    verdict,
    write_rows,
)
from benchmarks.routing_source import routing_of
from benchmarks.synthetic_model import write_model
from thermocline import Engine
from thermocline.kernels.cpu_topology import default_threads
from thermocline.modelfile.reader import open_model_file
from thermocline.models.footprint import measure_footprint
from thermocline.models.registry import read_spec

if TYPE_CHECKING:
    from thermocline.config import EngineConfig
    from thermocline.engine.context import EngineContext

_NAME: Final = "settings"
_ROOT: Final = Path(__file__).parents[1]
_LEAST_SHARE: Final = 0.95
_MIN_ROUNDS: Final = 2
_FAR_SLOWER: Final = 0.9
_PHASES: Final = ("prompt", "answer")

Speeds = tuple[float, float]
"""Tokens per second of the prompt, and of the answer."""


@dataclass(slots=True)
class Duel:
    """A set of flags against no flags, in pairs. ratios: its speed over that without flags, by phase."""

    flags: str
    ratios: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _PHASES})
    speeds: dict[str, list[Speeds]] = field(default_factory=lambda: {"with": [], "without": []})

    def add(self, with_flags: Speeds, without: Speeds) -> None:
        """Take in one pair."""
        self.speeds["with"].append(with_flags)
        self.speeds["without"].append(without)
        for number, phase in enumerate(_PHASES):
            self.ratios[phase].append(with_flags[number] / without[number])

    def median(self, phase: str) -> float:
        """Return the middle of the ratios."""
        return statistics.median(self.ratios[phase])

    @property
    def is_clear(self) -> bool:
        """Whether all pairs say the same: faster by more than what may be lost, or not. One pair says it of what is far slower."""
        limit = 1 / _LEAST_SHARE
        if all(found and max(found) < _FAR_SLOWER for found in self.ratios.values()):
            return True
        return len(self.ratios["prompt"]) >= _MIN_ROUNDS and all(
            max(found) <= limit or min(found) > limit for found in self.ratios.values()
        )


class Bench:
    """Runs duels of one model in one setting."""

    def __init__(self, model: Path, setting: Setting, options: argparse.Namespace) -> None:
        self._model, self._setting, self._options = model, setting, options
        self._seed = 0

    async def duel(self, flags: str, max_rounds: int, *, until_clear: bool = True) -> Duel:
        """Return what the pairs came to; the first of a pair changes."""
        found = Duel(flags)
        sides = (flags, NO_FLAGS)
        async with AsyncExitStack() as stack:
            run = {}
            for side in sides:
                run[side] = await stack.enter_async_context(_Side(self, side))
            for number in range(max_rounds):
                taken = {}
                self._seed += 1
                for side in sides[:: -1 if number % 2 else 1]:
                    taken[side] = await run[side].speeds(self._seed)
                found.add(taken[flags], taken[NO_FLAGS])
                if until_clear and found.is_clear:
                    break
        return found

    def config(self, flags: str) -> EngineConfig:
        """Return the settings of a side."""
        return self._setting.config(flags)

    def limited(self, flags: str, seed: int) -> Speeds:
        """Return the speeds of a process of its own in a memory group, with no page of the file in memory."""
        assert self._setting.limit_bytes is not None
        gc.collect()  # engines of settings before this one still map the file
        drop_pages(self._model)
        with memory_group(self._setting.limit_bytes) as group:
            command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]
            command += [sys.executable, "-m", "benchmarks.settings", str(self._model.absolute())]
            command += [
                "--prompt",
                str(self._options.prompt),
                "--answer",
                str(self._options.answer),
            ]
            command += [f"--child={flags}", "--seed", str(seed)]
            ran = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True)
        prompt, answer = json.loads(ran.stdout)
        return prompt, answer

    @property
    def model(self) -> Path:
        """The file."""
        return self._model

    @property
    def is_limited(self) -> bool:
        """Whether each run is a process of its own."""
        return self._setting.limit_bytes is not None

    @property
    def num_warm_ups(self) -> int:
        """Requests before an engine's first one that counts; 0 for a new engine each time."""
        return int(self._options.warm_ups)

    async def measured(self, engine: Engine, seed: int) -> Speeds:
        """Return the speeds of one request."""
        options = self._options
        prompt = random_prompt(engine.tokenizer.vocab_size, options.prompt, seed)
        timings = await time_request(engine, prompt, options.answer + 1)
        return timings.prompt_tokens_per_s, timings.decode_tokens_per_s


class _Side:
    """One side of a duel: an open engine that was warmed up, or engines or processes that come and go."""

    def __init__(self, bench: Bench, flags: str) -> None:
        self._bench, self._flags = bench, flags
        self._engine: Engine | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> _Side:
        if not self._bench.is_limited and self._bench.num_warm_ups:
            self._engine = await self._stack.enter_async_context(self._opening())
            for number in range(self._bench.num_warm_ups):
                await self._bench.measured(self._engine, -1 - number)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def speeds(self, seed: int) -> Speeds:
        """Run once."""
        if self._bench.is_limited:
            return await asyncio.to_thread(self._bench.limited, self._flags, seed)
        if self._engine is not None:
            return await self._bench.measured(self._engine, seed)
        async with self._opening() as engine:
            return await self._bench.measured(engine, seed)

    def _opening(self) -> EngineContext:
        return Engine.open(self._bench.model, self._bench.config(self._flags))


async def find_best(bench: Bench, sets: tuple[str, ...], options: argparse.Namespace) -> list[Duel]:
    """Return the duel of each set, and behind them the last ones of the best for prompts and for answers."""
    end_s = time.monotonic() + options.seconds
    found: list[Duel] = []
    for flags in sets:
        if time.monotonic() > end_s:
            print(f"  out of time: {len(sets) - len(found)} sets were not tried")
            break
        duel = await bench.duel(flags, options.rounds)
        ratios = ", ".join(f"{phase} {duel.median(phase):.3f}" for phase in _PHASES)
        print(f"  {flags}: {ratios} ({len(duel.ratios['prompt'])} rounds)", flush=True)
        found.append(duel)
    best = {max(found, key=lambda duel: duel.median(phase)).flags for phase in _PHASES}
    return found + [
        await bench.duel(flags, options.last_rounds, until_clear=False) for flags in sorted(best)
    ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one phase of a model came to in a setting. share: of the best set's speed without flags, each pair's."""

    model: str
    setting: str
    phase: str
    best: str
    share: tuple[float, ...]
    num_sets: int
    without: tuple[float, ...]

    @property
    def median(self) -> float:
        """At most 1: where no set is faster, no flags is the best."""
        return min(1.0, statistics.median(self.share))

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        return {
            "model": self.model,
            "setting": self.setting,
            "phase": self.phase,
            "share": self.median,
            "best": self.best if self.median < 1 else NO_FLAGS,
            "shares": list(self.share),
            "num_sets": self.num_sets,
            "tokens_per_s": statistics.median(self.without),
        }


def outcomes(model: str, setting: str, num_sets: int, duels: list[Duel]) -> list[Outcome]:
    """Return each phase's outcome, from the last duels."""
    found = []
    for number, phase in enumerate(_PHASES):
        best = max(duels[num_sets:], key=lambda duel: duel.median(phase))
        share = tuple(1 / ratio for ratio in best.ratios[phase])
        without = tuple(pair[number] for pair in best.speeds["without"])
        found.append(Outcome(model, setting, phase, best.flags, share, num_sets, without))
    return found


async def measure(model: Path, options: argparse.Namespace) -> list[Outcome]:
    """Return the outcomes of one model in every setting that was asked for."""
    with open_model_file(model) as file:
        footprint = measure_footprint(file.tensors.values(), read_spec(file).router)
    settings = settings_for(footprint.experts_bytes, footprint.total_bytes)
    found = []
    for name in options.settings or settings:
        setting = settings[name]
        print(f"{model.stem}, {setting}:", flush=True)
        sets = setting.flag_sets(default_threads())[: options.sets]
        if setting.limit_bytes is None:
            fill_pages(model)
        try:
            duels = await find_best(Bench(model, setting, options), sets, options)
        except SystemExit as error:
            print(f"  left out: {error}")
            continue
        num_sets = len({duel.flags for duel in duels})
        found += outcomes(model.stem, str(setting), num_sets, duels)
    return found


def report(found: list[Outcome], routings: dict[str, str]) -> list[Row]:
    """Print the table; return the rows for the CSV."""
    lines, rows = [], []
    for one in found:
        best = one.best if one.median < 1 else NO_FLAGS
        lines.append((f"{one.model}, {one.setting}", one.phase, f"{one.median:.3f}", best))
        case, routing = f"{one.setting}, {one.phase}", routings[one.model]
        rows += [
            Row(_NAME, case, one.model, "share of the best", "ratio", one.share, best, routing),
            Row(_NAME, case, one.model, NO_FLAGS, "tokens/s", one.without, "", routing),
        ]
    print("", table(("", "", "share of the best", "best"), lines), "", sep="\n")
    return rows


def run(options: argparse.Namespace, models: list[Path]) -> int:
    """Measure; 1 if no flags lose more than a twentieth anywhere."""
    facts = describe_machine(default_threads())
    with ForeignLoad() as load:
        found = [each for model in models for each in asyncio.run(measure(model, options))]
    rows = report(found, {model.stem: routing_of(model) for model in models})
    for one in found:
        holds = one.median >= _LEAST_SHARE
        share = spread([min(1.0, value) for value in one.share], 3)
        print(f"{verdict(holds)}  {one.model}, {one.setting}, {one.phase}: {share} of {one.best}")
    print(load)
    facts["foreign_cores"] = f"{load.cores:.2f}"
    write_rows(options.out, rows, facts)
    if options.json is not None:
        body = {"facts": facts, "outcomes": [one.as_dict() for one in found]}
        options.json.write_text(json.dumps(body, indent=2) + "\n", "utf-8")
    return 0 if all(one.median >= _LEAST_SHARE for one in found) else 1


async def child(options: argparse.Namespace) -> None:
    """Run one request in this process, and print its speeds."""
    setting = Setting()
    bench = Bench(options.models[0], setting, options)
    async with Engine.open(options.models[0], setting.config(options.child)) as engine:
        print(json.dumps(await bench.measured(engine, options.seed)), flush=True)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("models", type=Path, nargs="*", metavar="MODEL.gguf|FOLDER")
    parser.add_argument("--settings", nargs="+", choices=tuple(settings_for(0, 0)), metavar="NAME", help=f"default: all of {', '.join(settings_for(0, 0))}")  # fmt: skip
    parser.add_argument("--prompt", type=int, default=640, metavar="TOKENS")
    parser.add_argument("--answer", type=int, default=32, metavar="TOKENS")
    parser.add_argument("--warm-ups", type=int, default=0, metavar="N")
    parser.add_argument("--rounds", type=int, default=4, help="pairs of each set, at most")
    parser.add_argument("--last-rounds", type=int, default=7, help="pairs of the best set")
    parser.add_argument("--sets", type=int, default=NUM_SETS, help="try only the first ones")
    parser.add_argument("--seconds", type=float, default=1e9, help="for the sets of each model and setting")  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS / "settings.csv")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there, too")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few sets: checks that all works, says nothing about speed")  # fmt: skip
    parser.add_argument("--child", metavar="FLAGS", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.models and not options.quick:
        parser.error("give models, or a folder of them: python -m benchmarks.synthetic_model writes one")  # fmt: skip
    return options


def _files(given: list[Path]) -> list[Path]:
    return [
        path
        for each in given
        for path in (sorted(each.glob("*.gguf")) if each.is_dir() else [each])
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for; the status is 1 if a requirement does not hold."""
    options = _parse(arguments)
    if options.child is not None:
        asyncio.run(child(options))
        return 0
    if not options.quick:
        return run(options, _files(options.models))
    quick = {"prompt": 24, "answer": 4, "rounds": 1, "last_rounds": 1, "sets": 2}
    vars(options).update(quick, settings=["cpu", "device-small-fast"])
    with tempfile.TemporaryDirectory() as folder:
        run(options, [write_model(Path(folder) / "tiny.gguf", "tiny")])
    return 0


if __name__ == "__main__":
    sys.exit(main())
