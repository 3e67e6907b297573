"""What does a decode step cost that a device and the CPU share, beside its kernels? Usage `python -m benchmarks.shared_step`.

Layers with the shapes of Qwen3-30B-A3B, zeros for weights, so that all tokens choose the same experts: half of them are on
the simulated device, over a link that costs nothing. Of each step the time of its job counts, less what the slower of the
two sides computed in each layer. It may be at most 40 us per layer.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from unittest import mock

import numpy as np

from benchmarks.measure import RESULTS, ForeignLoad, Row, describe_machine, write_rows
from benchmarks.published_models.sparse_gguf import write_sparse
from benchmarks.published_models.table import MODELS
from thermocline import Engine, EngineConfig, PlacementConfig, SamplingParams
from thermocline.config import CpuConfig, MemoryConfig, PrefetchConfig
from thermocline.models.device.simulated_step import SimulatedStep, StepNode
from thermocline.stages.shared_model import SharedModelStage

if TYPE_CHECKING:
    from thermocline.messages import FloatArray, Hidden

_NAME: Final = "shared_step"
_MODEL: Final = "Qwen3-30B-A3B"
_LINK: Final = 1e15
_KERNELS: Final = frozenset({StepNode.ATTEND, StepNode.ROUTE, StepNode.COMBINE})
MAX_US: Final = 40.0
"""The most that a layer of a step may cost beside its kernels."""


def write_model(path: Path, layers: int) -> Path:
    """Write the model with so many layers; its weights are a hole in the file."""
    model = MODELS[_MODEL]
    return write_sparse(path, replace(model, shape=replace(model.shape, layers=layers)))


async def time_steps(model: Path, num_tokens: int) -> list[float]:
    """Return microseconds per layer beside kernels, of each step of an answer of so many tokens."""
    config = EngineConfig(
        placement=PlacementConfig(
            hot_device="simulated",
            expert_cache="static",
            # All tokens choose the first eight of 128 experts.
            hot_fraction=4 / 128,
            simulated_copy_bytes_per_s=_LINK,
        ),
        memory=MemoryConfig(max_context_tokens=2048),
        prefetch=PrefetchConfig(mode="off"),
        cpu=CpuConfig(threads=1),
    )
    found: list[float] = []
    run = SharedModelStage.run

    def timed(stage: SharedModelStage, hidden: Hidden) -> FloatArray:
        start_ns = time.perf_counter_ns()
        x = run(stage, hidden)
        found.append(overhead_us(stage, time.perf_counter_ns() - start_ns))
        return x

    with mock.patch.object(SharedModelStage, "run", timed):
        async with Engine.open(model, config) as engine:
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            async for _ in engine.generate([1, 2, 3, 4], params):
                pass
    return found


def overhead_us(stage: SharedModelStage, spent_ns: int) -> float:
    """Return what is left of a step's nanoseconds per layer without the slower side's kernels, in microseconds."""
    assert isinstance(stage.device, SimulatedStep)
    nodes, cold = stage.device.node_spans(), np.diff(stage.handoff.spans, axis=1)[:, 0]
    hot, kernels = np.zeros(len(cold), np.int64), 0
    for begin_ns, end_ns, node, layer, _ in nodes.tolist():
        if node == StepNode.HOT:
            hot[layer] = end_ns - begin_ns
        elif node in _KERNELS:
            kernels += end_ns - begin_ns
    kernels += int(np.maximum(hot, cold).sum())
    return (spent_ns - kernels) / len(cold) / 1e3


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 if a layer costs more than it may."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_step", description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "shared-step.csv")
    parser.add_argument("--quick", action="store_true", help="one short run: checks that all works")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if options.quick:
        options.layers, options.tokens, options.repeats = 1, 6, 1
    facts = describe_machine(1)
    with tempfile.TemporaryDirectory() as folder, ForeignLoad() as load:
        model = write_model(Path(folder) / "model.gguf", options.layers)
        runs = [asyncio.run(time_steps(model, options.tokens)) for _ in range(options.repeats)]
    medians = [statistics.median(run) for run in runs]
    median = statistics.median(medians)
    is_kept = median <= MAX_US
    print(
        f"{'pass' if is_kept else 'BROKEN'}  a shared decode step: {median:.1f} us per layer beside its kernels, "
        f"at most {MAX_US:g}"
    )
    print(load)
    facts["foreign_cores"] = f"{load.cores:.2f}"
    rows = [
        Row(_NAME, "a shared decode step", "thermocline", "time per layer", "us", tuple(medians))
    ]
    write_rows(options.out, rows, facts)
    return 0 if options.quick or is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
