"""How fast does each block type multiply with each instruction set? Usage
`python -m benchmarks.type_table`.

One row of activations against a weight larger than any cache (GB/s of weights, and of what this machine
reads), and some rows against a matrix of a usual size (GFLOP/s). The instruction sets take turns. Writes a
CSV and a Markdown table.
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

from benchmarks.bandwidth import BUFFER_BYTES, BandwidthProbe
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
    from collections.abc import Iterator, Sequence

    from thermocline.kernels.weight import FloatArray

_NAME: Final = "type_table"
_USUAL_COLS: Final = 2048
_CHECKED_ROWS: Final = 64


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one type and row length with one set: lists have one entry per round; errors are relative."""

    one_row_gb_s: list[float]
    batch_gflop_s: list[float]
    one_row_error: float
    batch_error: float


def make_weight(format_name: str, cols: int, nbytes: int) -> Weight:
    """Return a weight of about `nbytes` with rows of `cols`."""
    form = FORMATS_BY_NAME[format_name]
    rows = max(_CHECKED_ROWS, nbytes // form.row_bytes(cols) // _CHECKED_ROWS * _CHECKED_ROWS)
    raw = WeightSource(3).matrix(format_name, format_name, rows, cols)
    return Weight(format_name, form, raw, cols)


def first_rows(weight: Weight, rows: int) -> Weight:
    """Return the top of `weight`."""
    return Weight(weight.name, weight.format, weight.raw[:rows], weight.cols)


def measure_type(
    format_name: str, cols: int, probe: BandwidthProbe, options: argparse.Namespace
) -> tuple[dict[str, Speed], float]:
    """Return the speeds of one type by instruction set, which take turns in each round, and the read bandwidth in GB/s."""
    weight = make_weight(format_name, cols, options.bytes)
    batch_weight = first_rows(weight, min(weight.rows, options.batch_rows))
    x = np.random.default_rng(5).standard_normal((options.batch, cols)).astype(np.float32)
    row = np.ascontiguousarray(x[:1])
    checked = first_rows(weight, _CHECKED_ROWS)
    exact = (x.astype(np.float64) @ exact_rows(checked).astype(np.float64).T).astype(np.float32)
    found = {}
    for isa in options.sets or available_sets():
        one_error = relative_error(matmul(checked, row, isa, options.threads), exact[:1])
        found[isa] = Speed(
            [], [], one_error, relative_error(matmul(checked, x, isa, options.threads), exact)
        )
    bandwidth = []
    for _ in range(options.rounds):
        bandwidth.append(probe.measure())
        for isa, speed in found.items():
            speed.one_row_gb_s.append(
                weight.nbytes * 1e-9 / _time(weight, row, isa, options.threads)
            )
            flop = 2.0 * options.batch * cols * batch_weight.rows
            speed.batch_gflop_s.append(flop * 1e-9 / _time(batch_weight, x, isa, options.threads))
    return found, statistics.median(bandwidth)


def _time(weight: Weight, x: FloatArray, isa: str, threads: int) -> float:
    start = time.perf_counter()
    matmul(weight, x, isa, threads)
    return time.perf_counter() - start


def run(options: argparse.Namespace) -> int:
    """Measure all types, print and write."""
    facts = describe_machine(options.threads)
    types = options.types or [name for name in supported_formats() if name in DRAWABLE]
    probe = BandwidthProbe(options.threads, options.probe_bytes)
    lines, rows = [], []
    with ForeignLoad() as load:
        for format_name, cols in _cases(types, options.cols):
            case = format_name if cols == _USUAL_COLS else f"{format_name} x {cols}"
            found, bandwidth = measure_type(format_name, cols, probe, options)
            for isa, speed in found.items():
                gb_s = statistics.median(speed.one_row_gb_s)
                lines.append(
                    (
                        f"{case} {isa}",
                        f"{gb_s:.1f}",
                        f"{gb_s / bandwidth:.0%}",
                        f"{statistics.median(speed.batch_gflop_s):.0f}",
                        f"{speed.one_row_error:.1e}",
                        f"{speed.batch_error:.1e}",
                    )
                )
                gemv, gemm = tuple(speed.one_row_gb_s), tuple(speed.batch_gflop_s)
                batch = f"{options.batch} rows"
                rows += [
                    Row(_NAME, case, isa, "1 row", "GB/s", gemv),
                    Row(_NAME, case, isa, "1 row of read bandwidth", "", (gb_s / bandwidth,)),
                    Row(_NAME, case, isa, batch, "GFLOP/s", gemm),
                    Row(_NAME, case, isa, "1 row error", "", (speed.one_row_error,)),
                    Row(_NAME, case, isa, f"{batch} error", "", (speed.batch_error,)),
                ]
    header = (
        "type, set",
        "1 row, GB/s",
        "of read bandwidth",
        f"{options.batch} rows, GFLOP/s",
        "error, 1 row",
        f"error, {options.batch}",
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


def _cases(types: Sequence[str], widths: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield each type with each row length that its blocks divide."""
    for name in types:
        for cols in widths:
            if cols % FORMATS_BY_NAME[name].block_elements == 0:
                yield name, cols


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.type_table", description=__doc__)
    parser.add_argument(
        "--types", nargs="*", metavar="TYPE", help="default: all that are supported"
    )
    parser.add_argument(
        "--cols",
        type=int,
        nargs="*",
        default=[_USUAL_COLS],
        help="row lengths; types whose blocks do not fit one are left out",
    )
    parser.add_argument("--sets", nargs="*", metavar="SET", help="default: all of this machine")
    parser.add_argument("--batch", type=int, default=128, help="rows of activations")
    parser.add_argument("--threads", type=int, default=1, help="as the kernels are called: 1")
    parser.add_argument("--bytes", type=int, default=192 << 20, help="of the weight for one row")
    parser.add_argument("--batch-rows", type=int, default=4096, help="weight rows of the batch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu-types.csv")
    parser.add_argument("--markdown", type=Path, default=RESULTS / "cpu-types.md")
    parser.add_argument(
        "--probe-bytes", type=int, default=BUFFER_BYTES, help="read to measure the bandwidth"
    )
    parser.add_argument("--quick", action="store_true", help="small weights and few runs: checks that all works, says nothing about speed")  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    if options.quick:
        options.bytes, options.batch_rows, options.rounds = 1 << 18, 64, 2
        options.probe_bytes = 1 << 20
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
