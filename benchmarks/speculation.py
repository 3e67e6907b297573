"""When does speculation pay, and does it know? Usage `python -m benchmarks.speculation MODEL.gguf [--llama-python PYTHON]`.

Scripted: a drafter that knows the answer guesses just this share of its tokens rightly. A chain costs nothing; in a file with a
next-token block (`random_gguf --block` writes one) each of its tokens costs what that block and its head take. A tree has a
second guess beside each token, which is right as often where the first is wrong, and costs nothing. For each share: answers without
drafts, with so many drafted rows a step, and with as many as the engine chooses, in turns; then the same in a memory group of six
tenths of the file, which needs root. Each side learns for itself, and each round has other places guessed wrongly. A number of rows
that is far behind is measured no more. Which number is the best is told by every other round, and what the engine's choice is of it
by the rounds between: the best of many noisy figures flatters itself.
Texts: the model is made to write a given text, and the lookup drafter sees only what a user would send: a file of code with
a few changed lines after that file, and prose after other prose. llama.cpp writes the same tokens with llama-cpp-python's prompt
lookup, the only drafter that it has. Every step is computed in full.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from benchmarks.engine_side import engine_config, random_prompt
from benchmarks.larger_than_ram import drop_pages, memory_group
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
from benchmarks.scripted_drafts import Script, scripted_drafters
from benchmarks.sides import Child, llama_python
from thermocline import Engine, SamplingParams
from thermocline.engine import drafter_builder
from thermocline.messages import RequestOptions, TokenEvent
from thermocline.sampling.constraint import ReasoningBudget
from thermocline.speculation.speculator import Speculator

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from thermocline.messages import Timings

_NAME: Final = "speculation"
_ROOT: Final = Path(__file__).parents[1]
_OFF: Final = "off"
_LEAST_OF_OFF: Final = 0.97
_LEAST_OF_BEST: Final = 0.95
_LEAST_CODE, _LEAST_PROSE = 2.0, 0.98
_FAR_BEHIND: Final = 0.8
"""Of the best's speed: who is slower in the rounds so far is measured no more."""
_LIMIT_SHARE: Final = 0.6
"""Of the file: the memory of the group."""
_LLAMA_DRAFTED: Final = (0, 2, 10)
"""Two is what llama-cpp-python advises for processors, ten its default."""
# What each part of a run may take of what is left of its time, in relation to one share of right guesses.
_TEXT_WEIGHT, _GROUP_WEIGHT, _LLAMA_WEIGHT = 0.7, 2.0, 0.7
# The mark that would end the forced text early: in no text.
_NEVER: Final = "\x00never\x00"

Sides = dict[str, tuple[tuple[str, ...], int | None]]
"""By name: the drafters, and how many rows a step verifies; None for as many as the engine chooses."""
Found = tuple[dict[str, list[float]], dict[str, str]]
"""Tokens per second of each side, an entry for each round, and what became of its drafts."""


class Clock:
    """Divides the time of a run among its parts: each gets its share of what those before it left."""

    def __init__(self, seconds: float, weights: Sequence[float]) -> None:
        self._end = time.perf_counter() + seconds
        self._weights = list(weights)

    def next_part(self) -> float:
        """Return the seconds of the next part."""
        share = self._weights[0] / sum(self._weights)
        del self._weights[0]
        return max(0.0, self._end - time.perf_counter()) * share


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


class Speculators:
    """One for each side, as if it ran alone: what it learns, and may spend on trials, is its own."""

    def __init__(self, engine: Engine, script: Script) -> None:
        drafting = engine._parts.step_loop.drafting  # noqa: SLF001 - the benchmark changes what users can not
        assert drafting is not None
        self._drafting, self._drafters = drafting, drafting.speculator.drafters
        self._known: dict[str, Speculator] = {}
        self._script = script

    def begin_round(self, number: int) -> None:
        """Have other guesses be wrong than in the round before."""
        self._script.pattern = number

    async def use(self, side: str, fixed_tokens: int | None) -> None:
        """Have the next answer be this side's."""
        # An answer's last event comes before its end.
        while self._drafting.speculator._served:  # noqa: SLF001, ASYNC110 - no event tells
            await asyncio.sleep(0.001)
        if side not in self._known:
            self._known[side] = Speculator(self._drafters, fixed_tokens=fixed_tokens)
        self._drafting.speculator = self._known[side]


async def compare(
    engine: Engine,
    speculators: Speculators,
    sides: Sides,
    prompt: Sequence[int],
    params: SamplingParams,
    options: argparse.Namespace,
    seconds: float,
) -> tuple[Found, tuple[int, ...]]:
    """Measure each side in turns, as often as asked or as the time allows, at least once; return the answer, too.

    A first round does not count, and is only of what chooses by itself: it has to know how often guesses are right.
    Sides that were left out have fewer figures.
    """
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    notes: dict[str, str] = {}
    expected: tuple[int, ...] = ()
    left = [*sides]
    start = time.perf_counter()
    for turn, one in enumerate(QuietRounds(options.repeats, patience=options.patience)):
        begin, taken = time.perf_counter(), {}
        speculators.begin_round(turn)
        names = left[turn % len(left) :] + left[: turn % len(left)]
        if one.number < 0:
            names = [name for name in names if sides[name][1] is None]
        with one:
            for side in names:
                drafters, fixed_tokens = sides[side]
                await speculators.use(side, fixed_tokens)
                tokens, timings = await answer(engine, prompt, params, drafters)
                expected = expected or tokens
                assert tokens == expected, f"{side} changed the answer"
                taken[side] = timings.decode_tokens_per_s
                drafts = timings.drafts
                notes[side] = f"{drafts.num_accepted} of {drafts.num_drafted} accepted"
        now = time.perf_counter()
        is_last = one.number >= 0 and now + (now - begin) > start + seconds
        if one.counts or (is_last and not speeds[_OFF]):
            for side, speed in taken.items():
                speeds[side].append(speed)
            left = contenders(sides, left, speeds)
        if is_last:
            break
    return (speeds, notes), expected


def contenders(
    sides: Sides, left: Sequence[str], speeds: Mapping[str, Sequence[float]]
) -> list[str]:
    """Return who is measured in the next round: no number of rows that is far behind the best of those that are left."""
    relative = {side: relative_speed(speeds[side], speeds[_OFF]) for side in left}
    least = _FAR_BEHIND * max(relative.values())
    return [side for side in left if sides[side][1] is None or relative[side] >= least]


def relative_speed(speeds: Sequence[float], off: Sequence[float]) -> float:
    """Return the median of a side's speed over that without drafts beside it."""
    return median(paired_ratios(speeds, off))


def of_best(
    ours: Sequence[float], rivals: Mapping[str, Sequence[float]], off: Sequence[float]
) -> float:
    """Return our speed over that of the best rival. Of four rounds and more, half tell who that is, and the others the ratio; and the
    other way round.
    """
    halves = [slice(0, None, 2), slice(1, None, 2)] if len(ours) > 3 else [slice(None)]
    ratios = []
    for told, asked in zip(halves, halves[::-1], strict=True):
        best = max(rivals, key=lambda name: relative_speed(rivals[name][told], off[told]))
        ratios.append(relative_speed(ours[asked], rivals[best][asked]))
    return sum(ratios) / len(ratios)


def scripted_sides(
    lengths: Sequence[int], trees: Sequence[int]
) -> tuple[Sides, dict[str, list[str]]]:
    """Return the sides of scripted drafts, and by each that chooses by itself those that it is compared with."""
    chains = {f"{n} drafted": (("scripted",), n) for n in lengths}
    grown = {f"tree of {n}": (("tree",), n) for n in trees}
    auto, auto_tree = "auto", "auto, trees"
    sides: Sides = {_OFF: ((), None), auto: (("scripted",), None), auto_tree: (("tree",), None)}
    return sides | chains | grown, {auto: [_OFF, *chains], auto_tree: [_OFF, *grown]}


def judge(
    case: str, speeds: Mapping[str, list[float]], rivals: Mapping[str, list[str]]
) -> list[str]:
    """Print whether each side that chooses by itself chose well; return the cases in which one did not."""
    failures = []
    print(
        f"{case}: " + ", ".join(f"{side} {median(values):.1f}" for side, values in speeds.items())
    )
    for side, others in rivals.items():
        left = {n: speeds[n] for n in others if len(speeds[n]) == len(speeds[side])}
        of_off = relative_speed(speeds[side], speeds[_OFF])
        of_rival = of_best(speeds[side], left, speeds[_OFF])
        is_good = of_off >= _LEAST_OF_OFF and of_rival >= _LEAST_OF_BEST
        print(
            f"  {side} is {of_off:.2f} of off, {of_rival:.2f} of the best: {verdict(is_good)}",
            flush=True,
        )
        if not is_good:
            failures.append(f"{case}: {side}")
    return failures


def rows_of(model: Path, case: str, found: Found) -> list[Row]:
    """Return one row for each side: tokens per second."""
    speeds, notes = found
    return [
        Row(_NAME, case, side, "decode", "tok/s", tuple(values), notes[side], routing_of(model))
        for side, values in speeds.items()
    ]


async def measure(
    model: Path, options: argparse.Namespace, clock: Clock
) -> tuple[dict[str, Found], list[str], list[dict[str, Any]]]:
    """Return what was found in each case, what was required and failed, and the texts as llama.cpp gets them."""
    script = Script()
    config = engine_config(options.context, options.threads)
    # A text's prompt is computed once, and its answers behind it.
    scheduler = replace(config.scheduler, prefix_cache=True)
    config = replace(config, heat=replace(config.heat, saved=False), scheduler=scheduler)
    sides, rivals = scripted_sides(options.lengths, options.trees)
    cases: dict[str, Found] = {}
    failures: list[str] = []
    texts_asked: list[dict[str, Any]] = []
    opened = scripted_drafters(script, drafter_builder.open_drafters)
    with mock.patch.object(drafter_builder, "open_drafters", opened):
        async with Engine.open(model, config) as engine:
            prompt = random_prompt(engine.tokenizer.vocab_size, 32, 7)
            params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
            script.answer, _ = await answer(engine, prompt, params, ())
            speculators = Speculators(engine, script)
            for script.acceptance in options.acceptances:
                case, part = f"acceptance {script.acceptance:g}", clock.next_part()
                found, _ = await compare(engine, speculators, sides, prompt, params, options, part)
                cases[case] = found
                failures += judge(case, found[0], rivals)
            if options.text_tokens:
                texts_asked = await compare_texts(
                    engine, speculators, options, clock, cases, failures
                )
    return cases, failures, texts_asked


def texts() -> tuple[tuple[str, str], tuple[str, str]]:
    """Return a file of code with its edited form, and two pieces of prose that have little in common."""
    code = (_ROOT / "thermocline" / "kv" / "blocks.py").read_text()
    edited = code.replace("num_holders", "count_holders").replace("heapq", "heap_queue")
    prose = [(_ROOT / name).read_text() for name in ("SECURITY.md", "docs/numerics.md")]
    return (code, edited), (prose[0], prose[1])


async def compare_texts(
    engine: Engine,
    speculators: Speculators,
    options: argparse.Namespace,
    clock: Clock,
    cases: dict[str, Found],
    failures: list[str],
) -> list[dict[str, Any]]:
    """Measure lookup where it should help, and where it should not hurt; return each case's tokens."""
    sides: Sides = {_OFF: ((), None), "lookup": (("lookup",), None)}
    asked: list[dict[str, Any]] = []
    code, prose = texts()
    for case, (before, after), least in (
        ("code edit", code, _LEAST_CODE),
        ("prose", prose, _LEAST_PROSE),
    ):
        ids = await engine.encode(before, parse_special=False)
        prompt = list(ids)[: engine.max_context_tokens - options.text_tokens]
        params = forced(after, options.text_tokens)
        part = clock.next_part()
        found, written = await compare(engine, speculators, sides, prompt, params, options, part)
        cases[case] = found
        asked.append({"case": case, "prompt": prompt, "answer": list(written)})
        ratios = paired_ratios(found[0]["lookup"], found[0][_OFF])
        is_good = median(ratios) >= least
        note = found[1]["lookup"]
        print(f"{case}: lookup {spread(ratios, 2)} of off, {note}: {verdict(is_good)}", flush=True)
        if not is_good:
            failures.append(case)
    return asked


def compare_llama(
    python: str,
    model: Path,
    options: argparse.Namespace,
    asked: Sequence[dict[str, Any]],
    seconds: float,
) -> dict[str, Found]:
    """Return what llama.cpp takes for the same tokens, with and without prompt lookup; nothing where it can not."""
    command = [python, "-m", "benchmarks.llama_lookup", str(model.absolute())]
    cases: dict[str, Found] = {}
    end = time.perf_counter() + seconds
    try:
        with Child([*command, "--threads", str(options.threads), "--repack"]) as child:
            for number, request in enumerate(asked, 1):
                share = (end - time.perf_counter()) / (len(asked) - number + 1)
                found = _llama_case(child, request, options, share)
                if found is not None:
                    cases[f"{request['case']}, llama.cpp"] = found
    except SystemExit as error:
        print(f"llama.cpp is left out: {error}")
    return cases


def _llama_case(
    child: Child, request: dict[str, Any], options: argparse.Namespace, seconds: float
) -> Found | None:
    names = {drafted: f"lookup of {drafted}" if drafted else _OFF for drafted in _LLAMA_DRAFTED}
    speeds: dict[str, list[float]] = {name: [] for name in names.values()}
    notes = dict.fromkeys(speeds, "")
    start = time.perf_counter()
    for turn in range(options.repeats):
        for drafted, name in list(names.items())[:: -1 if turn % 2 else 1]:
            given = request | {"drafted": drafted, "context": options.context}
            got = child.ask(given)
            if not got["decode_s"]:
                print("llama.cpp's lookup is left out: it can not take back recurrent states")
                return None
            speeds[name].append((len(request["answer"]) - 1) / got["decode_s"])
            notes[name] = f"{got['accepted']} of {got['drafted']} accepted"
        taken = time.perf_counter() - start
        if taken * (turn + 2) / (turn + 1) > seconds:
            break
    shown = ", ".join(f"{name} {spread(values)}" for name, values in speeds.items())
    print(f"{request['case']}, llama.cpp, tokens/s: {shown}", flush=True)
    return speeds, notes


def larger_than_memory(
    model: Path, options: argparse.Namespace, seconds: float
) -> dict[str, Found]:
    """Return what a process found that has six tenths of the file's bytes of memory; nothing where that can not be."""
    limit = int(model.stat().st_size * _LIMIT_SHARE)
    command = [sys.executable, "-m", "benchmarks.speculation", str(model.absolute())]
    command += ["--threads", str(options.threads), "--seconds", f"{seconds:.0f}"]
    command += ["--tokens", str(options.group_tokens), "--repeats", str(options.repeats)]
    command += ["--text-tokens", "0", "--context", "512", "--patience", "0"]
    command += ["--acceptances", *map(str, options.group_acceptances)]
    command += [
        "--lengths",
        *map(str, options.group_lengths),
        "--trees",
        *map(str, options.group_trees),
    ]
    try:
        with memory_group(limit) as group:
            gc.collect()  # what still maps the file
            drop_pages(model)
            ran = subprocess.run(
                [*command, "--group", str(group)],
                cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
    except SystemExit as error:
        print(f"larger than memory is left out: {error}")
        return {}
    if ran.returncode:
        raise SystemExit(f"the run in a memory group ended with {ran.returncode}")
    cases: dict[str, Found] = json.loads(ran.stdout.splitlines()[-1])
    return {f"{case}, limit {limit >> 20} MiB": found for case, found in cases.items()}


def run_in_group(options: argparse.Namespace, model: Path) -> int:
    """Measure scripted drafts alone, as a process that has little memory; the last line is what was found."""
    (options.group / "cgroup.procs").write_text(str(os.getpid()))
    clock = Clock(options.seconds, [1.0] * len(options.acceptances))
    cases, _, _ = asyncio.run(measure(model, options, clock))
    print(json.dumps(cases))
    return 0


def run(options: argparse.Namespace, model: Path) -> int:
    """Measure `model`; 1 if a requirement does not hold."""
    if options.group is not None:
        return run_in_group(options, model)
    weights = [1.0] * len(options.acceptances) + [_TEXT_WEIGHT] * (2 * bool(options.text_tokens))
    clock = Clock(options.seconds, [*weights, _LLAMA_WEIGHT, _GROUP_WEIGHT])
    python = llama_python(options.llama_python)
    if python is None:
        print("llama.cpp is left out: no interpreter with llama_cpp (--llama-python names one)")
    cases: dict[str, Found] = {}
    failures: list[str] = []
    whole = QuietRounds(1, warm_ups=0, patience=0.0)  # what ran beside all of it
    for one in whole:
        with one:
            cases, failures, asked = asyncio.run(measure(model, options, clock))
            part = clock.next_part()
            if asked and python is not None:
                cases |= compare_llama(python, model, options, asked, part)
            part = clock.next_part()
            if options.group_acceptances:
                limited = larger_than_memory(model, options, part)
                rivals = scripted_sides(options.group_lengths, options.group_trees)[1]
                for case, (speeds, _) in limited.items():
                    failures += judge(case, speeds, rivals)
                cases |= limited
    rows = [row for case, found in cases.items() for row in rows_of(model, case, found)]
    heads = ["case", "side", "tokens/s", "drafts"]
    print(table(heads, [[row.case, row.side, spread(row.values), row.note] for row in rows]))
    print("all requirements hold" if not failures else "FAIL: " + "; ".join(failures))
    print(whole)
    write_rows(options.out, rows, describe_machine(options.threads) | whole.facts())
    return 1 if failures else 0


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for."""
    parser = model_parser("speculation", __doc__, "speculation.csv")
    parser.add_argument(
        "--seconds",
        type=float,
        default=1260.0,
        help="what all of it may take; each case runs at least once",
    )
    parser.add_argument("--tokens", type=int, default=64, help="of an answer with scripted drafts")
    parser.add_argument(
        "--text-tokens", type=int, default=192, help="of an answer that is a text; 0 for none"
    )
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=12, help="rounds of each case, at most")
    parser.add_argument(
        "--acceptances", type=float, nargs="+", default=[0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0]
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--trees", type=int, nargs="+", default=[2, 4, 8], metavar="NODES")
    parser.add_argument(
        "--group-acceptances",
        type=float,
        nargs="*",
        default=[0.0, 0.5, 0.9],
        help="larger than memory; none leaves that out",
    )
    parser.add_argument("--group-tokens", type=int, default=32)
    parser.add_argument("--group-lengths", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--group-trees", type=int, nargs="+", default=[4], metavar="NODES")
    parser.add_argument(
        "--group", type=Path, help="a memory group to enter; prints the figures as JSON"
    )
    parser.add_argument(
        "--llama-python",
        metavar="PYTHON",
        help="an interpreter with llama_cpp (or $THERMOCLINE_LLAMA_PYTHON)",
    )
    add_patience(parser)
    quick = {
        "tokens": 8, "text_tokens": 8, "context": 64, "repeats": 1, "acceptances": [0.5],
        "lengths": [2], "trees": [3], "patience": 0.0, "group_acceptances": [],
    }  # fmt: skip
    return run_on_model(parse(parser, arguments), quick, run)


if __name__ == "__main__":
    sys.exit(main())
