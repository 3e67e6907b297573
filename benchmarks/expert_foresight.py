"""Which experts does a router foresee, by routing? Usage `python -m benchmarks.expert_foresight [MODEL.gguf ...]`.

Decodes with prefetch on, and counts for each layer how many of the selected experts were predicted a layer or two
before, beside what the recently used ones and an offline optimum reach. Without models: the demo model on prose, and
two generated ones of its size, with even and with skewed routers. A prediction that comes too late is none, so that a
busy machine foresees less: rounds that others disturbed are taken again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.foresight import foresight
from benchmarks.measure import RESULTS, QuietRounds, describe_machine, write_rows
from benchmarks.model_options import add_patience
from benchmarks.routing_source import DEMO, routing_of
from benchmarks.synthetic_model import write_model
from thermocline.demo import DEMO_MODEL_PATH
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import read_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAME: Final = "expert_foresight"
_ROOT: Final = Path(__file__).parents[1]
_SKEW: Final = 0.5


def decode(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return what `cold_side` says of one run: prose and greedy for a trained model, else random and drawn.

    Greedy answers of random weights may repeat two tokens, and with them the experts.
    """
    command = [
        sys.executable,
        "-m",
        "benchmarks.cold_side",
        str(model.absolute()),
        "--prefetch",
        "on",
    ]
    command += ["--prompt", str(options.prompt), "--decode", str(options.decode), "--threads", "1"]
    command += ["--text"] if routing_of(model) == DEMO else ["--temperature", "2"]
    ran = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


def half_of_the_experts(model: Path) -> int:
    """Return how many they are, of all layers."""
    with open_model_file(model) as file:
        spec = read_spec(file)
    return spec.num_layers * spec.router.num_experts // 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Count for each model and append CSV rows."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{_NAME}", description=__doc__)
    parser.add_argument("models", type=Path, nargs="*", metavar="MODEL.gguf")
    parser.add_argument("--prompt", type=int, default=256, metavar="TOKENS")
    parser.add_argument("--decode", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=7)
    add_patience(parser)
    parser.add_argument("--quick", action="store_true", help="few tokens, one round")
    parser.add_argument("--out", type=Path, default=RESULTS / "expert-foresight.csv")
    options = parser.parse_args(arguments)
    if options.quick:
        options.prompt, options.decode, options.rounds, options.patience = 16, 24, 1, 0.0
    facts = describe_machine(1)
    with tempfile.TemporaryDirectory() as folder:
        models = options.models or [
            DEMO_MODEL_PATH,
            write_model(Path(folder) / "even.gguf", "mini"),
            write_model(Path(folder) / "skewed.gguf", "mini", skew=_SKEW),
        ]
        for model in models:
            rounds = QuietRounds(options.rounds, warm_ups=0, patience=options.patience)
            runs = []
            for one in rounds:
                with one:
                    answer = decode(model, options)
                if one.counts:
                    runs.append(answer)
            case, room = f"decode {options.decode}", half_of_the_experts(model)
            rows = foresight(_NAME, case, runs, room, routing_of(model))
            print(rounds)
            write_rows(options.out, rows, facts | rounds.facts())
    return 0


if __name__ == "__main__":
    sys.exit(main())
