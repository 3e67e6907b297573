"""Is an expert cache ever in the way? Usage `python -m benchmarks.expert_link MODEL.gguf`.

A prompt and an answer with a simulated device that fills and empties by use (`--expert-cache auto`), over links
from very thin to very fast, against the same on the CPU alone. All sides in turns.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

from benchmarks.engine_side import random_prompt, time_request
from benchmarks.measure import (
    QuietRounds,
    Row,
    describe_machine,
    paired_ratios,
    verdict,
    write_rows,
)
from benchmarks.model_options import add_patience, model_parser, parse, run_on_model
from benchmarks.routing_source import DEMO, held_text, routing_of
from thermocline import Engine, EngineConfig
from thermocline.config import (
    CpuConfig,
    HeatConfig,
    MemoryConfig,
    PlacementConfig,
    SchedulerConfig,
)

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

_NAME: Final = "expert link"
# The text of the next round begins so many tokens further on.
_TURN_TOKENS: Final = 53
_MAX_RATIO: Final = 1.10
_LINKS_BYTES_PER_S: Final = (1e7, 1e8, 1e9, 1e10, 1e11)


def config(threads: int, context: int, link_bytes_per_s: float | None) -> EngineConfig:
    """Return the settings of one side; None is the CPU alone."""
    placement = PlacementConfig()
    if link_bytes_per_s is not None:
        placement = PlacementConfig(
            hot_device="simulated", simulated_copy_bytes_per_s=link_bytes_per_s
        )
    return EngineConfig(
        memory=MemoryConfig(max_context_tokens=context, max_full_contexts=1),
        placement=placement,
        scheduler=SchedulerConfig(prefix_cache=False),
        cpu=CpuConfig(threads=threads),
        heat=HeatConfig(enabled=False),
    )


async def _prompt(engine: Engine, routing: str, num_tokens: int, turn: int) -> list[int]:
    """Return tokens that the model's router chooses for as it does at work: text for a trained one."""
    if routing != DEMO:
        return random_prompt(engine.tokenizer.vocab_size, num_tokens, turn)
    text = list(await engine.encode(held_text()))
    start = turn * _TURN_TOKENS % max(1, len(text) - num_tokens)
    return text[start : start + num_tokens]


async def compare(
    model: Path, options: argparse.Namespace, rounds: QuietRounds
) -> tuple[dict[float | None, list[float]], dict[float, str]]:
    """Return the seconds of prompt and answer on each side, and what each cache came to."""
    sides: tuple[float | None, ...] = (None, *_LINKS_BYTES_PER_S)
    spent: dict[float | None, list[float]] = {side: [] for side in sides}
    context = options.prompt + options.answer + 1
    routing = routing_of(model)
    async with AsyncExitStack() as stack:
        engines = {
            side: await stack.enter_async_context(
                Engine.open(model, config(options.threads, context, side))
            )
            for side in sides
        }
        for turn, one in enumerate(rounds):
            # Each side comes first, second, ... equally often: a round starts where the last one began, one on.
            first = turn % len(sides)
            taken = {}
            with one:
                for side in (*sides[first:], *sides[:first]):
                    engine = engines[side]
                    prompt = await _prompt(engine, routing, options.prompt, turn)
                    timings = await time_request(engine, prompt, options.answer)
                    taken[side] = timings.prompt_s + timings.decode_s
            if one.counts:
                for side, seconds in taken.items():
                    spent[side].append(seconds)
        notes = {}
        for side in _LINKS_BYTES_PER_S:
            store = engines[side].statistics().store
            assert store is not None, "a simulated device has a store"
            notes[side] = (
                f"{store.num_resident} there, {store.total_staged_experts} staged; {store.reason}"
            )
    return spent, notes


def run(options: argparse.Namespace, model: Path) -> int:
    """Measure `model`; 1 if a cache costs more than it may."""
    facts = describe_machine(options.threads)
    rounds = QuietRounds(options.repeats, warm_ups=2, patience=options.patience)
    spent, notes = asyncio.run(compare(model, options, rounds))
    case, routing = f"prompt {options.prompt}, answer {options.answer}", routing_of(model)
    alone = tuple(spent[None])
    rows = [Row(_NAME, case, "cpu alone", "request", "s", alone, model.stem, routing)]
    holds = []
    for link in _LINKS_BYTES_PER_S:
        ratios = paired_ratios(spent[link], spent[None])
        side = f"link {link / 1e6:g} MB/s"
        rows += [
            Row(_NAME, case, side, "request", "s", tuple(spent[link]), notes[link], routing),
            Row(_NAME, case, side, "of cpu alone", "ratio", ratios, notes[link], routing),
        ]
        ratio = statistics.median(ratios)
        holds.append(ratio <= _MAX_RATIO)
        print(
            f"{verdict(holds[-1])}  {routing}, {case}, {side}: {ratio:.3f} of the time, at most {_MAX_RATIO}"
        )
        print(f"      {notes[link]}")
    print(rounds)
    write_rows(options.out, rows, facts | rounds.facts())
    return 0 if all(holds) else 1


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for; the status is 1 if a requirement does not hold."""
    parser = model_parser(_NAME, __doc__, "expert-link.csv")
    parser.add_argument("--prompt", type=int, default=384, metavar="TOKENS")
    parser.add_argument("--answer", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=9)
    add_patience(parser)
    quick = {"prompt": 32, "answer": 4, "repeats": 1}
    return run_on_model(parse(parser, arguments), quick, run)


if __name__ == "__main__":
    sys.exit(main())
