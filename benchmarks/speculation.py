"""When does speculation pay, and does it know? Usage `python -m benchmarks.speculation MODEL.gguf`.

Scripted: a drafter that knows the answer proposes each token rightly with a given probability. It costs nothing; in a file
with a next-token block (`random_gguf --block` writes one) it costs what that block and its head take. For each
probability, answers without drafts, with so many drafted tokens a step, and with as many as the engine chooses, in turns.
Texts: the model is made to write a given text, and the lookup drafter sees only what a user would send: a file of code with
a few changed lines after that file, and prose after other prose. Every step is computed in full.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from unittest import mock

from benchmarks.engine_side import engine_config, random_prompt
from benchmarks.measure import (
    QuietRounds,
    Row,
    describe_machine,
    paired_ratios,
    spread,
    table,
    verdict,
    write_rows,
)
from benchmarks.model_options import add_patience, model_parser, parse, run_on_model
from benchmarks.routing_source import routing_of
from thermocline import Engine, SamplingParams
from thermocline.engine import drafter_builder
from thermocline.messages import RequestOptions, TokenEvent
from thermocline.sampling.constraint import ReasoningBudget
from thermocline.speculation.contract import Draft, DrafterFacts
from thermocline.speculation.lookup import LookupDrafter
from thermocline.speculation.next_token import NextTokenDrafter

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from thermocline.engine.build_context import BuildContext
    from thermocline.messages import Chunk, FloatArray, RequestId, Timings
    from thermocline.speculation.contract import Drafter, DraftWish, Verified

_NAME: Final = "speculation"
_ROOT: Final = Path(__file__).parents[1]
_ACCEPTANCES: Final = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0)
_LENGTHS: Final = (1, 2, 3, 4, 6, 8)
_OFF, _AUTO = "off", "auto"
_LEAST_OF_OFF: Final = 0.97
_LEAST_OF_BEST: Final = 0.95
_LEAST_CODE, _LEAST_PROSE = 2.0, 0.98
# The mark that would end the forced text early: in no text.
_NEVER: Final = "\x00never\x00"


class ScriptedDrafter:
    """Proposes what the model will say, as far as `acceptance` lets it. One request at a time."""

    facts = DrafterFacts("scripted")

    def __init__(self) -> None:
        self.answer: tuple[int, ...] = ()
        self.acceptance = 1.0
        self._num_known = self._num_prompt = 0

    def begin(self, request: RequestId, prompt: Sequence[int]) -> None:
        """See `Drafter`."""
        self._num_known = self._num_prompt = len(prompt)

    def propose(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        """See `Drafter`. The same tokens are wrong in every run."""
        (wish,) = wishes
        tokens = self.guesses(wish)
        return [Draft.chain(wish, tokens)] if tokens else []

    def guesses(self, wish: DraftWish) -> list[int]:
        """Return what it proposes, right or wrong."""
        done = wish.num_known - self._num_prompt
        tokens = self.answer[done : done + wish.max_tokens]
        chance = random.Random(f"{self.acceptance} {done}").random
        return [each if chance() < self.acceptance else each ^ 1 for each in tokens]

    def observe(self, verified: Verified) -> None:
        """See `Drafter`."""

    def end(self, request: RequestId) -> None:
        """See `Drafter`."""


class ScriptedBlock:
    """The same at the cost of the model's own block, which computes each token in vain."""

    facts = replace(ScriptedDrafter.facts, computes=True, reads_hidden=True)

    def __init__(self, script: ScriptedDrafter, block: NextTokenDrafter) -> None:
        self._script, self._block = script, block
        block.guess = self._guess  # type: ignore[method-assign]

    def _guess(self, wish: DraftWish, index: int, logits: FloatArray) -> tuple[int, float]:
        logits.argmax()
        guesses = self._script.guesses(wish)
        return (guesses[index], 1.0) if index < len(guesses) else (0, 0.0)

    def begin(self, request: RequestId, prompt: Sequence[int]) -> None:
        """See `Drafter`."""
        self._script.begin(request, prompt)
        self._block.begin(request, prompt)

    def propose(self, wishes: Sequence[DraftWish]) -> Sequence[Draft]:
        """See `Drafter`. Without confidence, since the script's has a meaning of its own."""
        return [replace(draft, confidence=()) for draft in self._block.propose(wishes)]

    def observe(self, verified: Verified) -> None:
        """See `Drafter`."""
        self._block.observe(verified)

    def hidden_computed(self, chunk: Chunk, x: FloatArray) -> None:
        """See `HiddenReader`."""
        self._block.hidden_computed(chunk, x)

    def end(self, request: RequestId) -> None:
        """See `Drafter`."""
        self._block.end(request)


def scripted_drafters(
    scripted: ScriptedDrafter, open_drafters: Callable[[BuildContext], list[Drafter]]
) -> Callable[[BuildContext], list[Drafter]]:
    """Return what opens the scripted drafter, at the cost of the model's block if there is one, and lookup."""

    def opened(context: BuildContext) -> list[Drafter]:
        blocks = [each for each in open_drafters(context) if isinstance(each, NextTokenDrafter)]
        drafter = ScriptedBlock(scripted, blocks[0]) if blocks else scripted
        return [drafter, LookupDrafter()]

    return opened


async def answer(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, drafters: tuple[str, ...]
) -> tuple[tuple[int, ...], Timings]:
    """Return an answer's tokens, and where its time went."""
    tokens: list[int] = []
    options = RequestOptions(speculate=drafters)
    async with aclosing(engine.events(prompt, params, options)) as events:
        async for event in events:
            if isinstance(event, TokenEvent):
                tokens += event.token_ids
                if event.timings is not None:
                    return tuple(tokens), event.timings
    raise AssertionError("the stream ended without its last event")


def forced(text: str, num_tokens: int) -> SamplingParams:
    """Return parameters by which a model writes just this text: as the end of reasoning that has no budget."""
    budget = ReasoningBudget("", _NEVER, text, 0)
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, reasoning_budget=budget)


async def compare(
    engine: Engine,
    sides: dict[str, tuple[tuple[str, ...], int | None]],
    prompt: Sequence[int],
    params: SamplingParams,
    rounds: QuietRounds,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return tokens per second of each side in turns, and what became of its drafts. sides: drafters, and fixed tokens."""
    drafting = engine._parts.step_loop.drafting  # noqa: SLF001 - the benchmark changes what users can not
    assert drafting is not None
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    notes, expected = {}, None
    for turn, one in enumerate(rounds):
        names = [*sides][turn % len(sides) :] + [*sides][: turn % len(sides)]
        taken = {}
        with one:
            for side in names:
                drafters, drafting.speculator.fixed_tokens = sides[side]
                tokens, timings = await answer(engine, prompt, params, drafters)
                expected = expected or tokens
                assert tokens == expected, f"{side} changed the answer"
                taken[side] = timings.decode_tokens_per_s
                drafts = timings.drafts
                notes[side] = f"{drafts.num_accepted} of {drafts.num_drafted} accepted"
        if one.counts:
            for side, speed in taken.items():
                speeds[side].append(speed)
    return speeds, notes


def texts() -> tuple[tuple[str, str], tuple[str, str]]:
    """Return a file of code with its edited form, and two pieces of prose that have little in common."""
    code = (_ROOT / "thermocline" / "kv" / "blocks.py").read_text()
    edited = code.replace("num_holders", "count_holders").replace("heapq", "heap_queue")
    prose = [(_ROOT / name).read_text() for name in ("SECURITY.md", "docs/numerics.md")]
    return (code, edited), (prose[0], prose[1])


def rows_of(
    model: Path, case: str, speeds: dict[str, list[float]], notes: dict[str, str]
) -> list[Row]:
    """Return one row for each side: tokens per second."""
    return [
        Row(_NAME, case, side, "decode", "tok/s", tuple(values), notes[side], routing_of(model))
        for side, values in speeds.items()
    ]


async def measure(model: Path, options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Return the rows, and what was required and failed."""
    rows, failures = [], []
    scripted = ScriptedDrafter()
    config = engine_config(options.context, options.threads)
    fixed = {f"{n} drafted": (("scripted",), n) for n in options.lengths}
    config = replace(config, heat=replace(config.heat, saved=False))
    opened = scripted_drafters(scripted, drafter_builder.open_drafters)
    with mock.patch.object(drafter_builder, "open_drafters", opened):
        async with Engine.open(model, config) as engine:
            prompt = random_prompt(engine.tokenizer.vocab_size, 32, 7)
            params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
            scripted.answer, _ = await answer(engine, prompt, params, ())
            for acceptance in options.acceptances:
                scripted.acceptance = acceptance
                sides = {_OFF: ((), None), _AUTO: (("scripted",), None), **fixed}
                rounds = QuietRounds(options.repeats, warm_ups=1, patience=options.patience)
                speeds, notes = await compare(engine, sides, prompt, params, rounds)
                case = f"acceptance {acceptance:g}"
                rows += rows_of(model, case, speeds, notes)
                of_off = statistics.median(paired_ratios(speeds[_AUTO], speeds[_OFF]))
                best = max(statistics.median(values) for values in speeds.values())
                of_best = statistics.median(speeds[_AUTO]) / best
                is_good = of_off >= _LEAST_OF_OFF and of_best >= _LEAST_OF_BEST
                shown = {side: statistics.median(values) for side, values in speeds.items()}
                print(
                    f"{case}: " + ", ".join(f"{side} {speed:.1f}" for side, speed in shown.items())
                )
                print(
                    f"  auto is {of_off:.2f} of off, {of_best:.2f} of the best: {verdict(is_good)}"
                )
                if not is_good:
                    failures.append(case)
            failures += await compare_texts(engine, model, options, rows)
    return rows, failures


async def compare_texts(
    engine: Engine, model: Path, options: argparse.Namespace, rows: list[Row]
) -> list[str]:
    """Measure lookup where it should help, and where it should not hurt; return what failed."""
    failures = []
    sides: dict[str, tuple[tuple[str, ...], int | None]] = {
        _OFF: ((), None),
        "lookup": (("lookup",), None),
    }
    code, prose = texts()
    for case, (before, after), least in (
        ("code edit", code, _LEAST_CODE),
        ("prose", prose, _LEAST_PROSE),
    ):
        ids = await engine.encode(before, parse_special=False)
        room = engine.max_context_tokens - options.text_tokens
        params = forced(after, options.text_tokens)
        rounds = QuietRounds(options.repeats, warm_ups=1, patience=options.patience)
        speeds, notes = await compare(engine, sides, ids[:room], params, rounds)
        rows += rows_of(model, case, speeds, notes)
        ratios = paired_ratios(speeds["lookup"], speeds[_OFF])
        is_good = statistics.median(ratios) >= least
        print(f"{case}: lookup {spread(ratios, 2)} of off, {notes['lookup']}: {verdict(is_good)}")
        if not is_good:
            failures.append(case)
    return failures


def run(options: argparse.Namespace, model: Path) -> int:
    """Measure `model`."""
    rows: list[Row] = []
    failures: list[str] = []
    whole = QuietRounds(1, warm_ups=0, patience=0.0)  # what ran beside all of it
    for one in whole:
        with one:
            rows, failures = asyncio.run(measure(model, options))
    heads = ["case", "side", "tokens/s", "drafts"]
    print(table(heads, [[row.case, row.side, spread(row.values), row.note] for row in rows]))
    write_rows(options.out, rows, describe_machine(options.threads) | whole.facts())
    return 1 if failures else 0


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for."""
    parser = model_parser("speculation", __doc__, "speculation.csv")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer with scripted drafts")
    parser.add_argument("--text-tokens", type=int, default=256, help="of an answer that is a text")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--acceptances", type=float, nargs="+", default=_ACCEPTANCES)
    parser.add_argument("--lengths", type=int, nargs="+", default=_LENGTHS)
    add_patience(parser)
    quick = {
        "tokens": 8, "text_tokens": 8, "context": 64, "repeats": 1, "acceptances": [0.5],
        "lengths": [2], "patience": 0.0,
    }  # fmt: skip
    return run_on_model(parse(parser, arguments), quick, run)


if __name__ == "__main__":
    sys.exit(main())
