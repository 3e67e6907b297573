"""A chat's events have text and reasoning apart, whatever the pieces in which they come."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from thermocline.engine.chat import chat_events
from thermocline.messages import FinishReason, RequestId, TokenEvent
from thermocline.sampling.params import SamplingParams
from thermocline.text.tool_calls.format_table import PLAIN, THINK
from thermocline.text.tool_calls.tool_formats import TemplateFacts

ANSWER = "<think>so it is</think>\n\nIt is so."


class _FakeEngine:
    """Answers with the same text, a few characters at a time."""

    def __init__(self, prompt: str, width: int, *, thinks: bool = True) -> None:
        self._prompt, self._width = prompt, width
        self.template_facts = TemplateFacts(PLAIN, reasoning=THINK if thinks else None)
        self.tokenizer = SimpleNamespace(decode=lambda ids, skip_special: self._prompt)
        self.params = None

    async def encode_chat(self, messages, *, variables):
        assert messages == [{"role": "user", "content": "Is it?"}]
        return [1, 2, 3]

    async def generate(self, prompt, params, **options):
        self.params = params
        text = ANSWER if not self._prompt.endswith("<think>\n") else ANSWER.removeprefix("<think>")
        for start in range(0, len(text), self._width):
            yield TokenEvent(RequestId(1), (start,), text[start : start + self._width])
        yield TokenEvent(RequestId(1), (), "", finish_reason=FinishReason.STOP)


async def events_of(engine):
    """Return all events of one chat."""
    events = chat_events(engine, "Is it?", SamplingParams(), None, engine.generate)
    return [event async for event in events]


@pytest.mark.parametrize("prompt", ["<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"])
@pytest.mark.parametrize("width", [1, 5, 1000])
async def test_reasoning_is_no_text(prompt, width):
    """Whether the answer opens its reasoning or the prompt did; every token is in an event."""
    engine = _FakeEngine(prompt, width)
    events = await events_of(engine)
    assert "".join(event.text for event in events) == "It is so."
    assert "".join(event.reasoning for event in events) == "so it is"
    assert len([token for event in events for token in event.token_ids]) == len(events) - 1


async def test_a_model_that_does_not_think_says_it_all():
    """Marks of reasoning in its answer are text."""
    engine = _FakeEngine("<|im_start|>assistant\n", 3, thinks=False)
    events = await events_of(engine)
    assert "".join(event.text for event in events) == ANSWER
    assert engine.params.shown_token_ids == frozenset()
