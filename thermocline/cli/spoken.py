"""What an answer says: its reasoning apart from its text, and the form that it must have.

Where the marks between them are control tokens, which are no text, channels would run into each other; here reasoning
stands between <think> tags. Knows no screen.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from thermocline.engine.api import Engine
    from thermocline.messages import TokenEvent
    from thermocline.sampling.params import SamplingParams
    from thermocline.server.core.structured import AnswerFormat, FormatFields
    from thermocline.text.tool_calls.tool_formats import TemplateFacts

# Enough to see whether the template has opened the model's reasoning.
_PROMPT_END_TOKENS = 16


class Spoken:
    """One answer as it comes. content, reasoning: what was said and thought so far."""

    def __init__(
        self, form: AnswerFormat, on_reasoning: Callable[[str], None] | None = None
    ) -> None:
        """on_reasoning: gets what the model thinks; without it, that is text between tags."""
        self.content = ""
        self.reasoning = ""
        self._form = form
        self._parser = form.make_parser()
        self._on_reasoning = on_reasoning
        self._is_open = False

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with which the answer has its form, and its marks are in the text that is read here."""
        return replace(
            params, shown_token_ids=self._form.shown_token_ids, constraint=self._form.constraint
        )

    def text(self, event: TokenEvent) -> str:
        """Return what an event brings to the screen."""
        return "".join(self._texts(event))

    def message(self) -> dict[str, str]:
        """Return the answer as a message of the history."""
        return {
            "role": "assistant",
            "content": self.content,
            "reasoning_content": self.reasoning,
        }

    def _texts(self, event: TokenEvent) -> Iterator[str]:
        for is_reasoning, text in self._parts(event):
            if is_reasoning and self._on_reasoning is not None:
                self._on_reasoning(text)
                continue
            if is_reasoning:
                yield text if self._is_open else f"<think>\n{text}"
            else:
                yield f"\n</think>\n\n{text}" if self._is_open else text
            self._is_open = is_reasoning

    def _parts(self, event: TokenEvent) -> Iterator[tuple[bool, str]]:
        """Yield what an event brings: whether it is reasoning, and its text."""
        from thermocline.text.pieces import ReasoningPiece, TextPiece

        pieces = self._parser.push(event.text) if event.text else ()
        if event.finish_reason is not None:
            pieces += self._parser.flush()
        for piece in pieces:
            if isinstance(piece, ReasoningPiece):
                self.reasoning += piece.text
                yield True, piece.text
            elif isinstance(piece, TextPiece):
                self.content += piece.text
                yield False, piece.text


def spoken(
    engine: Engine,
    prompt: Sequence[int],
    on_reasoning: Callable[[str], None] | None = None,
    *,
    tells_apart: bool = False,
) -> Spoken | None:
    """Return the reader of a chat's answer; None where the text says it all.

    on_reasoning: as of `Spoken`. tells_apart: there is a reader in any case.
    """
    from thermocline.server.core.structured import FormatFields

    facts = engine.template_facts
    if not facts.control and not tells_apart:
        return None
    return formed(engine, prompt, facts, FormatFields(), on_reasoning)


def formed(
    engine: Engine,
    prompt: Sequence[int],
    facts: TemplateFacts | None,
    fields: FormatFields,
    on_reasoning: Callable[[str], None] | None = None,
) -> Spoken:
    """Return the reader of an answer that must have the form of `fields`. Raises RequestError.

    facts: of the template that made the prompt, None for a prompt without one. on_reasoning: as of `Spoken`.
    """
    from thermocline.server.core.structured import plan_format
    from thermocline.text.templates.template_facts import NO_TEMPLATE

    end = engine.tokenizer.decode(prompt[-_PROMPT_END_TOKENS:], skip_special=False)
    return Spoken(plan_format(facts or NO_TEMPLATE, fields).for_prompt(end), on_reasoning)


def schema_fields(given: str) -> FormatFields:
    """Return the form of an answer that a JSON schema describes: its file, "-" for stdin, or the schema itself.

    Raises RequestError for a file that can not be read, or that is no schema.
    """
    from thermocline.cli.session import read_text
    from thermocline.server.core.structured import FormatFields, plan_format
    from thermocline.text.templates.template_facts import NO_TEMPLATE

    text = given if given.lstrip().startswith("{") else read_text(given)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"--json-schema {given[:80]} is not JSON: {error}") from error
    fields = FormatFields(structured_outputs={"json": schema})
    try:
        plan_format(NO_TEMPLATE, fields)
    except RequestError as error:
        raise RequestError(f"--json-schema {given[:80]} can not be used: {error}") from error
    return fields
