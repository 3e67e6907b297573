"""Is a layer of experts faster than KTransformers' from the same GGUF blocks? Usage
`python -m benchmarks.against_kt --kt-python PYTHON`, with an interpreter that has `kt-kernel` (`make bench-kt` makes one).

The shapes are those of Qwen3-30B-A3B, the weights and tokens those of `benchmarks.moe_layer`. Both sides compute the same
layers in turn, so that no weights stay in a cache, and take turns themselves. KTransformers is asked with each number of
threads, and the faster one counts in each case. Both outputs are compared with the exact one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks.kernel_calls import exact_layer, relative_error, run_layer
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
from benchmarks.moe_layer import make_layers, make_tokens
from benchmarks.sides import Child
from benchmarks.synthetic_model import SHAPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.kernel_calls import LayerWeights, Routed
    from benchmarks.synthetic_model import Shape

_NAME: Final = "against_kt"
_OURS: Final = "thermocline"
_NUM_CHECKED: Final = 2
MOST_TOKENS: Final = 512
_SETTLE_S: Final = 0.2  # kt-kernel's threads spin for a while after a job


def write_layers(folder: Path, layers: Sequence[LayerWeights], shape: Shape) -> None:
    """Write what the child reads."""
    for index, layer in enumerate(layers):
        for name in ("gate", "up", "down"):
            np.save(folder / f"{index}-{name}.npy", getattr(layer, name))
    kinds = zip(("gate", "up", "down"), layers[0].formats, strict=True)
    facts = {
        "experts": shape.experts,
        "used": shape.used,
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
        "layers": len(layers),
        "most_tokens": MOST_TOKENS,
        "types": {name: int(form.type_id) for name, form in kinds},
    }
    (folder / "shape.json").write_text(json.dumps(facts))


class Sides:
    """Runs one layer on either side. folder: for what goes to the children and back."""

    def __init__(
        self, layers: Sequence[LayerWeights], folder: Path, children: dict[str, Child], threads: int
    ) -> None:
        self._layers, self._folder, self._children = layers, folder, children
        self._threads = threads

    @property
    def names(self) -> tuple[str, ...]:
        """All sides, ours first."""
        return (_OURS, *self._children)

    def run(
        self, side: str, tokens: Routed, order: Sequence[int]
    ) -> tuple[list[float], np.ndarray]:
        """Compute the layers of `order` in turn: milliseconds of each, and the last one's outputs [tokens, hidden]."""
        time.sleep(_SETTLE_S)
        if side == _OURS:
            took, out = [], np.zeros_like(tokens.x)
            for layer in order:
                start = time.perf_counter()
                out = run_layer(
                    self._layers[layer], tokens.x, tokens.expert_ids, tokens.weights, self._threads
                )
                took.append((time.perf_counter() - start) * 1e3)
            return took, out
        request = {
            name: str(self._folder / f"{name}.npy") for name in ("x", "ids", "weights", "out")
        }
        np.save(request["x"], tokens.x)
        np.save(request["ids"], tokens.expert_ids)
        np.save(request["weights"], tokens.weights)
        answer = self._children[side].ask({**request, "layers": list(order)})
        return answer["ms"], np.load(request["out"])


def measure(
    sides: Sides, tokens: Routed, counts: Sequence[int], rounds: int, num_layers: int
) -> dict[tuple[int, str], list[float]]:
    """Return milliseconds by tokens and side; the sides take turns, in every other round in reverse."""
    times: dict[tuple[int, str], list[float]] = {(c, s): [] for c in counts for s in sides.names}
    for index in range(rounds + 1):
        for count in counts:
            start = index * count % (len(tokens.x) - count + 1)
            part = tokens.take(np.arange(start, start + count, dtype=np.int32))
            for side in sides.names[:: -1 if index % 2 else 1]:
                # Behind a pause the first calls take longer, on either side.
                took, _ = sides.run(side, part, [*range(num_layers)] * 3)
                if index > 0:
                    times[count, side].append(statistics.median(took[num_layers:]))
    return times


def errors(sides: Sides, layer: LayerWeights, tokens: Routed, count: int) -> dict[str, float]:
    """Return each side's relative error for the first tokens of a prompt of `count`."""
    part = tokens.take(np.arange(count, dtype=np.int32))
    few = min(_NUM_CHECKED, count)
    exact = exact_layer(layer, part.x[:few], part.expert_ids[:few], part.weights[:few])
    return {s: relative_error(sides.run(s, part, [0])[1][:few], exact) for s in sides.names}


def report(
    times: dict[tuple[int, str], list[float]], error: dict[int, dict[str, float]], note: str
) -> tuple[list[Row], bool]:
    """Print the table; return its rows, and whether no case is slower than theirs."""
    rows, lines, faster = [], [], True
    for count, by_side in error.items():
        ours = times[count, _OURS]
        theirs = [side for side in by_side if side != _OURS]
        best = min(theirs, key=lambda side: statistics.median(times[count, side]))
        ratios = paired_ratios(times[count, best], ours)
        faster &= statistics.median(ratios) >= 1.0
        case = f"{count} tokens"
        for side, wrong in by_side.items():
            rows.append(Row(_NAME, case, side, "time", "ms", tuple(times[count, side]), note))
            rows.append(Row(_NAME, case, side, "relative error", "", (wrong,), note))
        rows.append(Row(_NAME, case, "ratio", f"time of {best} over ours", "x", ratios, note))
        errors_shown = (f"{by_side[_OURS]:.4f}", f"{by_side[best]:.4f}")
        lines.append(
            (
                case,
                spread(ours, 2),
                spread(times[count, best], 2),
                best,
                spread(ratios, 2),
                *errors_shown,
            )
        )
    header = (
        "one layer",
        "ms",
        "theirs, ms",
        "their best",
        "times as fast",
        "error",
        "their error",
    )
    print(table(header, lines), end="\n\n")
    return rows, faster


def run(options: argparse.Namespace) -> int:
    """Measure and print; 1 if a case is slower than theirs."""
    shape, counts = SHAPES["qwen3-30b-a3b"], sorted(options.tokens)
    layers = make_layers("qwen3-30b-a3b", (options.type, options.down_type), options.layers)
    tokens = make_tokens("qwen3-30b-a3b", max(counts) * 2, 0.0)
    facts = describe_machine(options.threads)
    script = str(Path(__file__).with_name("kt_side.py"))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
        write_layers(folder, layers, shape)
        load = stack.enter_context(ForeignLoad())
        children = {}
        for threads in sorted({1, options.threads}):
            command = [options.kt_python, script, str(folder), "--threads", str(threads)]
            side = f"kt-kernel, {threads} threads"
            children[side] = stack.enter_context(Child(command))
            facts["kt_kernel"] = "{version} ({variant})".format(**children[side].facts)
        sides = Sides(layers, folder, children, options.threads)
        error = {count: errors(sides, layers[0], tokens, count) for count in counts}
        times = measure(sides, tokens, counts, options.rounds, len(layers))
    note = f"{options.type} with {options.down_type} down"
    print(f"kt-kernel {facts['kt_kernel']}, {note}")
    rows, faster = report(times, error, note)
    print(f"{verdict(faster)}  no number of tokens is slower than with kt-kernel")
    print(load)
    facts["foreign_cores"] = f"{load.cores:.2f}"
    write_rows(options.out, rows, facts)
    return 0 if faster else 1


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("--kt-python", default=os.environ.get("THERMOCLINE_KT_PYTHON"), metavar="PYTHON", help="interpreter with kt-kernel (default: THERMOCLINE_KT_PYTHON)")  # fmt: skip
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 64, 512], metavar="N", help=f"at most {MOST_TOKENS} each")  # fmt: skip
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument("--layers", type=int, default=3, metavar="N", help="distinct layers used in turn, of 0.4 GB on each side")  # fmt: skip
    parser.add_argument("--type", default="Q4_K", help="type of gate and up")
    parser.add_argument("--down-type", default="Q6_K")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--folder", type=Path, help="for the weights' files (default: a temporary one)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS / "against-kt.csv")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for; the status is 1 if a case is slower than theirs."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    if not all(1 <= count <= MOST_TOKENS for count in options.tokens):
        raise SystemExit(f"--tokens: 1 to {MOST_TOKENS} each, which the child makes room for")
    if not options.kt_python:
        raise SystemExit(
            "say which interpreter has kt-kernel: --kt-python PYTHON, or `make bench-kt`"
        )
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
