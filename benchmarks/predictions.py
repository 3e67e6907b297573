"""Does the cost model predict real runs out of this machine's own calibration? Usage
`python -m benchmarks.predictions MODEL.gguf [MODEL.gguf ...]`.

Every round calibrates and runs, one after the other, so that load of others falls on both; the ratio of each
round's prediction to its run counts, and the median of the rounds. Two cases for each model: all in memory, and
from disk, in a memory group that holds a part of the file (needs the right to make one: root; `--cases memory`
leaves it out). Nothing of a run goes into a prediction. From disk, a run with another prompt
tells how much memory the process itself takes, how often each expert is used, and how often by one token after another.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.larger_than_ram import Field, memory_group
from benchmarks.measure import (
    RESULTS,
    QuietRounds,
    Row,
    describe_machine,
    paired_ratios,
    spread,
    table,
    verdict,
    write_rows,
)
from benchmarks.model_options import add_patience
from benchmarks.routing_source import routing_of
from benchmarks.sides import EngineChild, Work
from benchmarks.synthetic_model import write_model
from thermocline.calibration.calibrate import calibrate
from thermocline.config import CpuConfig
from thermocline.costmodel.cost_model import Phase, Workload, estimate
from thermocline.costmodel.disk_costs import HostMemory
from thermocline.kernels.cache_format import CacheType
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import read_spec
from thermocline.models.sizes import measure_sizes
from thermocline.prefetch.governor_builder import spare_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from thermocline.costmodel.machine_speeds import MachineSpeeds
    from thermocline.models.sizes import ModelSizes

_NAME: Final = "predictions"
_MAX_ERROR: Final = 0.15


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a prompt and of its answer's tokens."""

    prefill: float
    decode: float


Rounds = list[tuple[Times, Times]]
"""Predicted and real times of each round."""


class Subject:
    """One model, its work, and what is predicted for it."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self.path, self._options = path, options
        with open_model_file(path) as file:
            spec = read_spec(file)
            self.sizes: ModelSizes = measure_sizes(file.tensors.values(), spec, CacheType.F16)

    def calibrate(self) -> MachineSpeeds:
        """Measure this machine with this model, every part once."""
        return calibrate(str(self.path), CpuConfig(threads=self._options.threads), rounds=1)

    def predict(
        self,
        speeds: MachineSpeeds,
        room_bytes: int | None,
        heat: Sequence[Sequence[int]] | None = None,
        repeats: Sequence[float] | None = None,
    ) -> Times:
        """Return the times of the work.

        room_bytes: what memory holds of the file, None for all of it; heat, repeats: as for `estimate`.
        """
        work, prompt, answer = self._options, None, None
        if room_bytes is not None:
            prompt, answer = HostMemory(room_bytes, 0), HostMemory(room_bytes, room_bytes)
        prefill = estimate(
            self.sizes,
            speeds,
            None,
            Workload(Phase.PREFILL, work.prompt, chunk_tokens=work.prompt),
            memory=prompt,
            heat=heat,
        )
        steps = (
            Workload(Phase.DECODE, 1, cached_tokens=work.prompt + n, steps_since_prompt=n)
            for n in range(work.decode)
        )
        decode_s = sum(
            estimate(
                self.sizes, speeds, None, step, memory=answer, heat=heat, repeats=repeats
            ).seconds
            for step in steps
        )
        return Times(prefill.seconds, decode_s)


def in_memory(
    subject: Subject, options: argparse.Namespace, rounds: QuietRounds
) -> Iterator[tuple[Times, Times]]:
    """Yield each round's predicted and real times, with the whole file in memory."""
    context = options.prompt + options.decode + 2
    for one in rounds:
        with one:
            predicted = subject.predict(subject.calibrate(), None)
            with EngineChild(subject.path, context, options.threads) as engine:
                # The first brings the file's pages into view.
                engine.ask(Work(options.prompt, options.decode, seed=0).as_request())
                answer = engine.ask(Work(options.prompt, options.decode, seed=1).as_request())
        if one.counts:
            yield predicted, Times(answer["prefill_s"], answer["decode_s"])


def from_disk(
    subject: Subject, options: argparse.Namespace, rounds: QuietRounds
) -> Iterator[tuple[Times, Times]]:
    """Yield each round's predicted and real times in a memory group, from an empty page cache.

    The answer is drawn, not greedy: greedy answers of random weights may repeat two tokens, and with them the
    experts, which then stay in memory. That is no workload's cost.
    """
    limit = round(subject.sizes.total * options.memory_share)
    field = Field(subject.path, Work(options.prompt, options.decode), options.threads)
    with memory_group(limit) as group:
        drawn = ("--temperature", "2")
        other = field.thermocline(group, *drawn, "--seed", "1")
        for one in rounds:
            with one:
                speeds = subject.calibrate()
                if speeds.disk is None:
                    raise SystemExit(f"{subject.path} stays in memory: give a file of its own")
                left = limit - other["anonymous_bytes"]
                room = left - spare_bytes(left)
                predicted = subject.predict(speeds, room, other["heat"], other["repeats"])
                answer = field.thermocline(group, *drawn)
            if one.counts:
                yield predicted, Times(answer["prefill_s"], answer["decode_s"])


def measure(case: str, rounds: Iterator[tuple[Times, Times]]) -> Rounds:
    """Run all rounds of a case, and say how each went."""
    found: Rounds = []
    for predicted, real in rounds:
        found.append((predicted, real))
        print(
            f"  {case}: prefill {predicted.prefill:.2f} / {real.prefill:.2f} s, "
            f"decode {predicted.decode:.2f} / {real.decode:.2f} s",
            flush=True,
        )
    return found


def report(
    case: str, routing: str, rounds: Rounds, options: argparse.Namespace
) -> tuple[list[Row], bool]:
    """Print the table; return the rows for the CSV, and whether both predictions hold."""
    rows, lines, all_hold = [], [], True
    for phase, count in (("prefill", options.prompt), ("decode", options.decode)):
        ours, theirs = (
            tuple(count / getattr(times, phase) for times in side)
            for side in zip(*rounds, strict=True)
        )
        ratios = paired_ratios(ours, theirs)
        holds = abs(statistics.median(ratios) - 1) <= _MAX_ERROR
        all_hold = all_hold and holds
        what = f"{phase} {count}"
        lines.append((what, spread(ours), spread(theirs), spread(ratios, 2), verdict(holds)))
        rows += [
            Row(_NAME, case, "predicted", what, "tokens/s", ours, "", routing),
            Row(_NAME, case, "real", what, "tokens/s", theirs, "", routing),
            Row(_NAME, case, "predicted/real", what, "ratio", ratios, "", routing),
        ]
    header = (
        f"{case}, {routing} routing",
        "predicted tokens/s",
        "real tokens/s",
        "ratio",
        "within 15 %",
    )
    print("", table(header, lines), "", sep="\n")
    return rows, all_hold


def run(options: argparse.Namespace, models: list[Path]) -> int:
    """Measure `models`, case by case; 1 if a prediction is off by more than 15 %."""
    facts = describe_machine(options.threads)
    known = {
        "memory": ("in memory", in_memory),
        "disk": (f"from disk, {options.memory_share:.0%} in memory", from_disk),
    }
    all_hold = True
    for subject in [Subject(model, options) for model in models]:
        for name, measured in map(known.__getitem__, options.cases):
            case = f"{subject.path.stem}, {name}"
            rounds = QuietRounds(options.rounds, patience=options.patience)
            found = measure(case, measured(subject, options, rounds))
            rows, holds = report(case, routing_of(subject.path), found, options)
            all_hold = all_hold and holds
            print(rounds)
            write_rows(options.out, rows, facts | rounds.facts())
    return 0 if all_hold else 1


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("models", type=Path, nargs="*", metavar="MODEL.gguf")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=256, metavar="TOKENS")
    parser.add_argument("--decode", type=int, default=16, metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=7)
    add_patience(parser)
    parser.add_argument("--memory-share", type=float, default=0.6, help="of the file, from disk")
    cases = ("memory", "disk")
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases)
    parser.add_argument("--out", type=Path, default=RESULTS / "predictions.csv")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few runs: checks that all works, says nothing about speed")  # fmt: skip
    options = parser.parse_args(arguments)
    if not options.models and not options.quick:
        parser.error("give models: python -m benchmarks.synthetic_model writes them")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for; the status is 1 if a prediction is off by more than 15 %."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    if not options.quick:
        return run(options, options.models)
    vars(options).update(prompt=16, decode=4, rounds=1, cases=["memory"])
    with tempfile.TemporaryDirectory() as folder:
        run(options, [write_model(Path(folder) / "tiny.gguf", "tiny")])
    return 0


if __name__ == "__main__":
    sys.exit(main())
