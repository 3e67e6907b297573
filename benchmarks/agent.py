"""Does a coding agent wait for its new tokens only? Usage `python -m benchmarks.agent MODEL.gguf`.

Replays a session: a long first prompt, then turns that each add the answer, a tool's result and the next question, up to a
context of 60,000 tokens. Other conversations come between every few turns (`--between`, several numbers for several
sessions). Each turn's time to the first token is divided by that of as many new tokens sent right behind the same
beginning, when nothing came between; and the tokens that a turn computed by those that were new. The first ratio is a
speed, the second does not depend on how busy the machine is.

With `--spill memory`, `disk` or `nowhere` the cache has room for one context, so that the other conversations push the
session out: to a second tier in memory or on a disk, or for nothing, which shows what the tier is worth.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from benchmarks.engine_side import random_prompt
from benchmarks.measure import ForeignLoad, Row, conclude, describe_machine
from benchmarks.model_options import model_parser, parse, run_on_model
from thermocline import Engine, EngineConfig, SamplingParams
from thermocline.config import CpuConfig, MemoryConfig
from thermocline.units import parse_bytes

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from thermocline import Timings

_NAME: Final = "agent"
_MAX_RATIO: Final = 1.2
_CHECKED_EVERY: Final = 3  # turns: the same tokens right behind the same beginning


@dataclass(frozen=True, slots=True)
class Session:
    """How long a session is, in tokens and turns. Other conversations come before every third turn.

    spill: where what is evicted goes; "off" is a cache of the default size, without a second tier.
    """

    turns: int
    first: int
    last: int
    answer: int
    others: int
    other_tokens: int
    spill: str = "off"
    spill_bytes: int = 0

    @property
    def added(self) -> int:
        """Tokens that each turn adds behind the answer."""
        return max(1, (self.last - self.first) // self.turns - self.answer)


@dataclass
class Waits:
    """One row of each per turn, but `alone_s`, which is of every third. Seconds are those to the first token.

    returned: tokens that came back from the second tier.
    """

    new: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    turn_s: list[float] = field(default_factory=list)
    alone_s: list[tuple[int, float]] = field(default_factory=list)

    def slower(self) -> list[float]:
        """Return each measured turn's time by that of its tokens alone."""
        return [self.turn_s[turn] / alone for turn, alone in self.alone_s]


async def ask(engine: Engine, prompt: list[int], count: int) -> tuple[list[int], Timings]:
    """Return a greedy answer of `count` tokens, and its times."""
    params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)
    answer: list[int] = []
    async with aclosing(engine.generate(prompt, params)) as events:
        async for event in events:
            answer += event.token_ids
            if event.timings is not None:
                return answer, event.timings
    raise AssertionError("the stream ended without its last event")


def waited(timings: Timings) -> float:
    """Seconds from submission to the first token."""
    return timings.queue_s + timings.prompt_s


def returned_tokens(engine: Engine) -> int:
    """Tokens that came back from the second tier so far."""
    spill = engine.statistics().spill
    return 0 if spill is None else spill.total_returned_tokens


def memory_of(session: Session, folder: str) -> MemoryConfig:
    """Return a cache for a session, with the second tier that it asks for. folder: for a file."""
    plain = MemoryConfig(max_context_tokens=session.last + 1024)
    if session.spill == "off":
        return plain
    small = replace(plain, max_full_contexts=1)
    if session.spill == "memory":
        return replace(small, spill_bytes=session.spill_bytes)
    if session.spill == "disk":
        return replace(small, spill_dir=folder, spill_disk_bytes=session.spill_bytes)
    return small


async def replay(engine: Engine, session: Session) -> Waits:
    """Play a session, with other conversations before every third turn."""
    vocabulary = engine.tokenizer.vocab_size
    seeds = iter(range(1, 1_000_000))
    found = Waits()
    others = [
        random_prompt(vocabulary, session.other_tokens, next(seeds)) for _ in range(session.others)
    ]
    prompt = random_prompt(vocabulary, session.first, next(seeds))
    answer, _ = await ask(engine, prompt, session.answer)
    for turn in range(session.turns):
        if turn % _CHECKED_EVERY == 0:
            for index, other in enumerate(others):
                said, _ = await ask(engine, other, session.answer)
                others[index] = [*other, *said, *random_prompt(vocabulary, 16, next(seeds))]
        known = len(prompt) + len(answer)
        prompt = [*prompt, *answer, *random_prompt(vocabulary, session.added, next(seeds))]
        before = returned_tokens(engine)
        answer, timings = await ask(engine, prompt, session.answer)
        # The answer's last token was never put in: its keys and values are new as well.
        found.new.append(len(prompt) - known + 1)
        found.computed.append(timings.num_prompt_tokens - timings.num_cached_tokens)
        found.returned.append(returned_tokens(engine) - before)
        found.turn_s.append(waited(timings))
        if turn % _CHECKED_EVERY == 0:
            beside = [*prompt, *answer, *random_prompt(vocabulary, session.added, next(seeds))]
            _, alone = await ask(engine, beside, 1)
            found.alone_s.append((turn, waited(alone)))
    return found


async def measure(model: Path, session: Session, threads: int, isa: str, folder: str) -> list[Row]:
    """Return the rows of one session. folder: for the file of evicted prompts."""
    config = EngineConfig(
        memory=memory_of(session, folder), cpu=CpuConfig(threads=threads, isa=isa)
    )
    async with Engine.open(model, config) as engine:
        await ask(engine, random_prompt(engine.tokenizer.vocab_size, 64, 0), 4)
        found = await replay(engine, session)
        case = (
            f"{engine.spec.architecture}, {session.turns} turns, {session.first} to {session.last} tokens, "
            f"{session.others} between"
        )
    if session.spill != "off":
        case += f", spilt to {session.spill}" if session.spill != "nowhere" else ", not spilt"
    per_token = [s / n for s, n in zip(found.turn_s, found.new, strict=True)]
    return [
        Row(_NAME, case, "thermocline", "first token of a turn", "s", tuple(found.turn_s)),
        Row(_NAME, case, "thermocline", "a new token", "ms", tuple(1e3 * s for s in per_token)),
        Row(_NAME, case, "thermocline", "came back", "tokens", tuple(map(float, found.returned))),
        Row(_NAME, case, "thermocline", "computed/new", "ratio",
            tuple(c / n for c, n in zip(found.computed, found.new, strict=True))),
        Row(_NAME, case, "thermocline", "turn/alone", "ratio", tuple(found.slower())),
    ]  # fmt: skip


def checks(rows: list[Row]) -> list[tuple[str, bool]]:
    """Return each requirement in words, and whether it holds, for each session that may keep what was evicted."""
    found = []
    for case in dict.fromkeys(row.case for row in rows if not row.case.endswith("not spilt")):
        by_metric = {row.metric: row for row in rows if row.case == case}
        computed = max(by_metric["computed/new"].values)
        slower = statistics.median(by_metric["turn/alone"].values)
        found += [
            (f"{case}: a turn computes at most {computed:.2f} of its new tokens, limit {_MAX_RATIO}", computed <= _MAX_RATIO),
            (f"{case}: and takes {slower:.2f} of them alone, limit {_MAX_RATIO}", slower <= _MAX_RATIO),
        ]  # fmt: skip
    return found


def run(options: argparse.Namespace, model: Path) -> int:
    """Measure `model`; 1 if a requirement does not hold."""
    sessions = [
        Session(
            options.turns,
            options.first,
            options.last,
            options.answer,
            between,
            options.other_tokens,
            spill,
            parse_bytes(options.spill_size),
        )
        for spill in options.spill
        for between in options.between
    ]
    facts = describe_machine(options.threads)
    rows: list[Row] = []
    with ForeignLoad() as load, tempfile.TemporaryDirectory(dir=options.spill_dir) as folder:
        for session in sessions:
            rows += asyncio.run(measure(model, session, options.threads, options.cpu_isa, folder))
    for row in rows:
        print(
            f"{row.case}: {row.metric:22} {row.median:8.3f} ({min(row.values):.3f} to {max(row.values):.3f}) {row.unit}"
        )
    return conclude(options.out, rows, facts, load, checks(rows))


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for; the status is 1 if a requirement does not hold."""
    parser = model_parser(_NAME, __doc__, "agent.csv")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument(
        "--first", type=int, default=15_000, metavar="TOKENS", help="of the first prompt"
    )
    parser.add_argument(
        "--last", type=int, default=60_000, metavar="TOKENS", help="of the last one"
    )
    parser.add_argument("--answer", type=int, default=60, metavar="TOKENS", help="of each answer")
    parser.add_argument(
        "--between",
        type=int,
        nargs="+",
        default=[2],
        metavar="N",
        help="conversations that come between; several numbers are several sessions",
    )
    parser.add_argument(
        "--spill",
        nargs="+",
        choices=("off", "memory", "disk", "nowhere"),
        default=["off"],
        help="where the cache's evicted prompts go; all but off have a cache of one context",
    )
    parser.add_argument(
        "--spill-size", default="16GiB", metavar="SIZE", help="of memory, or of the file"
    )
    parser.add_argument(
        "--spill-dir", metavar="FOLDER", help="for the file of --spill disk (default: the system's)"
    )
    parser.add_argument(
        "--other-tokens", type=int, default=4_000, metavar="TOKENS", help="of each of them"
    )
    parser.add_argument("--cpu-isa", default="auto", help="as `thermocline run` takes it")
    quick = {"turns": 4, "first": 200, "last": 1000, "answer": 8, "between": [0, 2], "other_tokens": 900,
             "spill": ["off", "memory", "disk"], "spill_size": "64MiB"}  # fmt: skip
    return run_on_model(parse(parser, arguments), quick, run)


if __name__ == "__main__":
    sys.exit(main())
