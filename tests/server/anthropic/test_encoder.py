"""Anthropic's messages out of steps: the order of events, and what the official client's types take."""

from __future__ import annotations

import pytest
from anthropic.types import Message, RawMessageStreamEvent
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
    stream_of,
    whole_of,
)
from thermocline.server.anthropic.encoder import MessageEncoder
from thermocline.server.core.steps import EndReason

EVENT = TypeAdapter(RawMessageStreamEvent)
START, DELTA, STOP = "content_block_start", "content_block_delta", "content_block_stop"

CASES = {
    "text": (TEXT, [START, DELTA, DELTA, STOP]),
    "reasoning": (REASONING, [START, DELTA, DELTA, DELTA, STOP]),
    "reasoning and text": (
        REASONING + TEXT,
        [START, DELTA, DELTA, DELTA, STOP, START, DELTA, DELTA, STOP],
    ),
    "call": (CALL, [START, DELTA, DELTA, STOP]),
    "call without arguments": (NO_ARGUMENTS, [START, STOP]),
    "text and calls": (
        TEXT + CALL + SECOND_CALL,
        [START, DELTA, DELTA, STOP, START, DELTA, DELTA, STOP, START, DELTA, STOP],
    ),
    "nothing": ((), []),
}


def encoder():
    return MessageEncoder("toy", NUM_PROMPT)


@pytest.mark.parametrize("at_once", [False, True], ids=["stepwise", "at once"])
@pytest.mark.parametrize(("pieces", "order"), CASES.values(), ids=CASES)
def test_events_come_in_order(pieces, order, at_once):
    """Start, ping, the blocks one after the other, the delta with the counts, stop."""
    events = stream_of(encoder(), answer_steps(*pieces, at_once=at_once))
    assert [event["type"] for event in events] == [
        "message_start",
        "ping",
        *order,
        "message_delta",
        "message_stop",
    ]
    for event in events:
        if event["type"] != "ping":  # the client drops it before its types
            EVENT.validate_python(event, strict=True)
    indexes = [event["index"] for event in events if "index" in event]
    assert indexes == sorted(indexes)


@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [
        (EndReason.STOP, None, "end_turn"),
        (EndReason.STOP, "end", "stop_sequence"),
        (EndReason.LENGTH, None, "max_tokens"),
        (EndReason.TOOL_CALLS, None, "tool_use"),
    ],
)
def test_why_it_ended(reason, stop, expected):
    """Each reason has Anthropic's name, whole and streamed, and a stop string is shown."""
    steps = answer_steps(*TEXT, reason=reason, stop=stop)
    end = {"stop_reason": expected, "stop_sequence": stop}
    whole = whole_of(encoder(), steps)
    assert {name: whole[name] for name in end} == end
    assert stream_of(encoder(), steps)[-2]["delta"] == end


def test_the_whole_message_has_every_block():
    """Thinking with a signature, text, and calls with their parsed arguments."""
    body = whole_of(
        encoder(), answer_steps(*REASONING, *TEXT, *CALL, *SECOND_CALL, reason=EndReason.TOOL_CALLS)
    )
    message = Message.model_validate(body, strict=True)
    thinking, text, first, second = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Let me think.")
    assert thinking.signature
    assert (text.type, text.text) == ("text", "Hello")
    assert (first.name, first.input) == ("add", {"a": 1})
    assert (second.name, second.input) == ("now", {})
    assert first.id != second.id
    assert message.id.startswith("msg_")


def test_the_counts_tell_what_the_cache_knew():
    """input_tokens and cache_read_input_tokens add up to the prompt; the last event has them too."""
    steps = answer_steps(*TEXT)
    usage = {
        "input_tokens": NUM_PROMPT - NUM_CACHED,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": NUM_CACHED,
        "output_tokens": 2,
    }
    assert whole_of(encoder(), steps)["usage"] == usage
    start, *_, delta, _ = stream_of(encoder(), steps)
    assert delta["usage"] == usage
    assert start["message"]["usage"]["input_tokens"] == NUM_PROMPT


def test_a_call_that_was_cut_is_no_call():
    """Nobody can run half of the arguments: whole answers leave it out, streams end its block."""
    steps = answer_steps(*TEXT, *CUT_CALL, reason=EndReason.LENGTH)
    body = whole_of(encoder(), steps)
    assert [block["type"] for block in body["content"]] == ["text"]
    assert body["stop_reason"] == "max_tokens"
    events = stream_of(encoder(), steps)
    assert [event["type"] for event in events[-3:]] == [STOP, "message_delta", "message_stop"]
