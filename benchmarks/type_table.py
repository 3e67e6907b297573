"""How fast does each block type multiply with each instruction set? Usage
`python -m benchmarks.type_table`.

One row of activations against a weight larger than any cache (GB/s of weights), and 128 rows against a
matrix of a usual size (GFLOP/s). The instruction sets take turns. Writes a CSV and a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks.kernel_calls import (
    available_sets,
    exact_rows,
    matmul,
    relative_error,
    supported_formats,
)
from benchmarks.measure import RESULTS, ForeignLoad, Row, describe_machine, table, write_rows
from benchmarks.synthetic_blocks import DRAWABLE, WeightSource
from thermocline.kernels.weight import Weight
from thermocline.modelfile.formats import FORMATS_BY_NAME

if TYPE_CHECKING:
    from thermocline.kernels.weight import FloatArray

_NAME: Final = "type_table"
_COLS: Final = 2048
_BATCH: Final = 128
_CHECKED_ROWS: Final = 64


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one type with one set: lists have one entry per round; errors are relative."""

    one_row_gb_s: list[float]
    batch_gflop_s: list[float]
    one_row_error: float
    batch_error: float


def make_weight(format_name: str, nbytes: int) -> Weight:
    """Return a weight of about `nbytes`."""
    form = FORMATS_BY_NAME[format_name]
    rows = max(_CHECKED_ROWS, nbytes // form.row_bytes(_COLS) // _CHECKED_ROWS * _CHECKED_ROWS)
    raw = WeightSource(3).matrix(format_name, format_name, rows, _COLS)
    return Weight(format_name, form, raw, _COLS)


def first_rows(weight: Weight, rows: int) -> Weight:
    """Return the top of `weight`."""
    return Weight(weight.name, weight.format, weight.raw[:rows], weight.cols)


def measure_type(format_name: str, options: argparse.Namespace) -> dict[str, Speed]:
    """Return the speeds of one type by instruction set, which take turns in each round."""
    weight = make_weight(format_name, options.bytes)
    batch_weight = first_rows(weight, min(weight.rows, options.batch_rows))
    x = np.random.default_rng(5).standard_normal((_BATCH, _COLS)).astype(np.float32)
    row = np.ascontiguousarray(x[:1])
    checked = first_rows(weight, _CHECKED_ROWS)
    exact = (x.astype(np.float64) @ exact_rows(checked).astype(np.float64).T).astype(np.float32)
    found = {}
    for isa in available_sets():
        one_error = relative_error(matmul(checked, row, isa, options.threads), exact[:1])
        found[isa] = Speed(
            [], [], one_error, relative_error(matmul(checked, x, isa, options.threads), exact)
        )
    for _ in range(options.rounds):
        for isa, speed in found.items():
            speed.one_row_gb_s.append(
                weight.nbytes * 1e-9 / _time(weight, row, isa, options.threads)
            )
            flop = 2.0 * _BATCH * _COLS * batch_weight.rows
            speed.batch_gflop_s.append(flop * 1e-9 / _time(batch_weight, x, isa, options.threads))
    return found


def _time(weight: Weight, x: FloatArray, isa: str, threads: int) -> float:
    start = time.perf_counter()
    matmul(weight, x, isa, threads)
    return time.perf_counter() - start


def run(options: argparse.Namespace) -> int:
    """Measure all types, print and write."""
    facts = describe_machine(options.threads)
    types = options.types or [name for name in supported_formats() if name in DRAWABLE]
    lines, rows = [], []
    with ForeignLoad() as load:
        for format_name in types:
            for isa, speed in measure_type(format_name, options).items():
                lines.append(
                    (
                        f"{format_name} {isa}",
                        f"{statistics.median(speed.one_row_gb_s):.1f}",
                        f"{statistics.median(speed.batch_gflop_s):.0f}",
                        f"{speed.one_row_error:.1e}",
                        f"{speed.batch_error:.1e}",
                    )
                )
                gemv, gemm = tuple(speed.one_row_gb_s), tuple(speed.batch_gflop_s)
                rows += [
                    Row(_NAME, format_name, isa, "1 row", "GB/s", gemv),
                    Row(_NAME, format_name, isa, f"{_BATCH} rows", "GFLOP/s", gemm),
                    Row(_NAME, format_name, isa, "1 row error", "", (speed.one_row_error,)),
                    Row(_NAME, format_name, isa, f"{_BATCH} rows error", "", (speed.batch_error,)),
                ]
    header = (
        "type, set",
        "1 row, GB/s",
        f"{_BATCH} rows, GFLOP/s",
        "error, 1 row",
        f"error, {_BATCH}",
    )
    text = table(header, lines)
    print(text, f"\n{load}", sep="\n")
    facts["foreign_cores"] = f"{load.cores:.2f}"
    write_rows(options.out, rows, facts)
    heading = f"{facts['cpu']}, {options.threads} threads, {facts['cpu_flags']}"
    page = f"{heading}: median of {options.rounds} rounds.\n\n{text}\n\nIn that time {load}.\n"
    options.markdown.parent.mkdir(parents=True, exist_ok=True)
    options.markdown.write_text(page, "utf-8")
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.type_table", description=__doc__)
    parser.add_argument(
        "--types", nargs="*", metavar="TYPE", help="default: all that are supported"
    )
    parser.add_argument("--threads", type=int, default=1, help="as the kernels are called: 1")
    parser.add_argument("--bytes", type=int, default=192 << 20, help="of the weight for one row")
    parser.add_argument("--batch-rows", type=int, default=4096, help="weight rows of the batch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu-types.csv")
    parser.add_argument("--markdown", type=Path, default=RESULTS / "cpu-types.md")
    parser.add_argument("--quick", action="store_true", help="small weights and few runs: checks that all works, says nothing about speed")  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    if options.quick:
        options.bytes, options.batch_rows, options.rounds = 1 << 18, 64, 2
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
