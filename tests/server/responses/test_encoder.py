"""OpenAI's responses out of steps: the order of events, and what the official client's types take."""

from __future__ import annotations

import json

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.steps import (
    CALL,
    CUT_CALL,
    NO_ARGUMENTS,
    NUM_CACHED,
    NUM_PROMPT,
    REASONING,
    SECOND_CALL,
    TEXT,
    answer_steps,
    read_events,
    stream_of,
    whole_of,
)
from thermocline.errors import BusyError
from thermocline.server.core.steps import EndReason
from thermocline.server.responses.encoder import ResponseEncoder
from thermocline.server.responses.schema import ResponsesRequest

EVENT = TypeAdapter(ResponseStreamEvent)
ITEM, PART = "output_item.added", "content_part.added"
PART_DONE, ITEM_DONE = "content_part.done", "output_item.done"
SAID, SAID_ALL = "output_text.delta", "output_text.done"
THOUGHT, THOUGHT_ALL = "reasoning_text.delta", "reasoning_text.done"
CALLED, CALLED_ALL = "function_call_arguments.delta", "function_call_arguments.done"

OF_TEXT = [ITEM, PART, SAID, SAID, SAID_ALL, PART_DONE, ITEM_DONE]
OF_REASONING = [ITEM, PART, THOUGHT, THOUGHT, THOUGHT_ALL, PART_DONE, ITEM_DONE]
OF_CALL = [ITEM, CALLED, CALLED, CALLED_ALL, ITEM_DONE]

CASES = {
    "text": (TEXT, OF_TEXT),
    "reasoning": (REASONING, OF_REASONING),
    "reasoning and text": (REASONING + TEXT, OF_REASONING + OF_TEXT),
    "call": (CALL, OF_CALL),
    "call without arguments": (NO_ARGUMENTS, [ITEM, CALLED_ALL, ITEM_DONE]),
    "text and calls": (
        TEXT + CALL + SECOND_CALL,
        [*OF_TEXT, *OF_CALL, ITEM, CALLED, CALLED_ALL, ITEM_DONE],
    ),
    "nothing": ((), []),
}


def encoder(**fields):
    return ResponseEncoder(ResponsesRequest(input="hello", **fields), "toy", 1700000000)


@pytest.mark.parametrize("at_once", [False, True], ids=["stepwise", "at once"])
@pytest.mark.parametrize(("pieces", "order"), CASES.values(), ids=CASES)
def test_events_come_in_order(pieces, order, at_once):
    """Created, in progress, each item from added to done, completed; numbered from 0 on."""
    events = stream_of(encoder(), answer_steps(*pieces, at_once=at_once))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        *order,
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event, strict=True)
    indexes = [event["output_index"] for event in events if "output_index" in event]
    assert indexes == sorted(indexes)


def test_done_items_are_those_of_the_response():
    """What was streamed piece by piece is in the done events, and in the response at the end."""
    pieces = (*REASONING, *TEXT, *CALL)
    events = stream_of(encoder(), answer_steps(*pieces, reason=EndReason.TOOL_CALLS))
    done = [event["item"] for event in events if event["type"].endswith(ITEM_DONE)]
    assert done == events[-1]["response"]["output"]
    added = [event["item"] for event in events if event["type"].endswith(ITEM)]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert added[2]["call_id"] == done[2]["call_id"]
    texts: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
    assert list(texts.values()) == ["Let me think.", "Hello", '{"a":1}']


def test_the_whole_response_is_the_stream_s_last():
    """Whole and streamed answers differ in their random ids only."""

    def plain(body):
        body = json.loads(json.dumps(body)) | {"id": ""}
        return body | {"output": [i | {"id": "", "call_id": ""} for i in body["output"]]}

    steps = answer_steps(*REASONING, *TEXT, *CALL)
    whole = whole_of(encoder(), steps)
    response = Response.model_validate(whole, strict=True)
    assert response.output_text == "Hello"
    assert plain(whole) == plain(stream_of(encoder(), steps)[-1]["response"])


def test_an_answer_that_was_cut_is_incomplete():
    """The reason is there, and the item that was open says that it is not whole."""
    events = stream_of(encoder(), answer_steps(*TEXT, *CUT_CALL, reason=EndReason.LENGTH))
    assert events[-1]["type"] == "response.incomplete"
    response = Response.model_validate(events[-1]["response"], strict=True)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in response.output] == ["completed", "incomplete"]


def test_the_counts():
    """Tokens of the prompt, of them cached; tokens of the answer, of them reasoning."""
    body = whole_of(encoder(), answer_steps(*REASONING, *TEXT))
    assert body["usage"] == {
        "input_tokens": NUM_PROMPT,
        "input_tokens_details": {"cached_tokens": NUM_CACHED, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": NUM_PROMPT + 4,
    }


def test_what_was_asked_is_repeated():
    """Instructions, tools, limits and format are those of the request, in the client's types."""
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    schema = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}}
    asked = {
        "instructions": "Be kind.",
        "metadata": {"a": "b"},
        "max_output_tokens": 7,
        "temperature": 0.5,
        "tool_choice": {"type": "function", "name": "add"},
    }
    body = encoder(tools=[tool, {"type": "web_search"}], **asked)
    body = whole_of(body, answer_steps(*TEXT))
    Response.model_validate(body, strict=True)
    assert {name: body[name] for name in asked} == asked
    assert body["tools"] == [tool | {"description": None, "strict": True}]
    assert schema["name"] == "answer"


def test_a_failure_is_an_event():
    """A stream that breaks ends with response.failed, numbered on, with what it had."""
    made = encoder()
    steps = answer_steps(*TEXT, *REASONING)[:4]
    raw = made.prelude + b"".join(map(made.frames, steps)) + made.failure(BusyError("it broke"))
    events = read_events(raw)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.failed"
    EVENT.validate_python(events[-1], strict=True)
    response = events[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "rate_limit_exceeded", "message": "it broke"}
    assert [item["type"] for item in response["output"]] == ["message"]
