"""What does overlap give? Usage `python -m benchmarks.overlap MODEL.gguf`.

A prompt over a simulated device and the CPU, one thread each: stages side by side with several chunks in
flight, against one chunk at a time with stages one after another. And the same with hot experts on the CPU
itself, where there is nothing to gain, and little may be lost. Both sides in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from benchmarks.engine_side import random_prompt, time_request
from benchmarks.measure import (
    RESULTS,
    ForeignLoad,
    Row,
    describe_machine,
    paired_ratios,
    verdict,
    write_rows,
)
from benchmarks.synthetic_model import write_model
from thermocline import Engine, EngineConfig
from thermocline.config import CpuConfig, MemoryConfig, PlacementConfig, SchedulerConfig

_NAME: Final = "overlap"
_MAX_SIMULATED: Final = 0.8
_MAX_CPU: Final = 1.03


def config(device: str, threads: int, context: int, *, overlap: bool, chunk: int) -> EngineConfig:
    """Return the settings of one side."""
    return EngineConfig(
        memory=MemoryConfig(max_context_tokens=context, max_full_contexts=1),
        placement=PlacementConfig(hot_device=device, hot_fraction=0.5),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(
            prefill_chunk_tokens=chunk,
            max_prompt_chunks=2 if overlap else 1,
            overlap=overlap,
            prefix_cache=False,
        ),
        cpu=CpuConfig(threads=threads),
    )


async def compare(
    model: Path, device: str, threads: int, prompt_tokens: int, chunk: int, repeats: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of a prompt with overlap and without, measured in turns."""
    spent: dict[bool, list[float]] = {True: [], False: []}
    async with AsyncExitStack() as stack:
        engines = {
            overlap: await stack.enter_async_context(
                Engine.open(
                    model, config(device, threads, prompt_tokens + 2, overlap=overlap, chunk=chunk)
                )
            )
            for overlap in spent
        }
        for repeat in range(-1, repeats):
            for overlap, engine in engines.items():
                prompt = random_prompt(engine.tokenizer.vocab_size, prompt_tokens, repeat)
                timings = await time_request(engine, prompt, 1)
                if repeat >= 0:
                    spent[overlap].append(timings.prompt_s)
    return spent[True], spent[False]


def run(options: argparse.Namespace, model: Path) -> int:
    """Measure `model`; 1 if a requirement does not hold."""
    facts = describe_machine(options.threads)
    rows, holds = [], []
    with ForeignLoad() as load:
        for device, threads, limit in (
            ("simulated", 1, _MAX_SIMULATED),
            ("cpu", options.threads, _MAX_CPU),
        ):
            ours, theirs = asyncio.run(
                compare(model, device, threads, options.prompt, options.chunk, options.repeats)
            )
            ratios = paired_ratios(ours, theirs)
            case = f"hot device {device}, prompt {options.prompt} by {options.chunk}"
            rows += [
                Row(_NAME, case, "overlap", "prompt", "s", tuple(ours)),
                Row(_NAME, case, "one at a time", "prompt", "s", tuple(theirs)),
                Row(_NAME, case, "both", "overlap/one at a time", "ratio", ratios),
            ]
            ratio = statistics.median(ratios)
            holds.append(ratio <= limit)
            print(f"{verdict(holds[-1])}  {case}: {ratio:.3f} of the time, at most {limit}")
    print(load)
    facts["foreign_cores"] = f"{load.cores:.2f}"
    write_rows(options.out, rows, facts)
    return 0 if all(holds) else 1


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for; the status is 1 if a requirement does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL.gguf")
    parser.add_argument("--prompt", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--chunk", type=int, default=256, metavar="TOKENS")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "overlap.csv")
    parser.add_argument("--quick", action="store_true", help="a tiny model and one run: checks that all works, says nothing about speed")  # fmt: skip
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if not options.quick:
        if options.model is None:
            parser.error("give a model: python -m benchmarks.synthetic_model writes one")
        return run(options, options.model)
    options.prompt, options.chunk, options.repeats = 64, 16, 1
    with tempfile.TemporaryDirectory() as folder:
        run(options, write_model(Path(folder) / "tiny.gguf", "tiny"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
