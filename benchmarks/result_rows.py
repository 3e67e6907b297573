"""Which measured rows may be quoted: runs of the CSV files under docs/results, newest first.

A run is what one call of a benchmark wrote. It may be quoted if other programs left the processor alone, by the
benchmarks' own limit, and if it was taken at a commit without local changes. Where a virtual clock was read it does
not matter what other programs did. Knows no page and no wording.
"""

from __future__ import annotations

import csv
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.measure import MAX_FOREIGN_CORES, spread

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

NOT_MEASURED: Final = "not measured"

_OF_A_ROW: Final = frozenset(
    ("benchmark", "case", "side", "metric", "unit", "median", "values", "note", "routing")
)
# In the order in which a reader of a processor's name wants them.
_FLAGS: Final = (
    (("avx512_vnni",), "AVX-512 VNNI"),
    (("avx512f",), "AVX-512"),
    (("avx_vnni",), "AVX-VNNI"),
    (("avx2",), "AVX2"),
    (("i8mm",), "NEON with i8mm"),
    (("asimd",), "NEON"),
)
_EXTRAS: Final = (("avx512_bf16", "BF16"), ("amx_int8", "AMX"))


@dataclass(frozen=True, slots=True)
class Quantity:
    """Repetitions of one measured quantity. In a format: ".1" the median, ".1s" with lowest and highest behind it."""

    values: tuple[float, ...]
    note: str = ""

    @property
    def median(self) -> float:
        """The middle of the repetitions."""
        return statistics.median(self.values)

    def scaled(self, factor: float) -> Quantity:
        """Return it in another unit."""
        return Quantity(tuple(value * factor for value in self.values), self.note)

    def __format__(self, form: str) -> str:
        if form == "note":
            return self.note
        digits = int(form.rstrip("s").lstrip(".") or 1)
        if form.endswith("s") and len(self.values) > 1:
            return spread(self.values, digits)
        return f"{self.median:.{digits}f}"


@dataclass(frozen=True, slots=True)
class Pick:
    """One row of a run. note, routing: None stands for any; scale: into the unit that is shown."""

    case: str
    side: str
    metric: str
    note: str | None = None
    routing: str | None = None
    scale: float = 1.0

    def of(self, run: Run) -> Quantity | None:
        """Return the row's quantity, None if the run has none."""
        found = [row for row in run.rows if self._takes(row)]
        if not found:
            return None
        values = tuple(float(value) * self.scale for value in found[0]["values"].split())
        return Quantity(values, found[0]["note"])

    def _takes(self, row: Mapping[str, str]) -> bool:
        return (
            (row["case"], row["side"], row["metric"]) == (self.case, self.side, self.metric)
            and self.note in (None, row["note"])
            and self.routing in (None, row.get("routing") or "")
        )


@dataclass(frozen=True, slots=True)
class Over:
    """The quotient of two medians of one run."""

    above: Pick
    below: Pick
    scale: float = 1.0

    def of(self, run: Run) -> Quantity | None:
        """Return the quotient, None if the run lacks a row of the two."""
        above, below = self.above.of(run), self.below.of(run)
        if above is None or below is None or not below.median:
            return None
        return Quantity((above.median / below.median * self.scale,))


@dataclass(frozen=True, slots=True)
class Run:
    """The rows that one call of a benchmark wrote, and what all of them share: machine, commit, time."""

    rows: tuple[Mapping[str, str], ...]
    facts: Mapping[str, str]

    @property
    def refusal(self) -> str:
        """Why nothing of it may be quoted; "" if it may."""
        commit = self.facts.get("commit", "")
        if not commit or commit == "unknown" or commit.endswith("-dirty"):
            return f"commit {commit or 'unknown'}"
        if disturbed := self._disturbed():
            return disturbed
        if len({_identity(row) for row in self.rows}) < len(self.rows):
            return "several runs that can not be told apart"
        return ""

    def _disturbed(self) -> str:
        if self.facts.get("clock") == "virtual":
            return ""
        foreign = self.facts.get("foreign_cores", "")
        if not foreign:
            return "nobody looked at other programs"
        if float(foreign) > MAX_FOREIGN_CORES:
            return f"disturbed: other programs used {foreign} cores"
        return ""

    @property
    def origin(self) -> str:
        """Day and commit."""
        return f"{self.facts['taken'][:10]}, {self.facts['commit']}"

    @property
    def machine(self) -> str:
        """Processor, cores, threads used, memory and instruction sets."""
        facts = self.facts
        flags = set(facts.get("cpu_flags", "").split())
        sets = next((name for needs, name in _FLAGS if flags.issuperset(needs)), "no vector units")
        extras = [name for flag, name in _EXTRAS if flag in flags]
        with_extras = " + ".join((sets, *extras))
        return f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, {with_extras}"


def read_runs(path: Path) -> list[Run]:
    """Return the file's runs, newest first; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    grouped: dict[tuple[tuple[str, str], ...], list[Mapping[str, str]]] = {}
    for row in rows:
        facts = tuple((name, text) for name, text in row.items() if name not in _OF_A_ROW)
        grouped.setdefault(facts, []).append(row)
    runs = [Run(tuple(of), dict(facts)) for facts, of in grouped.items()]
    # Later in the file is newer where the minute is the same.
    runs.reverse()
    return sorted(runs, key=lambda run: run.facts.get("taken", ""), reverse=True)


def quotable(runs: Sequence[Run]) -> Iterator[Run]:
    """Yield the runs that may be quoted, newest first."""
    return (run for run in runs if not run.refusal)


def _identity(row: Mapping[str, str]) -> tuple[str, ...]:
    names = ("benchmark", "case", "side", "metric", "unit", "note", "routing")
    return tuple(row.get(name) or "" for name in names)
