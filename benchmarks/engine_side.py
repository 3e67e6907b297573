"""thermocline as the benchmarks use it: the only file here that calls the engine.

As a program it is a long-lived child that opens a file once and answers requests, one JSON line each;
see `sides.py` for the other end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import time
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from thermocline import Engine, EngineConfig, SamplingParams
from thermocline.config import (
    CpuConfig,
    MemoryConfig,
    PlacementConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from thermocline.modelfile.reader import open_model_file
from thermocline.models.footprint import measure_footprint
from thermocline.models.registry import read_spec

if TYPE_CHECKING:
    from pathlib import Path

    from thermocline.messages import Timings


def engine_config(
    context_tokens: int,
    threads: int | None,
    placement: PlacementConfig | None = None,
    *,
    isa: str = "auto",
) -> EngineConfig:
    """Return the settings of every benchmark. One request at a time needs one context.

    A prompt that comes again is computed again. threads: None for one per processor.
    """
    return EngineConfig(
        scheduler=SchedulerConfig(prefix_cache=False),
        memory=MemoryConfig(max_context_tokens=context_tokens, max_full_contexts=1),
        placement=placement or PlacementConfig(),
        cpu=CpuConfig(isa=isa, threads=threads),
    )


def random_prompt(vocab_size: int, num_tokens: int, seed: int) -> list[int]:
    """Return token ids, the same for each seed; the last id is a control token and is not drawn."""
    draw = random.Random(seed)
    return [draw.randrange(vocab_size - 1) for _ in range(num_tokens)]


async def time_request(engine: Engine, prompt: list[int], num_decode: int) -> Timings:
    """Run one greedy request to its end and return where its time went."""
    params = SamplingParams(max_tokens=num_decode, ignore_eos=True)
    async with aclosing(engine.generate(prompt, params)) as events:
        async for event in events:
            if event.timings is not None:
                return event.timings
    raise AssertionError("the stream ended without its last event")


def bytes_per_token(path: Path | str) -> int:
    """Return the bytes of weights that one decoded token reads at least; the cache is not counted."""
    with open_model_file(path) as file:
        found = measure_footprint(file.tensors.values(), read_spec(file).router).token_bytes
    assert found is not None
    return found


async def _serve(path: str, config: EngineConfig) -> None:
    start = time.perf_counter()
    async with Engine.open(path, config) as engine:
        _answer({"open_s": time.perf_counter() - start, "vocabulary": engine.tokenizer.vocab_size})
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            _answer(await _run(engine, request))


async def _run(engine: Engine, request: dict[str, Any]) -> dict[str, float]:
    """`prompt` tokens are computed and `decode` tokens follow; 0 of them times the prompt alone.

    The first token belongs to the prompt's time, so that one more is asked for than is timed.
    """
    prompt = random_prompt(engine.tokenizer.vocab_size, request["prompt"], request["seed"])
    timings = await time_request(engine, prompt, request["decode"] + 1)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "prefill_s": timings.prompt_s,
        "decode_s": timings.decode_s,
        "major_faults": usage.ru_majflt,
    }


def _answer(content: dict[str, float]) -> None:
    print(json.dumps(content), flush=True)


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_side", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, help="default: one per processor")
    parser.add_argument("--isa", default="auto", help="instruction set")
    parser.add_argument(
        "--device-memory", type=int, metavar="BYTES", help="of a GPU, if there is one"
    )
    options = parser.parse_args()
    placement = PlacementConfig(device_memory_bytes=options.device_memory)
    config = engine_config(options.context, options.threads, placement, isa=options.isa)
    # Random weights repeat themselves: drafts of a text that comes again would be measured instead of kernels.
    config = replace(config, speculation=SpeculationConfig(drafters="off"))
    asyncio.run(_serve(options.model, config))


if __name__ == "__main__":
    _main()
