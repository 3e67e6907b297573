"""How much memory of its own does a big model need, and how fast does it open? Usage
`python -m benchmarks.memory MODEL.gguf`.

For the 48-layer file of `synthetic_model --layers 48`. The engine runs in a child process, whose anonymous
memory (what is not the page cache of the file) is sampled while it fills its context and decodes.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.engine_side import bytes_per_token
from benchmarks.measure import ForeignLoad, Peak, Row, describe_machine, verdict, write_rows
from benchmarks.model_options import model_parser, parse, run_on_model
from benchmarks.sides import EngineChild, Work

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

_NAME: Final = "memory"
_MAX_OPEN_S: Final = 3.0
_MAX_ANONYMOUS_BYTES: Final = 3 << 29  # 1.5 GiB
_SAMPLE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes of a process that are in memory: its own, and of mapped files."""

    anonymous: int
    file: int


def resident(pid: int) -> Resident:
    """Read what the system says of process `pid` now."""
    fields: Mapping[str, str] = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    shmem = int(fields["RssShmem"].split()[0])
    anonymous, file = int(fields["RssAnon"].split()[0]), int(fields["RssFile"].split()[0])
    return Resident((anonymous + shmem) << 10, file << 10)


def peak_anonymous(pid: int) -> Peak:
    """Return what samples the anonymous memory of process `pid`, in bytes, while it is entered."""
    return Peak(lambda: resident(pid).anonymous, _SAMPLE_S)


def run(options: argparse.Namespace, model: Path) -> int:
    """Measure `model`; 1 if a requirement does not hold."""
    facts = describe_machine(options.threads)
    num_prompt = options.prompt or options.context - options.decode - 1
    start = time.perf_counter()
    with ForeignLoad() as load, EngineChild(model, options.context, options.threads) as engine:
        process_s = time.perf_counter() - start
        open_s = float(engine.facts["open_s"])
        opened = resident(engine.pid)
        with peak_anonymous(engine.pid) as peak:
            answer = engine.ask(Work(num_prompt, options.decode).as_request())
        filled = resident(engine.pid)
    speeds = (num_prompt / answer["prefill_s"], options.decode / answer["decode_s"])
    size = model.stat().st_size
    print(
        f"{model.name}: {size / 2**30:.2f} GiB, a token reads {bytes_per_token(model) / 1e9:.2f} GB"
    )
    print(f"open: {open_s:.2f} s, with the interpreter's start {process_s:.2f} s")
    print(
        f"anonymous memory: {opened.anonymous / 2**20:.0f} MiB opened, {peak.value / 2**20:.0f} at most"
    )
    print(f"of the file in this process's view at the end: {filled.file / 2**30:.2f} GiB")
    print(f"pages read from the disk meanwhile: {answer['major_faults']}")
    print(f"prompt of {num_prompt}: {speeds[0]:.1f} tokens/s; then {speeds[1]:.1f} tokens/s")
    opens, fits = open_s < _MAX_OPEN_S, peak.value < _MAX_ANONYMOUS_BYTES
    print(f"{verdict(opens)}  opens in under {_MAX_OPEN_S} s")
    print(
        f"{verdict(fits)}  anonymous memory under {_MAX_ANONYMOUS_BYTES / 2**30} GiB",
        load,
        sep="\n",
    )
    case = f"{size / 1e9:.1f} GB, context {options.context}"
    quantities = (
        ("open", "s", open_s),
        ("anonymous memory, opened", "bytes", opened.anonymous),
        ("anonymous memory, peak", "bytes", peak.value),
        ("major faults", "", answer["major_faults"]),
        (f"prefill {num_prompt}", "tokens/s", speeds[0]),
        (f"decode {options.decode}", "tokens/s", speeds[1]),
    )
    rows = [
        Row(_NAME, case, "thermocline", metric, unit, (float(value),))
        for metric, unit, value in quantities
    ]
    facts["foreign_cores"] = f"{load.cores:.2f}"
    write_rows(options.out, rows, facts)
    return 0 if opens and fits else 1


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for; the status is 1 if a requirement does not hold."""
    parser = model_parser(_NAME, __doc__, "memory.csv")
    parser.add_argument("--context", type=int, default=4096, metavar="TOKENS")
    parser.add_argument("--prompt", type=int, metavar="TOKENS", help="default: fills the context")
    parser.add_argument("--decode", type=int, default=32, metavar="TOKENS")
    return run_on_model(parse(parser, arguments), {"context": 64, "decode": 8}, run)


if __name__ == "__main__":
    sys.exit(main())
