"""What does overlap give? Usage `python -m benchmarks.overlap MODEL.gguf`.

A prompt over a simulated device and the CPU, one thread each: stages side by side with several chunks in
flight, against one chunk at a time with stages one after another. And the same with hot experts on the CPU
itself, where there is nothing to gain, and little may be lost. Both sides in turns.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

from benchmarks.engine_side import random_prompt, time_request
from benchmarks.measure import (
    ForeignLoad,
    Row,
    describe_machine,
    paired_ratios,
    verdict,
    write_rows,
)
from benchmarks.model_options import model_parser, parse, run_on_model
from thermocline import Engine, EngineConfig
from thermocline.config import (
    CpuConfig,
    HeatConfig,
    HotDevice,
    MemoryConfig,
    PlacementConfig,
    SchedulerConfig,
)

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

_NAME: Final = "overlap"
_MAX_SIMULATED: Final = 0.8
_MAX_CPU: Final = 1.03


def config(
    device: HotDevice, threads: int, context: int, *, overlap: bool, chunk: int
) -> EngineConfig:
    """Return the settings of one side."""
    return EngineConfig(
        memory=MemoryConfig(max_context_tokens=context, max_full_contexts=1),
        placement=PlacementConfig(
            hot_device=device, hot_fraction=0.5, hot_choice="even", expert_cache="static"
        ),
        heat=HeatConfig(enabled=False),
        scheduler=SchedulerConfig(
            prefill_chunk_tokens=chunk,
            max_prompt_chunks=2 if overlap else 1,
            overlap=overlap,
            prefix_cache=False,
        ),
        cpu=CpuConfig(threads=threads),
    )


async def compare(
    model: Path, device: HotDevice, threads: int, prompt_tokens: int, chunk: int, repeats: int
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
    cases: tuple[tuple[HotDevice, int, float], ...] = (
        ("simulated", 1, _MAX_SIMULATED),
        ("cpu", options.threads, _MAX_CPU),
    )
    with ForeignLoad() as load:
        for device, threads, limit in cases:
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
    parser = model_parser(_NAME, __doc__, "overlap.csv")
    parser.add_argument("--prompt", type=int, default=1024, metavar="TOKENS")
    parser.add_argument("--chunk", type=int, default=256, metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=5)
    quick = {"prompt": 64, "chunk": 16, "repeats": 1}
    return run_on_model(parse(parser, arguments), quick, run)


if __name__ == "__main__":
    sys.exit(main())
