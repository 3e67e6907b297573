"""Is thermocline faster than llama.cpp on the same file, threads and machine? Usage
`python -m benchmarks.against_llama MODEL.gguf --llama-python PYTHON`.

First llama.cpp's settings are measured against each other, for each phase: weights repacked or not, flash attention on
or off, micro-batches of 512 and 2048. Each is a row of the file, with the speed that it had. Then thermocline and
llama.cpp at its best run in turn, each in a process of its own that stays alive, and every pair gives a ratio. The
memory's read bandwidth is measured beside each pair. Shorter: `--tune-repeats 1 --repeats 3`, and `--contexts 0`
leaves out the tokens behind 8192 others.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.bandwidth import BUFFER_BYTES, BandwidthProbe
from benchmarks.engine_side import bytes_per_token
from benchmarks.measure import (
    ForeignLoad,
    Row,
    describe_machine,
    paired_ratios,
    spread,
    table,
    write_rows,
)
from benchmarks.model_options import model_parser, parse
from benchmarks.sides import (
    EngineChild,
    LlamaChild,
    LlamaSettings,
    Speeds,
    Work,
    every_setting,
    llama_python,
)
from benchmarks.synthetic_model import write_model

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME: Final = "against_llama"
# A setting so much slower than the best one is tried once, and not as often as the others.
_HOPELESS: Final = 1.5
# Behind so many tokens a pair takes long, since thermocline computes the prompt again.
_DEEP_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True)
class Phase:
    """What is timed: reading a prompt, or writing tokens behind a context of num_prompt."""

    name: str
    work: Work
    is_decode: bool

    def speed(self, speeds: Speeds) -> float:
        """Tokens per second of the half that this phase is about."""
        return speeds.decode if self.is_decode else speeds.prefill


class LlamaFleet:
    """llama.cpp with and without repacked weights, each loaded when it is first asked."""

    def __init__(self, python: str, model: Path, threads: int, stack: ExitStack) -> None:
        self._python, self._model, self._threads, self._stack = python, model, threads, stack
        self._children: dict[bool, LlamaChild] = {}
        self._states = Path(stack.enter_context(tempfile.TemporaryDirectory()))

    def run(self, phase: Phase, settings: LlamaSettings) -> float:
        """Return tokens per second of `phase`."""
        child = self.child(settings.repack)
        keep = phase.is_decode
        states = self._states if keep else None
        return phase.speed(child.run(phase.work, settings, keep_prompt=keep, states=states))

    def child(self, repack: bool) -> LlamaChild:
        """Return the process with weights repacked or not."""
        if repack not in self._children:
            made = LlamaChild(self._python, self._model, self._threads, repack=repack)
            self._children[repack] = self._stack.enter_context(made)
        return self._children[repack]


def phases_of(options: argparse.Namespace) -> list[Phase]:
    """Return what is to be measured, shorter work first."""
    prompts = [Phase(f"prefill {p}", Work(p, 0), False) for p in sorted(options.prefill)]
    decodes = [
        Phase(f"decode at {c}", Work(max(1, c), options.decode), True)
        for c in sorted(options.contexts)
    ]
    return [*prompts, *decodes]


def tune(
    fleet: LlamaFleet, phases: list[Phase], settings: tuple[LlamaSettings, ...], repeats: int
) -> dict[str, dict[LlamaSettings, list[float]]]:
    """Return the speeds of every setting for every phase, the settings in turn in each repetition.

    All are tried once; one that is far behind is not tried again. Only a batch longer than the work is left out, since
    it changes nothing.
    """
    found: dict[str, dict[LlamaSettings, list[float]]] = {}
    smallest = min(setting.ubatch for setting in settings)
    for phase in phases:
        longest = smallest if phase.is_decode else max(smallest, phase.work.num_prompt)
        speeds: dict[LlamaSettings, list[float]] = {
            setting: [] for setting in settings if setting.ubatch <= longest
        }
        for _ in range(repeats):
            best = max((max(values, default=0.0) for values in speeds.values()), default=0.0)
            for setting, values in speeds.items():
                if values and max(values) * _HOPELESS < best:
                    continue
                values.append(fleet.run(phase, setting))
                print(f"  {phase.name}, {setting}: {values[-1]:.1f} tokens/s", flush=True)
        found[phase.name] = speeds
    return found


def best_settings(
    tuned: Mapping[str, Mapping[LlamaSettings, list[float]]],
) -> dict[str, LlamaSettings]:
    """Return the setting of each phase with the fastest run: other programs only ever slow one down."""
    return {
        name: max(speeds, key=lambda setting: max(speeds[setting]))
        for name, speeds in tuned.items()
    }


@dataclass(frozen=True, slots=True)
class Pairs:
    """One phase: tokens per second of both sides and GB/s, an entry per pair."""

    phase: Phase
    settings: LlamaSettings
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    bandwidth: tuple[float, ...]


def measure_pairs(
    engine: EngineChild,
    fleet: LlamaFleet,
    best: Mapping[str, LlamaSettings],
    phases: list[Phase],
    options: argparse.Namespace,
) -> list[Pairs]:
    """Run both sides in turn, all phases in each round; who begins changes with every round."""
    probe = BandwidthProbe(options.threads, options.bandwidth_bytes)
    ours: dict[str, list[float]] = {phase.name: [] for phase in phases}
    theirs: dict[str, list[float]] = {phase.name: [] for phase in phases}
    bandwidth: dict[str, list[float]] = {phase.name: [] for phase in phases}
    for index in range(options.repeats):
        for phase in phases:
            name = phase.name
            if index >= options.deep_repeats and phase.work.num_prompt >= _DEEP_TOKENS:
                continue
            if index % 2:
                theirs[name].append(fleet.run(phase, best[name]))
            ours[name].append(phase.speed(engine.run(phase.work)))
            bandwidth[name].append(probe.measure())
            if not index % 2:
                theirs[name].append(fleet.run(phase, best[name]))
            ratio = ours[name][-1] / theirs[name][-1]
            done = f"round {index + 1} of {options.repeats}, {name}"
            print(f"  {done}: {ratio:.2f} x llama.cpp", flush=True)
    return [
        Pairs(phase, best[phase.name], *(tuple(of[phase.name]) for of in (ours, theirs, bandwidth)))
        for phase in phases
    ]


def report(measured: list[Pairs], token_bytes: int, isa: str = "auto") -> tuple[str, list[Row]]:
    """Return the tables for a reader and the rows for the CSV. isa: what thermocline was told."""
    ours = "" if isa == "auto" else f"--cpu-isa {isa}"
    lines, rows = [], []
    for pairs in measured:
        ratios = paired_ratios(pairs.ours, pairs.theirs)
        phase, note = pairs.phase.name, str(pairs.settings)
        of_medians = statistics.median(pairs.ours) / statistics.median(pairs.theirs)
        of_fastest = max(pairs.ours) / max(pairs.theirs)
        shares = tuple(
            speed * token_bytes * 1e-9 / gb_s * 100
            for speed, gb_s in zip(pairs.ours, pairs.bandwidth, strict=True)
        )
        lines.append(
            (
                phase,
                spread(pairs.ours),
                spread(pairs.theirs),
                f"{of_medians:.2f}",
                f"{of_fastest:.2f}",
                spread(ratios, 2),
                spread(shares, 0) if pairs.phase.is_decode else "",
            )
        )
        rows += [
            Row(_NAME, phase, "thermocline", "speed", "tokens/s", pairs.ours, ours),
            Row(_NAME, phase, "llama.cpp", "speed", "tokens/s", pairs.theirs, note),
            Row(_NAME, phase, "ratio", "speed", "x", ratios, note),
            Row(_NAME, phase, "memory", "read bandwidth", "GB/s", pairs.bandwidth),
        ]
        if pairs.phase.is_decode:
            rows.append(Row(_NAME, phase, "thermocline", "bandwidth reached", "%", shares))
    header = (
        "tokens/s: median (lowest to highest)",
        "thermocline",
        "llama.cpp",
        "ratio of medians",
        "of the fastest",
        "of each pair",
        "% of read bandwidth",
    )
    return table(header, lines), rows


def loss_lines(measured: list[Pairs]) -> list[str]:
    """Return what a longer context costs each side, relative to the shortest one."""
    decodes = [pairs for pairs in measured if pairs.phase.is_decode]
    lines = []
    for pairs in decodes[1:]:
        ours = statistics.median(pairs.ours) / statistics.median(decodes[0].ours)
        theirs = statistics.median(pairs.theirs) / statistics.median(decodes[0].theirs)
        kept = f"thermocline keeps {ours:.1%} of its speed, llama.cpp {theirs:.1%}"
        lines.append(f"{pairs.phase.name}, against {decodes[0].phase.name}: {kept}")
    return lines


def show_tuning(
    tuned: Mapping[str, Mapping[LlamaSettings, list[float]]], best: Mapping[str, LlamaSettings]
) -> list[Row]:
    """Print llama.cpp's speed in every setting and return it as rows."""
    rows = []
    lines = []
    for name, speeds in tuned.items():
        for setting, values in speeds.items():
            mark = "best" if best[name] == setting else ""
            lines.append((f"{name}: {setting}", spread(values), mark))
            rows.append(
                Row(
                    _NAME,
                    name,
                    "llama.cpp",
                    "speed, tuning",
                    "tokens/s",
                    tuple(values),
                    str(setting),
                )
            )
    print("", table(("llama.cpp, tokens/s", "median (lowest to highest)", ""), lines), "", sep="\n")
    return rows


def run(options: argparse.Namespace, model: Path, python: str | None) -> int:
    """Measure `model` and print; without llama.cpp, only thermocline's side of it."""
    phases = phases_of(options)
    facts = describe_machine(options.threads)
    token_bytes = bytes_per_token(model)
    print(f"{model.name}: a token reads {token_bytes / 1e9:.3f} GB; {facts['cpu']}")
    with ExitStack() as stack, ForeignLoad() as load:
        if python is None:
            raise SystemExit(
                "no interpreter with llama_cpp: give --llama-python (scripts/oracle_env.sh makes one)"
            )
        fleet = LlamaFleet(python, model, options.threads, stack)
        facts["versions"] += f" llama-cpp-python={fleet.child(False).facts['version']}"
        repacks = (False,) if options.no_repack else (False, True)
        if not options.no_repack:
            repacked_mib = fleet.child(True).facts["repacked_mib"]
            facts["repacked_mib"] = f"{repacked_mib:.0f}"
            print(f"llama.cpp repacks {repacked_mib:.0f} MiB of this file")
        tuned = tune(fleet, phases, every_setting(repacks, options.ubatches), options.tune_repeats)
        best = best_settings(tuned)
        rows = show_tuning(tuned, best)
        if not options.tune_only:
            context = max(phase.work.num_prompt + phase.work.num_decode for phase in phases) + 1
            child = EngineChild(model, context, options.threads, options.cpu_isa)
            engine = stack.enter_context(child)
            engine.run(Work(min(16, context // 2), 2))
            measured = measure_pairs(engine, fleet, best, phases, options)
            text, more = report(measured, token_bytes, options.cpu_isa)
            print("", text, *loss_lines(measured), sep="\n")
            rows += more
    print(f"\n{load}")
    facts["foreign_cores"] = f"{load.cores:.2f}"
    write_rows(options.out, rows, facts)
    print(f"rows appended to {options.out}")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = model_parser("against_llama", __doc__, "against-llama.csv")
    parser.add_argument("--llama-python", metavar="PYTHON", help="an interpreter with llama_cpp (or $THERMOCLINE_LLAMA_PYTHON)")  # fmt: skip
    parser.add_argument("--cpu-isa", default="auto", help="thermocline's instruction set; compare with a llama.cpp built for the same (scripts/oracle_env.sh --avx2 DIR)")  # fmt: skip
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048], metavar="TOKENS")
    parser.add_argument("--decode", type=int, default=32, metavar="TOKENS")
    parser.add_argument("--contexts", type=int, nargs="*", default=[0, 8192], metavar="TOKENS", help="decode behind so many tokens (0 stands for the one that must be there)")  # fmt: skip
    parser.add_argument("--ubatches", type=int, nargs="*", default=[512, 2048], metavar="TOKENS")
    parser.add_argument("--no-repack", action="store_true", help="do not try repacked weights, which need memory for a second copy")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=7, help="pairs per phase")
    parser.add_argument("--deep-repeats", type=int, default=3, help="pairs behind 4096 tokens and more, at most")  # fmt: skip
    parser.add_argument("--tune-repeats", type=int, default=3, help="runs per setting of llama.cpp")
    parser.add_argument("--tune-only", action="store_true", help="only find llama.cpp's best")
    parser.add_argument("--bandwidth-bytes", type=int, default=BUFFER_BYTES, help=argparse.SUPPRESS)
    return parse(parser, arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for."""
    options = _parse(arguments)
    python = llama_python(options.llama_python)
    if not options.quick:
        return run(options, options.model, python)
    options.prefill, options.decode, options.contexts = [16], 4, [0, 32]
    options.ubatches, options.repeats, options.tune_repeats = [512], 2, 1
    options.bandwidth_bytes = 32 << 20
    with tempfile.TemporaryDirectory() as folder:
        return run(options, write_model(Path(folder) / "tiny.gguf", "tiny"), python)


if __name__ == "__main__":
    sys.exit(main())
