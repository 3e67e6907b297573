"""What the command lines of benchmarks over one model share: the model, the threads, the file, --quick."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measure import RESULTS
from benchmarks.synthetic_model import write_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def model_parser(name: str, description: str | None, out: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all of them have. out: the file below docs/results."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL.gguf")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / out)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few runs: checks that all works, says nothing about speed")  # fmt: skip
    return parser


def add_patience(parser: argparse.ArgumentParser) -> None:
    """Let the user say how often rounds that others disturbed are repeated."""
    parser.add_argument(
        "--patience", type=float, default=3.0, metavar="TIMES",
        help="take up to so many disturbed rounds again for each that counts",
    )  # fmt: skip


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the given or the process's arguments; a model is needed unless --quick."""
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if options.model is None and not options.quick:
        parser.error("give a model: python -m benchmarks.synthetic_model writes one")
    return options


def run_on_model(
    options: argparse.Namespace,
    quick: Mapping[str, object],
    run: Callable[[argparse.Namespace, Path], int],
) -> int:
    """Return `run`'s status; with --quick its options are `quick`, its model tiny, and its status 0."""
    if not options.quick:
        return run(options, options.model)
    vars(options).update(quick)
    with tempfile.TemporaryDirectory() as folder:
        run(options, write_model(Path(folder) / "tiny.gguf", "tiny"))
    return 0
