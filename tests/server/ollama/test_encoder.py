"""Ollama's lines out of steps: their order, and what the official client's types take."""

from __future__ import annotations

import json

import pytest
from ollama import ChatResponse, GenerateResponse

from tests.server.steps import (
    CALL,
    CUT_CALL,
    NUM_PROMPT,
    REASONING,
    SECOND_CALL,
    TEXT,
    answer_steps,
    whole_of,
)
from thermocline.server.core.steps import EndReason
from thermocline.server.ollama.encoder import OllamaChatEncoder, OllamaGenerateEncoder

NOW = "2026-01-02T03:04:05.000000Z"


def lines_of(encoder, steps):
    """Return the lines of a stream; each is one JSON object."""
    raw = encoder.prelude + b"".join(encoder.frames(step) for step in steps)
    assert raw.endswith(b"\n")
    return [json.loads(line) for line in raw.splitlines()]


@pytest.mark.parametrize("at_once", [False, True], ids=["stepwise", "at once"])
def test_a_chat_s_lines_come_in_order(at_once):
    """Thinking, text, each call whole, and one last line with the counts."""
    steps = answer_steps(*REASONING, *TEXT, *CALL, *SECOND_CALL, at_once=at_once)
    *lines, last = lines_of(OllamaChatEncoder("toy", NOW), steps)
    messages = [line["message"] for line in lines]
    assert [message.get("thinking") for message in messages[:2]] == ["Let me ", "think."]
    assert [message["content"] for message in messages[2:4]] == ["Hel", "lo"]
    called = [message["tool_calls"][0]["function"] for message in messages[4:]]
    assert called == [{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]
    assert not any(line["done"] for line in lines)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    for line in (*lines, last):
        assert ChatResponse.model_validate(line).created_at == NOW


def test_a_whole_chat_is_its_lines_in_one():
    """Text, thinking and calls are collected, and the counts are there; durations in nanoseconds."""
    body = whole_of(OllamaChatEncoder("toy", NOW), answer_steps(*REASONING, *TEXT, *CALL))
    answer = ChatResponse.model_validate(body)
    assert (answer.message.thinking, answer.message.content) == ("Let me think.", "Hello")
    assert answer.message.tool_calls[0].function.arguments == {"a": 1}
    assert (answer.prompt_eval_count, answer.eval_count) == (NUM_PROMPT, 7)
    assert (answer.prompt_eval_duration, answer.eval_duration) == (10**9, 2 * 10**9)
    assert answer.total_duration == 3_500_000_000


def test_a_generated_text_has_no_message():
    """Text is in response, reasoning in thinking, whole and streamed."""
    steps = answer_steps(*REASONING, *TEXT)
    body = whole_of(OllamaGenerateEncoder("toy", NOW), steps)
    assert "message" not in body
    answer = GenerateResponse.model_validate(body)
    assert (answer.thinking, answer.response) == ("Let me think.", "Hello")
    lines = lines_of(OllamaGenerateEncoder("toy", NOW), steps)
    assert "".join(line["response"] for line in lines) == "Hello"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [(EndReason.STOP, "stop"), (EndReason.LENGTH, "length"), (EndReason.TOOL_CALLS, "stop")],
)
def test_why_it_ended(reason, expected):
    """Ollama knows two reasons."""
    assert (
        whole_of(OllamaChatEncoder("toy", NOW), answer_steps(*TEXT, reason=reason))["done_reason"]
        == expected
    )


def test_a_call_that_was_cut_is_no_call():
    """Calls are shown whole or not at all."""
    body = whole_of(
        OllamaChatEncoder("toy", NOW), answer_steps(*TEXT, *CUT_CALL, reason=EndReason.LENGTH)
    )
    assert body["message"] == {"role": "assistant", "content": "Hello"}
    assert body["done_reason"] == "length"


def test_a_load_is_an_answer_of_nothing():
    """A request without messages is told that the model is there."""
    body = OllamaChatEncoder("toy", NOW).loaded()
    answer = ChatResponse.model_validate(body)
    assert (answer.done, answer.done_reason, answer.message.content) == (True, "load", "")
