"""Does reading ahead pay where the model does not fit in memory, or is not there yet? Usage
`python -m benchmarks.larger_than_ram MODEL.gguf [--llama-python PYTHON]`.

Needs the right to make a memory group (root). The file's pages are dropped before every run, and every run
is a process of its own; all sides take turns. "reading" moves the same bytes and computes nothing,
"resident" computes with everything in memory: neither can be beaten, and prefetch is measured against the
larger of the two. llama.cpp runs in the same group. Before each run there the group's memory is filled with another
file's pages, as memory is that has been in use: of pages that a virtual machine's host must give back first,
each costs a processor microseconds, which "resident" and "reading" would not show.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.foresight import foresight
from benchmarks.measure import (
    RESULTS,
    ForeignLoad,
    Row,
    describe_machine,
    paired_ratios,
    spread,
    table,
    verdict,
    write_rows,
)
from benchmarks.routing_source import routing_of
from benchmarks.sides import Child, Work, llama_python
from benchmarks.synthetic_model import write_model
from thermocline.kernels.native import load_native

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NAME: Final = "larger_than_ram"
_ROOT: Final = Path(__file__).parents[1]
_MOUNT: Final = Path("/sys/fs/cgroup")
_MAX_SLOWDOWN, _MIN_GAIN, _MIN_LEAD = 1.15, 1.5, 2.0
# Child processes may take minutes to page a model through a small memory.
_LLAMA_UBATCH: Final = 2048

_SAMPLE_PAGES: Final = 1024

Runs = dict[str, list[dict[str, Any]]]


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Make a memory group of either version, and remove it at the end. SystemExit where that is denied."""
    is_legacy = (_MOUNT / "memory" / "memory.limit_in_bytes").exists()
    parent = _MOUNT / "memory" if is_legacy else _MOUNT
    group = parent / f"thermocline-{os.getpid()}"
    limit = "memory.limit_in_bytes" if is_legacy else "memory.max"
    try:
        if not is_legacy:
            (parent / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
    except OSError as error:
        raise SystemExit(
            f"no memory group can be made under {parent} ({error}): run this as root, on a machine or in a "
            "container whose cgroup folder is writable"
        ) from error
    try:
        (group / limit).write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()


def drop_pages(path: Path) -> None:
    """Take a file's pages out of memory. SystemExit if they stay, as they do while they are mapped."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mapping = np.memmap(path, np.uint8, "r")
    sample = np.linspace(0, len(mapping) - 1, _SAMPLE_PAGES, dtype=np.int64)
    if load_native().resident_pages(mapping, sample) > _SAMPLE_PAGES // 20:
        raise SystemExit(
            f"{path} stays in memory: another program has it open; give a file of its own"
        )


def fill_pages(path: Path) -> None:
    """Bring a file's pages into memory."""
    with path.open("rb", buffering=0) as file:
        while file.read(16 << 20):
            continue


def _entering(group: Path) -> list[str]:
    """Return the beginning of a command that runs in the group."""
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]


class Field:
    """Starts the sides: which model, how much work, in which group.

    filler: a file as large as the group's memory, which is filled with it; None leaves it empty.
    """

    def __init__(
        self,
        model: Path,
        work: Work,
        threads: int,
        *,
        isa: str = "auto",
        llama: str | None = None,
        filler: Path | None = None,
    ) -> None:
        """isa: thermocline's instruction set; llama: an interpreter that has llama_cpp."""
        self._model, self._work, self._threads = model, work, threads
        self._isa, self._llama, self._filler = isa, llama, filler

    def _prepare(self, group: Path | None) -> None:
        """Drop the model's pages, and fill the group."""
        drop_pages(self._model)
        if group is not None and self._filler is not None:
            drop_pages(self._filler)
            reading = [*_entering(group), "dd", f"if={self._filler}", "of=/dev/null", "bs=1M"]
            subprocess.run(reading, stderr=subprocess.DEVNULL, check=True)

    def thermocline(
        self, group: Path | None, *arguments: str, warm: bool = False
    ) -> dict[str, Any]:
        """Run `cold_side` once on dropped (or, `warm`, on resident) pages."""
        if warm:
            fill_pages(self._model)
        else:
            self._prepare(group)
        work = self._work
        command = [sys.executable, "-m", "benchmarks.cold_side", str(self._model.absolute())]
        command += ["--prompt", str(work.num_prompt), "--decode", str(work.num_decode)]
        command += ["--threads", str(self._threads), "--cpu-isa", self._isa, *arguments]
        command += [] if group is None else ["--group", str(group)]
        ran = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True)
        answer: dict[str, Any] = json.loads(ran.stdout)
        return answer

    def llama(self, group: Path) -> dict[str, Any]:
        """Run llama.cpp once in the group: its load touches few of the dropped pages."""
        self._prepare(group)
        script = Path(__file__).with_name("llama_side.py")
        side = [str(self._llama), str(script), str(self._model.absolute())]
        work = self._work
        request = work.as_request() | {
            "flash": True,
            "ubatch": min(_LLAMA_UBATCH, work.num_prompt),
            "context": -(-(work.num_prompt + work.num_decode + 1) // 256) * 256,
            "keep": False,
        }
        with Child([*_entering(group), *side, "--threads", str(self._threads)]) as child:
            return child.ask(request)


def measure(field: Field, group: Path, options: argparse.Namespace, *, has_llama: bool) -> Runs:
    """Run every side in turn, `repeats` times; in every other round in reverse."""
    sides = {
        "resident": lambda: field.thermocline(None, "--prefetch", "off", warm=True),
        "reading": lambda: field.thermocline(group, "--read"),
        "prefetch": lambda: field.thermocline(group, "--prefetch", "auto"),
        "no prefetch": lambda: field.thermocline(group, "--prefetch", "off"),
        "cold, reading": lambda: field.thermocline(None, "--read"),
        "cold, prefetch": lambda: field.thermocline(None, "--prefetch", "auto"),
        "cold, no prefetch": lambda: field.thermocline(None, "--prefetch", "off"),
    }
    if has_llama:
        sides["llama.cpp"] = lambda: field.llama(group)
    runs: Runs = {name: [] for name in sides}
    for index in range(options.repeats):
        for name in list(sides)[:: -1 if index % 2 else 1]:
            runs[name].append(answer := sides[name]())
            shown = {key: round(answer[key], 2) for key in answer if key.endswith("_s")}
            print(f"  round {index + 1}, {name}: {shown} {_gigabytes(answer)}", flush=True)
    return runs


def _times(runs: Runs, side: str, key: str) -> list[float]:
    return [run[key] for run in runs[side]]


def _gigabytes(answer: dict[str, Any]) -> str:
    found = answer.get("read_bytes")
    if found is None:
        return ""
    values = found if isinstance(found, list) else [found]
    return "read " + " + ".join(f"{value / 1e9:.2f}" for value in values) + " GB"


def report(runs: Runs, options: argparse.Namespace) -> tuple[list[Row], list[tuple[str, bool]]]:
    """Print the table; return the rows for the CSV and what was required, kept or not."""
    rows: list[Row] = []
    lines = []
    case = f"prompt {options.prompt}, limit {options.limit_mib} MiB"
    if options.cpu_isa != "auto":
        case += f", {options.cpu_isa}"
    for side in runs:
        if side.endswith("reading"):
            times = _times(runs, side, "read_s")
            rows.append(Row(_NAME, case, side, "reading", "s", tuple(times)))
            lines.append((side, spread(times, 2), "", "", ""))
            continue
        prefill, decode = _times(runs, side, "prefill_s"), _times(runs, side, "decode_s")
        speeds = tuple(options.decode / each for each in decode)
        read = [run.get("read_bytes", [0, 0]) for run in runs[side]]
        rows += [
            Row(_NAME, case, side, "prefill", "s", tuple(prefill)),
            Row(_NAME, case, side, f"decode {options.decode}", "tokens/s", speeds),
            Row(_NAME, case, side, "prefill read", "bytes", tuple(float(r[0]) for r in read)),
            Row(_NAME, case, side, "decode read", "bytes", tuple(float(r[1]) for r in read)),
        ]
        volume = " + ".join(f"{statistics.median(r[n] for r in read) / 1e9:.2f}" for n in (0, 1))
        tokens = spread([options.prompt / each for each in prefill])
        lines.append((side, spread(prefill, 2), tokens, spread(speeds), volume))
    header = ("median (lowest to highest)", "prefill s", "tokens/s", "decode tokens/s", "GB read")
    print("", table(header, lines), "", sep="\n")
    return rows, _required(runs, case, rows)


def _required(runs: Runs, case: str, rows: list[Row]) -> list[tuple[str, bool]]:
    def ratio(name: str, ours: Sequence[float], theirs: Sequence[float]) -> float:
        values = paired_ratios(ours, theirs)
        rows.append(Row(_NAME, case, "ratio", name, "x", values))
        print(f"{name}: {spread(values, 2)}")
        return statistics.median(values)

    compute = _times(runs, "resident", "prefill_s")
    found = []
    for prefix in ("", "cold, "):
        reading = _times(runs, f"{prefix}reading", "read_s")
        bound = [max(pair) for pair in zip(compute, reading, strict=True)]
        taken = _times(runs, f"{prefix}prefetch", "prefill_s")
        slowdown = ratio(f"{prefix}prefill over the larger of reading and compute", taken, bound)
        found.append((f"{prefix}prefill at most {_MAX_SLOWDOWN} of it", slowdown <= _MAX_SLOWDOWN))
    ours, plain = (_times(runs, side, "prefill_s") for side in ("prefetch", "no prefetch"))
    gain = ratio("prefill without prefetch over with", plain, ours)
    found.append((f"prefetch gains {_MIN_GAIN} x in prefill", gain >= _MIN_GAIN))
    ours, plain = (_times(runs, side, "decode_s") for side in ("prefetch", "no prefetch"))
    gain = ratio("decode without prefetch over with", plain, ours)
    found.append(("prefetch gains in decode", gain > 1.0))
    if "llama.cpp" in runs:
        theirs = _times(runs, "llama.cpp", "prefill_s")
        lead = ratio(
            "prefill of llama.cpp over ours", theirs, _times(runs, "prefetch", "prefill_s")
        )
        found.append((f"{_MIN_LEAD} x llama.cpp in prefill", lead >= _MIN_LEAD))
        theirs = _times(runs, "llama.cpp", "decode_s")
        ratio("decode of llama.cpp over ours", theirs, _times(runs, "prefetch", "decode_s"))
    tokens = [run["tokens"] for side in runs for run in runs[side] if "tokens" in run]
    found.append(("equal tokens in every run", all(each == tokens[0] for each in tokens)))
    return found


def run(options: argparse.Namespace, model: Path) -> int:
    """Measure `model`; 1 if a requirement does not hold."""
    facts = describe_machine(options.threads)
    llama = llama_python(options.llama_python)
    if llama is None:
        print("llama.cpp is left out: no interpreter with llama_cpp (--llama-python names one)")
    with (
        memory_group(options.limit_mib << 20) as group,
        tempfile.NamedTemporaryFile(dir=model.parent) as filler,
        ForeignLoad() as load,
    ):
        for _ in range(options.limit_mib):
            filler.write(bytes(1 << 20))
        filler.flush()
        work = Work(options.prompt, options.decode)
        field = Field(
            *(model, work, options.threads),
            isa=options.cpu_isa,
            llama=llama,
            filler=Path(filler.name),
        )
        runs = measure(field, group, options, has_llama=llama is not None)
    rows, required = report(runs, options)
    rows = [replace(row, routing=routing_of(model)) for row in rows]
    # What the experts of the smaller memory are: about six tenths of it, of experts of 3 MB.
    room = (options.limit_mib << 20) * 6 // 10 // (3 << 20)
    case, cold = f"decode {options.decode}, limit {options.limit_mib} MiB", runs["prefetch"]
    rows += foresight(_NAME, case, cold, room, routing_of(model))
    for what, holds in required:
        print(f"{verdict(holds)}  {what}")
    print(load)
    facts["foreign_cores"] = f"{load.cores:.2f}"
    write_rows(options.out, rows, facts)
    return 0 if all(holds for _, holds in required) else 1


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL.gguf", help="default: a synthetic one, written for the run (3.5 GB)")  # fmt: skip
    parser.add_argument("--llama-python", metavar="PYTHON")
    parser.add_argument("--limit-mib", type=int, default=2048, metavar="MIB", help="memory of the group")  # fmt: skip
    parser.add_argument("--prompt", type=int, default=2048, metavar="TOKENS")
    parser.add_argument("--decode", type=int, default=16, metavar="TOKENS")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-isa", default="auto", metavar="SET", help="instruction set of thermocline's kernels")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "larger-than-ram.csv")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for; the status is 1 if a requirement does not hold."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    if options.model is not None and options.model.exists():
        return run(options, options.model)
    if options.model is not None:
        return run(options, write_model(options.model, "qwen3-30b-a3b", layers=8))
    with tempfile.TemporaryDirectory() as folder:
        return run(options, write_model(Path(folder) / "8.gguf", "qwen3-30b-a3b", layers=8))


if __name__ == "__main__":
    sys.exit(main())
