"""What a random model writes under each format's grammar comes out of its parser as calls that fit."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import numpy as np
import pytest

from tests.support.format_vocabulary import control_words, vocabulary
from thermocline.sampling.matcher import Grammars
from thermocline.sampling.params import SamplingParams
from thermocline.sampling.sampler import Sampler
from thermocline.server.structured import FormatFields, plan_format
from thermocline.text.detokenizer import Detokenizer
from thermocline.text.format_table import FORMATS
from thermocline.text.pieces import TextPiece, ToolCallArguments, ToolCallBegin
from thermocline.text.template_facts import read_template

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "hourly": {"type": "boolean"},
        "note": {"type": ["string", "null"], "maxLength": 5},
        "area": {"anyOf": [{"type": "integer", "minimum": 10, "maximum": 99}, {"type": "null"}]},
        "place": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 4},
                "tags": {
                    "type": "array",
                    "items": {"type": "string", "maxLength": 3},
                    "maxItems": 2,
                },
            },
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "code", "days", "place", "note"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "get_clock": {"type": "object", "additionalProperties": False}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "d", "parameters": schema, "strict": True},
    }
    for name, schema in SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "weather"}}
KINDS = ("text", "control")
ROWS = [pytest.param(row, kind, id=f"{row}-{kind}") for row in FORMATS for kind in KINDS]


def facts_of(row, kind):
    words = control_words(row) if kind == "control" else ()
    tokens = vocabulary(words)
    facts = read_template("tools", row, tokens)
    marks = row.reasoning
    return tokens, replace(facts, reasoning=marks)


def written(tokens, form, seed, start=(), max_tokens=900):
    """Return the parser's pieces of a random answer, and whether it ended by itself."""
    grammars = Grammars(tokens)
    chooser = Sampler(
        SamplingParams(temperature=1.0, seed=seed),
        vocab_size=tokens.vocab_size,
        end_ids=tokens.end_ids,
        prompt_ids=[1],
        matcher=grammars.matcher(form.constraint),
    )
    rng = np.random.default_rng(seed)
    output = list(start)
    while len(output) < max_tokens:
        if chooser.is_complete(output):
            break
        row = rng.standard_normal(tokens.vocab_size).astype(np.float32)
        output.append(chooser.sample(row, output).token_id)
        if output[-1] in tokens.end_ids:
            break
    detokenizer = Detokenizer(tokens, shown=form.shown_token_ids)
    parser = form.make_parser()
    pieces = []
    for token in output:
        if token not in tokens.end_ids:
            pieces += parser.push(detokenizer.push(token))
    pieces += parser.flush()
    return pieces, len(output) < max_tokens


def calls_of(pieces):
    calls = []
    for piece in pieces:
        if isinstance(piece, ToolCallBegin):
            assert piece.index == len(calls)
            calls.append([piece.name, ""])
        elif isinstance(piece, ToolCallArguments):
            calls[piece.index][1] += piece.text
    return calls


def check(calls):
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize(("row", "kind"), ROWS)
def test_required_calls_fit_their_tools(row, kind):
    """Required and named calls, one or several: names, arguments and their number are as asked."""
    tokens, facts = facts_of(row, kind)
    end = "" if row.messages is None else row.messages.next
    num_ended = 0
    for seed, (choice, parallel) in enumerate(
        [("required", False), (NAMED, False), ("required", True)]
    ):
        fields = FormatFields(tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel)
        marks = facts.reasoning
        form = plan_format(facts, fields).for_prompt(end + (marks.end if marks else ""))
        pieces, ended = written(tokens, form, seed)
        calls = calls_of(pieces)
        assert not any(isinstance(piece, TextPiece) for piece in pieces), pieces
        assert calls
        if ended:
            num_ended += 1
            check(calls)
            assert parallel or len(calls) == 1
            assert choice == "required" or calls[0][0] == "weather"
    assert num_ended >= 2
