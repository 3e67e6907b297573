"""A chat's answer as it comes, its reasoning apart from its text. Knows no tools and no interface."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from thermocline.text.answer_parser import AnswerShape
from thermocline.text.pieces import ReasoningPiece, TextPiece
from thermocline.text.tool_calls.format_table import THINK

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from thermocline.engine.api import Engine
    from thermocline.messages import TokenEvent
    from thermocline.sampling.params import SamplingParams
    from thermocline.text.answer_parser import FormatParser

# Enough to see whether the template has opened the model's reasoning.
_PROMPT_END_TOKENS: Final = 16


async def chat_events(
    engine: Engine,
    messages: str | Sequence[Mapping[str, Any]],
    params: SamplingParams,
    variables: Mapping[str, object] | None,
    generate: Callable[[Sequence[int], SamplingParams], AsyncGenerator[TokenEvent, None]],
) -> AsyncGenerator[TokenEvent, None]:
    """Yield the answer to `messages`, which `generate` gives. See `Engine.chat`."""
    chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    prompt = await engine.encode_chat(chat, variables=variables)
    facts = engine.template_facts
    end = engine.tokenizer.decode(prompt[-_PROMPT_END_TOKENS:], skip_special=False)
    shape = AnswerShape(
        facts.thinking_after(end),
        facts.tool_format,
        marks=facts.reasoning or THINK,
        control=frozenset(facts.control),
    )
    if facts.thinks:
        params = replace(params, shown_token_ids=params.shown_token_ids | facts.shown)
    events = generate(prompt, params)
    parser = shape.parser()
    async with aclosing(events):
        async for event in events:
            yield _told_apart(event, parser)


def _told_apart(event: TokenEvent, parser: FormatParser) -> TokenEvent:
    """Return the event with what of its text is certain now, and with the rest at the end."""
    pieces = parser.push(event.text) if event.text else ()
    if event.finish_reason is not None:
        pieces += parser.flush()
    text = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))
    return replace(event, text=text, reasoning=reasoning)
