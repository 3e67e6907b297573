"""Writes the figures of README.md and docs/benchmarks.md from the CSV files: usage `python -m benchmarks.results`.

What stands between `<!-- results: NAME -->` and `<!-- end -->` belongs to this program; `--check` changes nothing and
fails where a page says something else than the files. Each figure is of the newest run that may be quoted and has all
rows of the figure's line (`result_rows`); where there is none the page says "not measured", which is no error.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.measure import RESULTS, table
from benchmarks.result_rows import NOT_MEASURED, quotable, read_runs
from benchmarks.result_tables import PAGES, Line, Sentence, Settings, Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.result_rows import Quantity, Run
    from benchmarks.result_tables import Entry

_ROOT: Final = Path(__file__).parents[1]
_BLOCK: Final = re.compile(r"(<!-- results: (?P<name>[\w-]+) -->)(?P<text>.*?)(<!-- end -->)", re.S)
_OPENING: Final = re.compile(r"<!-- results: ([\w-]+) -->")
_WIDTH: Final = 118


class PageError(Exception):
    """A page has a block that no entry belongs to, an entry without its block, or a block without an end."""


class Writer:
    """Renders entries from the CSV files of one folder. missing: block and label of what was not measured."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[str, list[Run]] = {}
        self.missing: list[str] = []

    def text_of(self, name: str, entries: Mapping[str, Entry]) -> str:
        """Return what stands between an entry's markers."""
        before = len(self.missing)
        text = self._text(entries[name])
        self.missing[before:] = [f"{name}: {label}" for label in self.missing[before:]]
        return text

    def _text(self, entry: Entry) -> str:
        match entry:
            case Table():
                return f"\n\n{self._table(entry)}\n\n"
            case Settings():
                return f"\n\n{self._settings(entry)}\n\n"
            case Sentence():
                words = textwrap.fill(
                    self._sentence(entry), _WIDTH, initial_indent="  ", subsequent_indent="  ",
                    break_long_words=False, break_on_hyphens=False,
                )  # fmt: skip
                return f"\n{words}\n  "

    def _find(self, line: Line | Sentence) -> tuple[Run, dict[str, Quantity]] | None:
        """Return the newest run that has all of a line's rows, and they."""
        for run in quotable(self._runs_of(line.file)):
            found = {name: pick.of(run) for name, pick in line.picks.items()}
            complete = {name: each for name, each in found.items() if each is not None}
            if len(complete) == len(found) and all(need.of(run) for need in line.needs):
                return run, complete
        return None

    def _runs_of(self, name: str) -> list[Run]:
        if name not in self._runs:
            self._runs[name] = read_runs(self._folder / f"{name}.csv")
        return self._runs[name]

    def _table(self, entry: Table) -> str:
        machines: dict[str, str] = {}
        rows = []
        for line in entry.lines:
            found = self._find(line)
            if found is None:
                self.missing.append(line.label)
                rows.append((line.label, *_unfilled(line.cells), ""))
                continue
            run, quantities = found
            letter = machines.setdefault(run.machine, chr(ord("A") + len(machines)))
            cells = (_filled(cell, quantities) for cell in line.cells)
            rows.append((line.label, *cells, f"{run.origin}, {letter}"))
        text = table((*entry.header, "taken"), rows)
        return "\n\n".join((text, *([_legend(machines)] if machines else [])))

    def _settings(self, entry: Settings) -> str:
        """Return every tried setting of the run that the line is quoted from, by case; the best ones bold."""
        found = self._find(entry.line)
        if found is None:
            self.missing.append(entry.line.label)
            return f"The settings that were tried: {NOT_MEASURED}."
        run, _ = found
        rows = [row for row in run.rows if row["metric"] == entry.metric]
        cases = list(dict.fromkeys(row["case"] for row in rows))
        best = {
            case: max(_fastest(row["values"]) for row in rows if row["case"] == case)
            for case in cases
        }
        speeds = {(row["note"], row["case"]): _fastest(row["values"]) for row in rows}
        lines = []
        for note in dict.fromkeys(row["note"] for row in rows):
            cells = []
            for case in cases:
                speed = speeds.get((note, case))
                text = "" if speed is None else f"{speed:.1f}"
                cells.append(f"**{text}**" if speed == best[case] else text)
            lines.append((note, *cells))
        legend = f"Fastest run of each, {run.origin}: {run.machine}."
        return f"{table((entry.header, *cases), lines)}\n\n{legend}"

    def _sentence(self, entry: Sentence) -> str:
        found = self._find(entry)
        if found is None:
            self.missing.append(entry.label)
            return entry.otherwise
        run, quantities = found
        return f"{_filled(entry.text, quantities)} ({run.machine}; {run.origin})."


def render(page: str, entries: Mapping[str, Entry], writer: Writer) -> str:
    """Return the page with its blocks written anew. Raises PageError."""
    names = _OPENING.findall(page)
    blocks = [match["name"] for match in _BLOCK.finditer(page)]
    if names != blocks:
        raise PageError(f"a block has no end: {names} begin, and {blocks} end")
    if sorted(names) != sorted(entries):
        raise PageError(f"blocks {sorted(names)} and entries {sorted(entries)} do not match")
    return _BLOCK.sub(
        lambda match: match[1] + writer.text_of(match["name"], entries) + match[4], page
    )


def _unfilled(cells: Sequence[str]) -> list[str]:
    """Return what needs no figure, and in the place of the first figure that there is none."""
    first = next(index for index, cell in enumerate(cells) if "{" in cell)
    return [
        NOT_MEASURED if index == first else "" if "{" in cell else cell
        for index, cell in enumerate(cells)
    ]


def _filled(template: str, quantities: Mapping[str, Quantity]) -> str:
    return template.format_map(dict(quantities))


def _fastest(values: str) -> float:
    return max(float(value) for value in values.split())


def _legend(machines: Mapping[str, str]) -> str:
    return "Machines: " + "; ".join(f"{letter}: {name}" for name, letter in machines.items()) + "."


def main(
    arguments: Sequence[str] | None = None,
    *,
    pages: Mapping[str, Mapping[str, Entry]] = PAGES,
) -> int:
    """Write or check the pages; the status is 1 if a checked page differs, 2 if a page's blocks are wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if a page differs")
    parser.add_argument("--root", type=Path, default=_ROOT, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, default=RESULTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    writer = Writer(options.results)
    differ = []
    for name, entries in pages.items():
        path = options.root / name
        page = path.read_text("utf-8")
        try:
            written = render(page, entries, writer)
        except PageError as error:
            print(f"{name}: {error}")
            return 2
        if written != page:
            differ.append(name)
            if not options.check:
                path.write_text(written, "utf-8")
    for label in dict.fromkeys(writer.missing):
        print(f"{NOT_MEASURED}: {label}")
    for name in differ:
        print(
            f"{name} {'is not what the files say: run make results' if options.check else 'written'}"
        )
    return 1 if options.check and differ else 0


if __name__ == "__main__":
    sys.exit(main())
