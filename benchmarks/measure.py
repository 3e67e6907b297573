"""What every benchmark does with its numbers: medians, paired ratios, tables, CSV rows with machine facts.

Knows no engine, no kernel and no model.
"""

from __future__ import annotations

import csv
import math
import os
import platform
import secrets
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import psutil

from thermocline.machine import machine_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

RESULTS: Final = Path(__file__).parents[1] / "docs" / "results"
MAX_FOREIGN_CORES: Final = 0.1
"""Other programs' use of the processor beyond which a figure is marked as disturbed."""

_WRITTEN: Final = (":!docs/results", ":!docs/benchmarks.md", ":!README.md")

_CPU_FLAGS: Final = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vbmi",
    "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One measured quantity: `values` are the repetitions, in the order in which they were taken.

    case: what was asked ("prefill 512"); side: who computed it; note: the setting that it ran with; routing: where the
    experts' choices came from, "" where that does not matter (`benchmarks/routing_source.py`).
    """

    benchmark: str
    case: str
    side: str
    metric: str
    unit: str
    values: tuple[float, ...]
    note: str = ""
    routing: str = ""

    @property
    def median(self) -> float:
        """The middle of the repetitions."""
        return statistics.median(self.values)


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, ...]:
    """Return ours / theirs of each pair; the two of a pair were measured next to each other."""
    return tuple(a / b for a, b in zip(ours, theirs, strict=True))


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return "median (lowest to highest)"."""
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def verdict(passed: bool) -> str:
    """Return the word for a requirement that was checked."""
    return "pass" if passed else "FAIL"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table whose columns line up; the first column is text, the others numbers."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        first, *others = zip(row, widths, strict=True)
        parts = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
        return f"| {' | '.join(parts)} |"

    rule = f"|{'|'.join('-' * (width + 2) if index == 0 else '-' * (width + 1) + ':' for index, width in enumerate(widths))}|"
    return "\n".join([line(cells[0]), rule, *(line(row) for row in cells[1:])])


def describe_machine(threads: int) -> dict[str, str]:
    """Return what a figure depends on besides its case, as columns for the CSV. run: tells this call from others."""
    facts = machine_facts()
    versions = facts.versions | _versions("nanobind")
    return {
        "run": secrets.token_hex(4),
        "taken": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "commit": _commit(),
        "cpu": facts.cpu,
        "cores": str(facts.num_usable_cores),
        "threads": str(threads),
        "memory_gib": f"{facts.memory_bytes / 2**30:.1f}",
        "cpu_flags": " ".join(cpu_flags()),
        "system": facts.system,
        "versions": " ".join(f"{name}={number}" for name, number in sorted(versions.items())),
        "python": platform.python_version(),
    }


def cpu_flags() -> tuple[str, ...]:
    """Return the instruction sets of this processor that matter to kernels."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            found = set(value.split())
            return tuple(flag for flag in _CPU_FLAGS if flag in found)
    return ()


def conclude(
    out: Path,
    rows: Sequence[Row],
    facts: dict[str, str],
    load: ForeignLoad,
    verdicts: Sequence[tuple[str, bool]],
) -> int:
    """Print each requirement's verdict, write the rows; return 1 if a requirement does not hold."""
    for text, holds in verdicts:
        print(f"{verdict(holds)}  {text}")
    print(load)
    write_rows(out, rows, facts | {"foreign_cores": f"{load.cores:.2f}"})
    return 0 if all(holds for _, holds in verdicts) else 1


def write_rows(path: Path, rows: Sequence[Row], facts: dict[str, str]) -> None:
    """Append `rows` to the CSV at `path`. Columns that it did not have are empty in its earlier rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, str]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            found = list(csv.DictReader(file))
    for row in rows:
        found.append(
            {
                "benchmark": row.benchmark,
                "case": row.case,
                "side": row.side,
                "metric": row.metric,
                "unit": row.unit,
                "median": f"{row.median:.6g}",
                "values": " ".join(f"{value:.6g}" for value in row.values),
                "note": row.note,
                **({"routing": row.routing} if row.routing else {}),
                **facts,
            }
        )
    header = list(dict.fromkeys(name for row in found for name in row))
    whole = path.with_name(path.name + ".new")
    with whole.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, header, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    whole.replace(path)


class ForeignLoad:
    """How many cores' worth of work other programs did meanwhile: `with ForeignLoad() as load: ...`.

    A hypervisor's stolen time counts as foreign. 0 where the system does not tell.
    """

    def __init__(self) -> None:
        self.cores = 0.0
        self._start = self._busy = self._own = 0.0

    def __enter__(self) -> Self:
        self._start, self._busy, self._own = time.perf_counter(), _busy_s(), _own_s()
        return self

    def __exit__(self, *_error: object) -> None:
        elapsed = time.perf_counter() - self._start
        foreign = (_busy_s() - self._busy) - (_own_s() - self._own)
        self.cores = max(0.0, foreign / elapsed) if elapsed > 0 else 0.0

    def __str__(self) -> str:
        return describe_load(self.cores)


class Peak:
    """The most that `look` returned while the context is entered; a thread looks every so many seconds."""

    def __init__(self, look: Callable[[], int], every_s: float) -> None:
        self._look, self._every_s = look, every_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak")
        self.value = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.value = max(self.value, self._look())
            if self._end.wait(self._every_s):
                return


@dataclass(slots=True)
class Round:
    """One round of `QuietRounds`: what is measured runs inside `with round:`.

    counts: afterwards, whether its figures are to be kept.
    """

    number: int
    load: ForeignLoad
    counts: bool
    _keep_all: bool

    def __enter__(self) -> None:
        self.load.__enter__()

    def __exit__(self, *error: object) -> None:
        self.load.__exit__(*error)
        if self.load.cores > MAX_FOREIGN_CORES and not self._keep_all:
            self.counts = False


class QuietRounds:
    """Rounds until `count` of them passed beside which other programs left the processor alone.

    `for one in rounds: with one: ...; if one.counts: ...`. The first `warm_ups` never count, and have negative
    numbers. After `patience * count` disturbed ones every round counts, and the text of this object says so:
    a machine that is never idle gets figures, marked.
    """

    def __init__(self, count: int, *, warm_ups: int = 1, patience: float = 3.0) -> None:
        self._count, self._warm_ups = count, warm_ups
        self._max_disturbed = math.ceil(patience * count)
        self.num_disturbed = 0
        self._loads: list[float] = []

    def __iter__(self) -> Iterator[Round]:
        for number in range(-self._warm_ups, 0):
            yield Round(number, ForeignLoad(), counts=False, _keep_all=True)
        while len(self._loads) < self._count:
            given_up = self.num_disturbed >= self._max_disturbed
            one = Round(len(self._loads), ForeignLoad(), counts=True, _keep_all=given_up)
            yield one
            if one.counts:
                self._loads.append(one.load.cores)
            else:
                self.num_disturbed += 1

    @property
    def cores(self) -> float:
        """The mean of what other programs used beside the rounds that count."""
        return statistics.fmean(self._loads) if self._loads else 0.0

    def facts(self) -> dict[str, str]:
        """Return the columns of the CSV that tell how quiet it was."""
        return {
            "foreign_cores": f"{self.cores:.2f}",
            "disturbed_rounds": str(self.num_disturbed),
        }

    def __str__(self) -> str:
        again = (
            f"; {self.num_disturbed} disturbed rounds do not count" if self.num_disturbed else ""
        )
        return f"{describe_load(self.cores)}{again}"


def describe_load(cores: float) -> str:
    """Return what is said of so many cores that other programs used."""
    mark = "" if cores <= MAX_FOREIGN_CORES else " - DISTURBED, measure again when idle"
    return f"other programs used {cores:.2f} cores meanwhile{mark}"


def _busy_s() -> float:
    """Processor seconds that the whole machine has worked, stolen time included."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Linux counts a guest's time in user and nice already.
    doubled = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return float(sum(times) - idle - doubled)


def _own_s() -> float:
    """Processor seconds of this process and of every child, living or ended."""
    me = psutil.Process()
    ended = me.cpu_times()
    total = ended.user + ended.system + ended.children_user + ended.children_system
    for child in me.children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return float(total)


def _versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit(root: Path = RESULTS.parents[1]) -> str:
    """Return the commit, with "-dirty" behind it where tracked files differ.

    Not those that benchmarks and `make results` write: what one benchmark found changes nothing of the next one.
    """
    try:
        commit = _git(root, "describe", "--always")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", *_WRITTEN)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit}-dirty" if changed else commit


def _git(root: Path, *arguments: str) -> str:
    ran = subprocess.run(
        ["git", *arguments],
        cwd=root, capture_output=True, text=True, check=True, timeout=10,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
    )  # fmt: skip
    return ran.stdout.strip()
