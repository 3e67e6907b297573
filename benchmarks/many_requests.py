"""What do several requests at a time give? Usage `python -m benchmarks.many_requests MODEL.gguf`.

Eight answers at a time against one; a long prompt that arrives while four answers are written; a
prompt whose first 2000 tokens were computed before; and short prompts that arrive beside a long one. All at
the default settings, repeated in turns.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from benchmarks.engine_side import random_prompt
from benchmarks.measure import ForeignLoad, Row, conclude, describe_machine
from benchmarks.model_options import model_parser, parse, run_on_model
from thermocline import Engine, EngineConfig, SamplingParams
from thermocline.config import CpuConfig, MemoryConfig, SchedulerConfig

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

_NAME: Final = "many_requests"
_MIN_EIGHT: Final = 2.0
_MAX_SLOWDOWN: Final = 2.0
_MAX_SECOND: Final = 0.1
_MAX_WAIT: Final = 0.5
_PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is asked for, in tokens."""

    answer: int
    beside: int
    prompt: int
    prefix: int
    short: int
    chunk: int = 0  # as the engine chooses

    @property
    def long(self) -> int:
        """Tokens of the prompt that short ones come beside: some chunks, whatever they are."""
        return 2 * self.prompt


class Asker:
    """Asks one engine, with a new random prompt each time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seed = 0

    def prompt(self, num_tokens: int) -> list[int]:
        """Return a prompt that was not asked before."""
        self._seed += 1
        return random_prompt(self._engine.tokenizer.vocab_size, num_tokens, self._seed)

    async def read(self, prompt: list[int], count: int, arrivals: list[float]) -> None:
        """Append when each token of a greedy answer arrives, in seconds."""
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        async with aclosing(self._engine.generate(prompt, params)) as events:
            async for event in events:
                arrivals += [time.perf_counter()] * len(event.token_ids)


async def speed(asker: Asker, num_requests: int, count: int) -> float:
    """Return tokens per second of so many answers at a time, while all of them are written."""
    answers: list[list[float]] = [[] for _ in range(num_requests)]
    await asyncio.gather(*(asker.read(asker.prompt(8), count, times) for times in answers))
    start, end = max(times[0] for times in answers), min(times[-1] for times in answers)
    num_tokens = sum(start < at <= end for times in answers for at in times)
    return num_tokens / (end - start)


@dataclass(frozen=True, slots=True)
class Beside:
    """Four answers and a prompt: median seconds per token alone and beside it, and the prompt's own."""

    alone_s: float
    beside_s: float
    longest_s: float
    prompt_s: float

    @property
    def slowdown(self) -> float:
        """How many times longer a token took."""
        return self.beside_s / self.alone_s


async def beside_prompt(asker: Asker, sizes: Sizes) -> Beside:
    """Let four answers run alone for a while, then beside a long prompt."""
    answers: list[list[float]] = [[] for _ in range(4)]
    readers = [
        asyncio.create_task(asker.read(asker.prompt(8), sizes.beside, times)) for times in answers
    ]
    while min(map(len, answers)) < sizes.answer:  # noqa: ASYNC110 - readers need not know who waits
        await asyncio.sleep(0.01)
    arrived: list[float] = []
    sent = time.perf_counter()
    await asker.read(asker.prompt(sizes.prompt), 1, arrived)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    gaps = [(b, b - a) for times in answers for a, b in pairwise(times)]
    beside = [gap for at, gap in gaps if sent < at <= arrived[0]]
    return Beside(
        statistics.median(gap for at, gap in gaps if at <= sent),
        statistics.median(beside),
        max(beside),
        arrived[0] - sent,
    )


async def second_start(asker: Asker, sizes: Sizes) -> tuple[float, float]:
    """Return the seconds to the first token of a prompt, and of another one with the same beginning."""
    prefix = asker.prompt(sizes.prefix)
    waits = []
    for _ in range(2):
        arrived: list[float] = []
        start = time.perf_counter()
        await asker.read([*prefix, *asker.prompt(4)], 1, arrived)
        waits.append(arrived[0] - start)
    return waits[0], waits[1]


@dataclass(frozen=True, slots=True)
class Newcomers:
    """Seconds from each short prompt to its first token, and those of the long prompt beside it."""

    waits_s: tuple[float, ...]
    long_s: float

    @property
    def share(self) -> float:
        """The longest wait, as a share of the long prompt's time."""
        return max(self.waits_s) / self.long_s


async def newcomers(asker: Asker, sizes: Sizes) -> Newcomers:
    """Let short prompts come beside a long one, each when the one before has its token, until the long one ends."""
    arrived: list[float] = []
    start = time.perf_counter()
    long = asyncio.create_task(asker.read(asker.prompt(sizes.long), 1, arrived))
    waits = []
    while not arrived:
        await asyncio.sleep(_PAUSE_S)
        sent, tokens = time.perf_counter(), list[float]()
        await asker.read(asker.prompt(sizes.short), 1, tokens)
        waits.append(tokens[0] - sent)
    await long
    return Newcomers(tuple(waits), arrived[0] - start)


async def measure(model: Path, sizes: Sizes, threads: int, repeats: int) -> list[Row]:
    """Return the rows of all four questions, asked in turns."""
    config = EngineConfig(
        memory=MemoryConfig(max_context_tokens=sizes.long + sizes.beside),
        cpu=CpuConfig(threads=threads),
        scheduler=SchedulerConfig(prefill_chunk_tokens=sizes.chunk),
    )
    one, eight, besides, starts, news = [], [], [], [], []
    async with Engine.open(model, config) as engine:
        asker = Asker(engine)
        await speed(asker, 1, 4)
        for _ in range(repeats):
            one.append(await speed(asker, 1, sizes.answer))
            eight.append(await speed(asker, 8, sizes.answer))
            besides.append(await beside_prompt(asker, sizes))
            starts.append(await second_start(asker, sizes))
            news.append(await newcomers(asker, sizes))
    case = f"prompt {sizes.prompt} beside four answers"
    new = f"prompts {sizes.short} beside one of {sizes.long}"
    return [
        Row(_NAME, "one answer", "thermocline", "speed", "tokens/s", tuple(one)),
        Row(_NAME, "eight answers", "thermocline", "speed", "tokens/s", tuple(eight)),
        Row(_NAME, "eight answers", "thermocline", "eight/one", "ratio",
            tuple(b / a for a, b in zip(one, eight, strict=True))),
        Row(_NAME, case, "thermocline", "token alone", "s", tuple(b.alone_s for b in besides)),
        Row(_NAME, case, "thermocline", "token beside", "s", tuple(b.beside_s for b in besides)),
        Row(_NAME, case, "thermocline", "slowdown", "ratio", tuple(b.slowdown for b in besides)),
        Row(_NAME, case, "thermocline", "longest wait", "s", tuple(b.longest_s for b in besides)),
        Row(_NAME, case, "thermocline", "prompt", "s", tuple(b.prompt_s for b in besides)),
        Row(_NAME, f"prefix {sizes.prefix}", "thermocline", "second/first", "ratio",
            tuple(second / first for first, second in starts)),
        Row(_NAME, new, "thermocline", "first token", "s", tuple(statistics.median(n.waits_s) for n in news)),
        Row(_NAME, new, "thermocline", "longest wait", "s", tuple(max(n.waits_s) for n in news)),
        Row(_NAME, new, "thermocline", "wait/long", "ratio", tuple(n.share for n in news)),
        Row(_NAME, new, "thermocline", "long prompt", "s", tuple(n.long_s for n in news)),
    ]  # fmt: skip


def checks(rows: list[Row]) -> list[tuple[str, bool]]:
    """Return each requirement in words, and whether it holds."""
    by_metric = {row.metric: row.median for row in rows}
    eight, slowdown = by_metric["eight/one"], by_metric["slowdown"]
    second, wait = by_metric["second/first"], by_metric["wait/long"]
    return [
        (f"eight answers {eight:.2f} times one, at least {_MIN_EIGHT}", eight >= _MIN_EIGHT),
        (
            f"a token beside a prompt takes {slowdown:.2f} times as long, below {_MAX_SLOWDOWN}",
            slowdown < _MAX_SLOWDOWN,
        ),
        (
            f"the same prefix again starts in {second:.3f} of the time, at most {_MAX_SECOND}",
            second <= _MAX_SECOND,
        ),
        (
            f"a short prompt waits for {wait:.2f} of a long one at most, below {_MAX_WAIT}",
            wait < _MAX_WAIT,
        ),
    ]


def run(options: argparse.Namespace, model: Path) -> int:
    """Measure `model`; 1 if a requirement does not hold."""
    facts = describe_machine(options.threads)
    with ForeignLoad() as load:
        rows = asyncio.run(measure(model, options.sizes, options.threads, options.repeats))
    for row in rows:
        print(f"{row.case:34} {row.metric:13} {row.median:8.3f} {row.unit}")
    return conclude(options.out, rows, facts, load, checks(rows))


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for; the status is 1 if a requirement does not hold."""
    parser = model_parser(_NAME, __doc__, "many-requests.csv")
    parser.add_argument("--repeats", type=int, default=3)
    parser.set_defaults(sizes=Sizes(answer=48, beside=600, prompt=4096, prefix=2000, short=32))
    quick = {
        "repeats": 1,
        "sizes": Sizes(answer=60, beside=400, prompt=100, prefix=64, short=8, chunk=32),
    }
    return run_on_model(parse(parser, arguments), quick, run)


if __name__ == "__main__":
    sys.exit(main())
