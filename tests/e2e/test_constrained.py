"""Forms and calls are valid on every answer of a trained and of a random model, on every schedule."""

from __future__ import annotations

import asyncio
import json
import re
import threading

import numpy as np
import pytest

from tests.support.toy_model import ToyShape, write_toy_model
from thermocline import Engine, EngineConfig, SamplingParams, SchedulerConfig
from thermocline.config import MemoryConfig
from thermocline.demo import DEMO_MODEL_PATH
from thermocline.errors import EngineClosedError, RequestError
from thermocline.messages import FinishReason
from thermocline.sampling.constraint import Constraint, ConstraintKind
from thermocline.sampling.sampler import Sampler
from thermocline.server.core.structured import FormatFields, plan_format
from thermocline.text.pieces import TextPiece, ToolCallArguments, ToolCallBegin
from thermocline.text.templates.template_facts import NO_TEMPLATE
from thermocline.text.tool_calls.format_table import HERMES, PLAIN, XML
from thermocline.text.tool_calls.tool_formats import TemplateFacts

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Home"}]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {
        "Home": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 4}},
            "required": ["city"],
            "additionalProperties": False,
        }
    },
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Oslo", "Rome"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                    "units": {"type": "array", "items": {"enum": ["C", "F"]}, "maxItems": 2},
                },
                "required": ["city", "days"],
            },
        },
    },
    {"type": "function", "function": {"name": "clock"}},
]


def is_person(text):
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags", "home"]
        and len(value["name"]) <= 8
        and 0 <= value["age"] <= 120
        and set(value["tags"]) <= {"a", "b"}
        and (value["home"] is None or len(value["home"]["city"]) <= 4)
    )


def strict(schema):
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}


FORMS = {
    "schema": ({"response_format": strict(PERSON)}, is_person),
    "regex": (
        {"structured_outputs": {"regex": r"\d{4}-\d{2}"}},
        lambda text: re.fullmatch(r"\d{4}-\d{2}", text),
    ),
    "choice": (
        {"structured_outputs": {"choice": ["red", "green", "bläu"]}},
        lambda text: text in ("red", "green", "bläu"),
    ),
    "grammar": (
        {"structured_outputs": {"grammar": 'root ::= "(" [0-9] ("+" [0-9])? ")"'}},
        lambda text: re.fullmatch(r"\([0-9](\+[0-9])?\)", text),
    ),
}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A model of random weights: the hardest to hold to a form."""
    return write_toy_model(tmp_path_factory.mktemp("models") / "toy.gguf", ToyShape(context=1024))


async def answered(engine, facts, fields, seed, *, max_tokens=700, prompt="Tell me.", tells=True):
    """Return text, token ids, reason and the pieces that the plan's parser makes of one answer.

    tells: the prompt lists the tools.
    """
    plan = plan_format(facts, FormatFields(**fields))
    prompt_ids = await engine.encode_chat(
        [{"role": "user", "content": prompt}],
        tools=plan.tools if tells else None,
        variables=plan.template_variables,
    )
    end = engine.tokenizer.decode(prompt_ids[-16:], skip_special=False)
    form = plan.for_prompt(end)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0,
        seed=seed,
        constraint=form.constraint,
        reasoning_budget=form.reasoning_budget,
    )
    parser, pieces, text, tokens, reason = form.make_parser(), [], "", [], None
    async for event in engine.generate(prompt_ids, params):
        text += event.text
        tokens += event.token_ids
        pieces += parser.push(event.text) if event.text else ()
        reason = event.finish_reason
    return text, tokens, reason, [*pieces, *parser.flush()]


async def many(engine, facts, fields, seeds, **how):
    return await asyncio.gather(*(answered(engine, facts, fields, s, **how) for s in seeds))


def calls_of(pieces):
    """Return the calls in `pieces`; nothing else may be in them."""
    calls = []
    for piece in pieces:
        match piece:
            case ToolCallBegin(index, name):
                assert index == len(calls)
                calls.append([name, ""])
            case ToolCallArguments(index, text):
                calls[index][1] += text
            case _:
                raise AssertionError(f"beside the calls there is {piece}")
    return [(name, json.loads(arguments)) for name, arguments in calls]


def fits_its_tool(call):
    name, arguments = call
    if name == "clock":
        return arguments == {}
    return (
        set(arguments) - {"units"} == {"city", "days"}
        and arguments["city"] in ("Oslo", "Rome")
        and 1 <= arguments["days"] <= 9
        and set(arguments.get("units", ())) <= {"C", "F"}
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", ["toy", "demo"])
async def test_every_form_is_held(toy, model):
    """At temperature 1 and any seed, each answer is of its form and ends by itself."""
    async with Engine.open(toy if model == "toy" else DEMO_MODEL_PATH) as engine:
        for name, (fields, is_valid) in FORMS.items():
            for text, _, reason, _ in await many(engine, NO_TEMPLATE, fields, range(6)):
                assert reason is FinishReason.STOP, (name, text)
                assert is_valid(text), (name, text)


@pytest.mark.slow
async def test_any_object_is_an_object(toy):
    """json_object answers that end are objects; those that do not are cut, and say so."""
    fields = {"response_format": {"type": "json_object"}}
    async with Engine.open(toy) as engine:
        answers = await many(engine, NO_TEMPLATE, fields, range(8), max_tokens=120)
    ended = [text for text, _, reason, _ in answers if reason is FinishReason.STOP]
    assert ended
    assert all(isinstance(json.loads(text), dict) for text in ended)
    assert all(text.startswith("{") for text, *_ in answers)
    assert {reason for _, _, reason, _ in answers} <= {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "form"), [("toy", HERMES), ("toy", XML), ("toy", PLAIN), ("demo", HERMES)]
)
async def test_every_call_fits_its_tool(toy, model, form):
    """Required and named calls, several or one, come out of the parser as calls that fit."""
    facts = TemplateFacts(form)
    async with Engine.open(toy if model == "toy" else DEMO_MODEL_PATH) as engine:
        num_calls = []
        for choice, parallel in (("required", True), ("required", False), (NAMED, False)):
            fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel}
            limit = 250 if parallel else 700
            answers = await many(engine, facts, fields, range(5), max_tokens=limit)
            for text, _, reason, pieces in answers:
                if reason is FinishReason.LENGTH:
                    assert parallel, text  # several calls may go on for long
                    continue
                calls = calls_of(pieces)
                num_calls.append(len(calls))
                assert calls, text
                assert parallel or len(calls) == 1, text
                assert choice == "required" or calls[0][0] == "weather", text
                assert all(map(fits_its_tool, calls)), text
        assert len(num_calls) > 10


@pytest.mark.slow
@pytest.mark.parametrize("form", [HERMES, XML, PLAIN], ids=str)
async def test_a_call_that_begins_by_itself_fits(toy, form):
    """With tool_choice auto text is free, and a call in it fits its tool even on a random model."""
    plan = plan_format(TemplateFacts(form), FormatFields(tools=TOOLS)).for_prompt("")
    start = {"hermes": "So: <tool_call>", "xml": "So: <function=", "plain": "{"}[form.name]
    num_calls = 0
    async with Engine.open(toy) as engine:
        vocabulary = engine.tokenizer
        matcher = await asyncio.wrap_future(engine._parts.text.grammars.submit(plan.constraint))
        for seed in range(8):
            chooser = Sampler(
                SamplingParams(temperature=1.0, seed=seed),
                vocab_size=vocabulary.vocab_size,
                end_ids=vocabulary.end_ids,
                prompt_ids=[1],
                matcher=matcher,
            )
            output = vocabulary.encode(start)  # a random model would hardly write it by itself
            logits = np.random.default_rng(seed).standard_normal((300, vocabulary.vocab_size))
            for row in logits.astype(np.float32):
                output.append(chooser.sample(row, output).token_id)
                if output[-1] in vocabulary.end_ids or chooser.is_complete(output):
                    break
            parser = plan.make_parser()
            pieces = [*parser.push(vocabulary.decode(output)), *parser.flush()]
            called = [piece for piece in pieces if not isinstance(piece, TextPiece)]
            names = [piece.name for piece in called if isinstance(piece, ToolCallBegin)]
            assert names
            assert set(names) <= {"weather", "clock"}
            ends_in_call = isinstance(pieces[-1], ToolCallArguments) and len(output) >= 300
            if not ends_in_call:
                calls = calls_of(called)
                assert all(map(fits_its_tool, calls))
                num_calls += len(calls)
    assert num_calls > 5


@pytest.mark.slow
async def test_schedules_do_not_change_constrained_answers(toy):
    """One by one, batched, in small chunks, and preempted: seeded constrained answers have equal tokens."""
    fields, _ = FORMS["schema"]
    tool_fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    asked = [(fields, seed) for seed in range(3)] + [(tool_fields, seed) for seed in range(3)]
    long_prompt = "word " * 30

    async def tokens(engine, fields, seed):
        how = {
            "max_tokens": 250,
            "prompt": f"{seed} {long_prompt}",
            "tells": False,
        }  # no shared prompt, so that room is short
        answer = await answered(engine, NO_TEMPLATE, fields, seed, **how)
        return answer[1]

    async with Engine.open(toy) as engine:
        expected = [await tokens(engine, *one) for one in asked]
    tight = MemoryConfig(max_context_tokens=480, max_full_contexts=1)
    for config in (
        EngineConfig(),
        EngineConfig(scheduler=SchedulerConfig(prefill_chunk_tokens=7)),
        EngineConfig(memory=tight, scheduler=SchedulerConfig(expected_answer_tokens=0)),
    ):
        async with Engine.open(toy, config) as engine:
            for form in (fields, tool_fields):  # compiled now, so that all answers start together
                await tokens(engine, form, 9)
            for _ in range(5):
                assert await asyncio.gather(*(tokens(engine, *one) for one in asked)) == expected
                # On a busy machine some may have ended before the last one begins.
                if config.memory is not tight or (await engine.snapshot()).total_preemptions:
                    break
            else:
                pytest.fail("nothing was preempted")
            await engine.check_integrity()


@pytest.mark.slow
async def test_a_long_compilation_stalls_nobody(toy, monkeypatch):
    """While a grammar is compiled, other answers go on; one that takes too long is refused by name."""
    held = threading.Event()
    monkeypatch.setattr("thermocline.engine.request_events._COMPILE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(
        "thermocline.sampling.matcher.grammar_text",
        lambda constraint: held.wait(10) and "start: /a/",
    )
    constraint = Constraint(ConstraintKind.REGEX, "a", param="structured_outputs.regex")
    async with Engine.open(toy) as engine:
        waiting = asyncio.create_task(_text(engine, SamplingParams(constraint=constraint)))
        free = SamplingParams(max_tokens=20, ignore_eos=True)
        async with asyncio.timeout(8):  # less than the compilation is held
            await _text(engine, free)
        with pytest.raises(RequestError, match="not compiled") as caught:
            await waiting
        assert caught.value.param == "structured_outputs.regex"
        held.set()


async def test_a_closed_engine_compiles_nothing(toy):
    """A constrained request after the end is refused like any other."""
    async with Engine.open(toy) as engine:
        await engine.prepare_constraints()
    with pytest.raises(EngineClosedError):
        await _text(engine, SamplingParams(constraint=Constraint(ConstraintKind.JSON_OBJECT)))


async def _text(engine, params):
    return "".join([event.text async for event in engine.generate([1, 2, 3], params)])
