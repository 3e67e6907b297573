"""Speculation changes no bit of an answer: whoever drafts, whatever is asked for, under any schedule."""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import pytest

from tests.support.arch_cases import ARCH_CASES
from tests.support.eager_device import eager_device
from tests.support.same_events import are_same, begin_same
from tests.support.scripted_drafters import HostileDrafter, ScriptedDrafter
from tests.support.settled import settled
from tests.support.toy_archs import write_toy_arch
from thermocline import (
    Engine,
    EngineConfig,
    PlacementConfig,
    PrefetchConfig,
    SamplingParams,
    SchedulerConfig,
    SpeculationConfig,
    TraceConfig,
)
from thermocline.config import CpuConfig, MemoryConfig
from thermocline.engine import drafter_builder
from thermocline.errors import ConfigError
from thermocline.messages import RequestOptions, TokenEvent
from thermocline.sampling.constraint import Constraint, ConstraintKind
from thermocline.speculation.contract import DrafterFacts
from thermocline.speculation.lookup import LookupDrafter
from thermocline.traces.events import SpanEvent
from thermocline.traces.lanes import Lane, Name

# The longer target sets more.
TIMES = int(os.environ.get("THERMOCLINE_SPECULATION", "1"))
NUM_REQUESTS = 10 * TIMES
LONGEST, CONTEXT = 40, 72
# Prompts that share beginnings of several lengths, and repeat themselves, so that there is something to look up.
STEM = [(7 * n + n * n) % 64 + 40 for n in range(LONGEST)]
PROMPTS = [
    *(STEM[:length] for length in (1, 16, 33)),
    [*STEM[:16], 5, 4, 3, 2, 1],
    [61, 62, 63, 64] * 8,
    [65] * 20,
]
CASES = [
    case
    for name in (
        "olmoe_default",
        "laguna_default",
        "qwen35moe_default",
        "lfm2moe_default",
        "nemotron_h_moe_default",
        "jamba_default",
    )
    for case in ARCH_CASES
    if str(case) == name
]
CONSTRAINTS = (
    Constraint(ConstraintKind.REGEX, "([a-f]{2,9},)*[0-9]{1,12}"),
    Constraint(ConstraintKind.CHOICE, '["aaaaaaaaab", "aaaaaaaaac", "b"]'),
    Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "array", "items": {"enum": ["ab", "ac"]}}'),
)


@dataclass(frozen=True)
class Request:
    """What is asked, and how."""

    prompt: tuple[int, ...]
    params: SamplingParams
    options: RequestOptions = field(default_factory=RequestOptions)
    rounds: int = 0
    """Turns of the loop to wait before asking."""
    taken: int | None = None
    """Events after which the reader goes away."""


@dataclass
class Answer:
    """All that a reader sees, but for times."""

    events: list[TokenEvent] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0


async def ask(engine: Engine, request: Request) -> Answer:
    answer = Answer()
    for _ in range(request.rounds):
        await asyncio.sleep(0)
    async with aclosing(engine.events(request.prompt, request.params, request.options)) as events:
        async for event in events:
            if not isinstance(event, TokenEvent):
                continue
            if event.timings is not None:
                answer.num_drafted = event.timings.drafts.num_drafted
                answer.num_accepted = event.timings.drafts.num_accepted
            routing = None if event.routing is None else event.routing.tolist()
            answer.events.append(replace(event, request=0, timings=None, routing=routing))
            if len(answer.events) == request.taken:
                break
    return answer


def random_request(chance: random.Random) -> Request:
    """Return a request of any kind, of which the same numbers make the same."""
    constraint = chance.choice((None, None, None, *CONSTRAINTS))
    params = SamplingParams(
        max_tokens=chance.choice((1, 2, 9, 20, 28, 28)),
        temperature=chance.choice((0.0, 0.0, 0.3, 1.0, 2.0)),
        top_k=chance.choice((0, 0, 5)),
        top_p=chance.choice((1.0, 0.8)),
        min_p=chance.choice((0.0, 0.02)),
        seed=chance.randrange(1 << 30),
        repetition_penalty=chance.choice((1.0, 1.0, 1.3)),
        presence_penalty=chance.choice((0.0, 0.0, 0.7)),
        frequency_penalty=chance.choice((0.0, 0.0, -0.5)),
        stop=chance.choice(((), (), (), ("a",), ("e", "bc", "1"))),
        ignore_eos=constraint is None and chance.random() < 0.9,
        min_tokens=chance.choice((0, 0, 1)),
        logprobs=chance.choice((None, 0, 3)),
        constraint=constraint,
    )
    options = RequestOptions(priority=chance.choice((0, 0, 1)), wants_routing=chance.random() < 0.2)
    return Request(tuple(chance.choice(PROMPTS)), params, options)


def random_config(chance: random.Random) -> EngineConfig:
    """Return any schedule, from room for all requests to room for hardly more than one, which forces preemption."""
    fixed = chance.choice((None, 1, 2, 3, 5, 16, 16))
    return EngineConfig(
        memory=MemoryConfig(
            max_context_tokens=CONTEXT,
            max_full_contexts=chance.choice((1, 1, 2, 8)),
            block_tokens=chance.choice((1, 4, 16)),
            max_windows=chance.choice((2, 32)),
        ),
        scheduler=SchedulerConfig(
            prefill_chunk_tokens=chance.choice((1, 7, 16, 512)),
            max_prompt_chunks=chance.randint(1, 3),
            prefix_cache=chance.random() < 0.7,
            overlap=chance.random() < 0.7,
            expected_answer_tokens=chance.choice((0, 0, 512)),
        ),
        placement=PlacementConfig(
            hot_device=chance.choice(("none", "none", "cpu", "simulated")), hot_fraction=0.4
        ),
        prefetch=PrefetchConfig(mode=chance.choice(("off", "on"))),
        cpu=CpuConfig(threads=chance.randint(1, 2)),
        speculation=SpeculationConfig(
            fixed_tokens=fixed, max_draft_states=chance.choice((3, 32, 32))
        ),
    )


async def answers_without(
    path, requests: list[Request], placement: PlacementConfig | None = None
) -> list[Answer]:
    """Return each answer alone, one row a step. placement: None for the CPU alone."""
    config = EngineConfig(
        placement=placement or PlacementConfig(),
        memory=MemoryConfig(max_context_tokens=CONTEXT),
        scheduler=SchedulerConfig(max_prompt_chunks=1, prefix_cache=False, overlap=False),
        prefetch=PrefetchConfig(mode="off"),
        cpu=CpuConfig(threads=1),
        speculation=SpeculationConfig(drafters="off"),
    )
    async with Engine.open(path, config) as engine:
        return [await ask(engine, request) for request in requests]


async def answers_with(path, config: EngineConfig, requests: list[Request]) -> list[Answer]:
    """Return the answers of requests that run together, once all of them left nothing."""
    async with Engine.open(path, config) as engine:
        answers = await asyncio.gather(*(ask(engine, request) for request in requests))
        await settled(engine)
        states = engine._parts.step_loop._scheduler._blocks._states
        if states is not None:
            assert states._slots.num_free == states.max_running
            assert states._slots._num_borrowed == 0
    return answers


def known_answers(requests: list[Request], answers: list[Answer]) -> dict:
    known: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for request, answer in zip(requests, answers, strict=True):
        tokens = tuple(token for event in answer.events for token in event.token_ids)
        known.setdefault(request.prompt, []).append(tokens)
    return known


@pytest.fixture(scope="module", params=CASES, ids=str)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("toy") / f"{request.param}.gguf"
    write_toy_arch(path, request.param.toy)
    return path


@pytest.mark.slow
def test_no_draft_changes_an_answer(model, monkeypatch):
    """Seeds, penalties, forms, stop strings, log-probabilities and routing are those of one row a step, to the bit.

    With batches, shared prefixes, preemption, readers that leave, and every size of chunks and drafts; blocks and states
    are free at the end.
    """
    chance = random.Random(model.name)
    requests = [random_request(chance) for _ in range(NUM_REQUESTS)]
    expected = asyncio.run(answers_without(model, requests))
    known = known_answers(requests, expected)
    total_accepted = first = 0
    while first < len(requests):
        batch = slice(first, first + chance.choice((1, 2, 4, 8)))
        first = batch.stop
        facts = DrafterFacts("scripted", computes=chance.random() < 0.5)
        acceptance, branches = chance.choice((0.4, 0.8, 0.9, 1.0)), chance.choice((0, 0, 3, 9))
        scripted = ScriptedDrafter(acceptance, known, facts, branches=branches)
        drafters = [scripted, HostileDrafter(first), LookupDrafter()]
        monkeypatch.setattr(drafter_builder, "open_drafters", lambda _, those=drafters: those)
        names = (("scripted",), ("scripted",), ("hostile",), ("lookup",), None, ())
        mine = [
            replace(
                one,
                options=replace(one.options, speculate=chance.choice(names)),
                rounds=chance.randrange(20),
                taken=chance.choice((None, None, None, None, 3)),
            )
            for one in requests[batch]
        ]
        config = random_config(chance)
        with eager_device():
            answers = asyncio.run(answers_with(model, config, mine))
        for asked, answer, alone in zip(mine, answers, expected[batch], strict=True):
            same = are_same if asked.taken is None else begin_same
            assert same(answer.events, alone.events), (asked, config)
            total_accepted += answer.num_accepted
    assert total_accepted, "no draft was ever right, which tests nothing"


async def speculate(path, config: EngineConfig, request: Request) -> tuple[Answer, Engine]:
    async with Engine.open(path, config) as engine:
        answer = await ask(engine, request)
        await settled(engine)
        return answer, engine


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy") / "toy.gguf"
    write_toy_arch(path, CASES[0].toy)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("computes", [False, True])
def test_steps_are_saved_and_seen(plain_model, monkeypatch, computes):
    """With a drafter that is always right four tokens take one step; counters and the timeline say so."""
    params = SamplingParams(max_tokens=26, ignore_eos=True)
    request = Request(tuple(STEM), params)
    (alone,) = asyncio.run(answers_without(plain_model, [request]))
    facts = DrafterFacts("scripted", computes=computes)
    drafter = ScriptedDrafter(1.0, known_answers([request], [alone]), facts)
    monkeypatch.setattr(drafter_builder, "open_drafters", lambda _: [drafter])
    config = EngineConfig(
        speculation=SpeculationConfig(fixed_tokens=3), trace=TraceConfig(enabled=True)
    )
    answer, engine = asyncio.run(speculate(plain_model, config, request))
    assert are_same(answer.events, alone.events)
    # One token from the prompt's chunk, then 25: six steps of four, and the last token's.
    assert [each.num_accepted for each in drafter.told[1:]] == [3] * 6
    assert (answer.num_drafted, answer.num_accepted) == (18, 18)
    assert dict(engine.statistics().drafts) == {"scripted": (18, 18)}
    spans = [event for event in engine.trace_events() if isinstance(event, SpanEvent)]
    verified = [span.args for span in spans if span.name is Name.VERIFY]
    assert [(each["drafted"], each["accepted"], each["tokens"]) for each in verified] == [
        (3, 3, 4)
    ] * 6
    drafts = [span for span in spans if (span.lane, span.name) == (Lane.DRAFT, Name.DRAFT)]
    assert [span.args["tokens"] for span in drafts] == [3] * 6
    choice = next(each for each in engine.choices() if each.name == "speculation")
    assert choice.value == "scripted"


@pytest.mark.slow
def test_why_it_is_off_is_told(plain_model):
    """In the timings, and among the choices."""
    config = EngineConfig(speculation=SpeculationConfig(drafters="off"))
    params = SamplingParams(max_tokens=3, ignore_eos=True)

    async def told() -> tuple[object, ...]:
        async with Engine.open(plain_model, config) as engine:
            events = [event async for event in engine.generate(STEM, params)]
            (choice,) = (each for each in engine.choices() if each.name == "speculation")
            return events[-1].timings.drafts, choice

    drafts, choice = asyncio.run(told())
    assert drafts.num_drafted == 0
    assert "turned off" in drafts.why_off
    assert (choice.value, choice.why) == ("off", "asked for (--speculate)")


def test_a_drafter_that_there_is_not_is_refused(plain_model):
    """A setting names what there is."""
    for text in ("nobody", "", "lookup,", "lookup,nobody"):
        config = EngineConfig(speculation=SpeculationConfig(drafters=text))
        with pytest.raises(ConfigError, match=r"--speculate.*auto, off, lookup"):
            asyncio.run(answers_with(plain_model, config, []))
