"""How long do `info`, `plan` and opening take on published models, and how much memory? Usage
`python -m benchmarks.published_models`.

Each model's file has its whole header and a hole for its weights. Every look is a process of its own, timed from its
start; its memory is what no other process shares, without the map of the file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

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
from benchmarks.memory import peak_anonymous
from benchmarks.published_models.first_look import CONTEXT_TOKENS
from benchmarks.published_models.sparse_gguf import write_sparse
from benchmarks.published_models.table import MODELS

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAME: Final = "published models"
_MAX_S: Final = 3.0
_MAX_PRIVATE_BYTES: Final = 300 << 20
_QUICK: Final = "OLMoE-1B-7B"
_VRAM: Final = ("8GiB", "12GiB", "16GiB", "24GiB")

Look = tuple[str, tuple[str, ...]]
"""A case's name, and the arguments of `first_look` without the model."""


def looks(vram: Sequence[str] = _VRAM) -> list[Look]:
    """Return what is looked at. Plans leave this machine's speeds out, which are measured once per file."""
    plans = [
        (
            f"plan --vram {size}",
            ("plan", "--vram", size, "--ctx", str(CONTEXT_TOKENS), "--no-measure"),
        )
        for size in vram
    ]
    return [("info", ("info",)), *plans, (f"open, context {CONTEXT_TOKENS}", ("open",))]


def look(model: Path, arguments: Sequence[str], cache: Path) -> dict[str, float]:
    """Return what one look took: time_s, cpu_s, private_bytes at its end, and peak_bytes of anonymous memory."""
    command, *flags = arguments
    start = time.monotonic()
    program = [sys.executable, "-m", "benchmarks.published_models.first_look"]
    with subprocess.Popen(
        [*program, str(start), command, str(model), *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(cache),
    ) as child:
        assert child.stdout is not None
        with peak_anonymous(child.pid) as peak:
            line = child.stdout.readline()
        child.communicate()
    if child.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)} of {model.name} failed, see above")
    found: dict[str, float] = json.loads(line)
    return found | {"peak_bytes": peak.value}


def _environment(cache: Path) -> dict[str, str]:
    """Compiled modules are kept, as an installation has them; nothing is known of the user's models."""
    own = {"THERMOCLINE_CACHE": os.fspath(cache), "PYTHONPYCACHEPREFIX": os.fspath(cache / "pyc")}
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return inherited | own


def run(options: argparse.Namespace, folder: Path) -> int:
    """Look at every model; 1 if a requirement does not hold."""
    facts = describe_machine(1)
    rows, cells, is_good = [], [], True
    names = [_QUICK] if options.quick else list(MODELS)
    with ForeignLoad() as load:
        for name in names:
            model = write_sparse(folder / f"{name}.gguf", MODELS[name])
            for case, arguments in looks(_VRAM[:1] if options.quick else _VRAM):
                if name == names[0] and not options.quick:
                    look(model, arguments, folder)  # compiles the modules
                found = [look(model, arguments, folder) for _ in range(options.repetitions)]
                found_rows = [
                    Row(_NAME, f"{name}, {case}", "thermocline", metric, unit, values)
                    for metric, unit, values in (
                        ("time", "s", tuple(one["time_s"] for one in found)),
                        ("processor", "s", tuple(one["cpu_s"] for one in found)),
                        ("private memory", "bytes", tuple(one["private_bytes"] for one in found)),
                        ("anonymous peak", "bytes", tuple(one["peak_bytes"] for one in found)),
                    )
                ]
                times, cpu, private, peak = found_rows
                fits = max(*private.values, *peak.values) < _MAX_PRIVATE_BYTES
                passed = times.median < _MAX_S and fits
                is_good &= passed
                rows += found_rows
                memory = f"{private.median / 2**20:.0f}", f"{peak.median / 2**20:.0f}"
                cells.append(
                    (
                        name,
                        case,
                        spread(times.values, 2),
                        f"{cpu.median:.2f}",
                        *memory,
                        verdict(passed),
                    )
                )
            model.unlink()
    header = ("model", "look", "s", "processor s", "private MiB", "peak MiB", "")
    print(table(header, cells))
    print(f"required: under {_MAX_S} s and {_MAX_PRIVATE_BYTES >> 20} MiB each", load, sep="\n")
    facts["foreign_cores"] = f"{load.cores:.2f}"
    write_rows(options.out, rows, facts)
    return 0 if is_good or options.quick else 1


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for; the status is 1 if a requirement does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published_models", description=__doc__
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "published-models.csv")
    parser.add_argument("--quick", action="store_true", help="one model, one plan")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if options.quick:
        options.repetitions = 1
    with tempfile.TemporaryDirectory() as folder:
        return run(options, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
