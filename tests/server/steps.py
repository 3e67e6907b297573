"""Steps of answers that nobody computed, and a strict reader of the named events that encoders make of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from thermocline.messages import Timings
from thermocline.server.core.steps import (
    AnswerStep,
    ChoiceEnd,
    EndReason,
    GenerationStep,
    PromptStep,
)
from thermocline.text.pieces import ReasoningPiece, TextPiece, ToolCallArguments, ToolCallBegin

if TYPE_CHECKING:
    from thermocline.text.pieces import Piece

TEXT = (TextPiece("Hel"), TextPiece("lo"))
REASONING = (ReasoningPiece("Let me "), ReasoningPiece("think."))
CALL = (ToolCallBegin(0, "add"), ToolCallArguments(0, '{"a":'), ToolCallArguments(0, "1}"))
SECOND_CALL = (ToolCallBegin(1, "now"), ToolCallArguments(1, "{}"))
NO_ARGUMENTS = (ToolCallBegin(0, "now"),)
CUT_CALL = (ToolCallBegin(0, "add"), ToolCallArguments(0, '{"a":'))

NUM_PROMPT = 9
NUM_CACHED = 4


def answer_steps(
    *pieces: Piece,
    reason: EndReason = EndReason.STOP,
    stop: str | None = None,
    at_once: bool = False,
) -> list[GenerationStep]:
    """Return the steps of an answer of these pieces, one piece a step, or all in one step."""
    timings = Timings(
        queue_s=0.5,
        prompt_s=1.0,
        decode_s=2.0,
        num_prompt_tokens=NUM_PROMPT,
        num_output_tokens=max(1, len(pieces)),
        num_cached_tokens=NUM_CACHED,
    )
    num_reasoning = sum(isinstance(piece, ReasoningPiece) for piece in pieces)
    end = ChoiceEnd(reason, stop, timings, num_reasoning, ttft_s=1.5, latency_s=3.5)
    prompt = PromptStep(0, NUM_PROMPT, NUM_PROMPT, NUM_CACHED)
    if at_once:
        return [prompt, AnswerStep(0, pieces=pieces, end=end)]
    steps = [AnswerStep(0, (1,), pieces=(piece,)) for piece in pieces]
    return [prompt, *steps, AnswerStep(0, end=end)]


def read_events(raw: bytes) -> list[dict[str, Any]]:
    """Return the bodies of named events; each must have its own type as its name, and nothing else."""
    text = raw.decode("utf-8", "strict")
    assert text.endswith("\n\n"), text[-80:]
    bodies = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, _, data = block.partition("\n")
        assert data.startswith("data: "), block
        assert "\n" not in data, block
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}", block
        bodies.append(body)
    return bodies


def stream_of(encoder, steps) -> list[dict[str, Any]]:
    """Return the events of a stream that goes through `form`."""
    return read_events(encoder.prelude + b"".join(encoder.frames(step) for step in steps))


def whole_of(encoder, steps) -> dict[str, Any]:
    """Return the body of an answer that is not streamed."""
    for step in steps:
        assert encoder.take(step) >= 0
    return json.loads(b"".join(encoder.body()))
