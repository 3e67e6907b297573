"""From what a request asks of its answer's form to what the sampler enforces and how the answer is read.

Pure, and the same for every interface: OpenAI's field forms are the neutral ones. Knows no engine, no
prompt and no body.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from thermocline.text.answer_parser import TextParser

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from thermocline.sampling.constraint import Constraint
    from thermocline.text.pieces import AnswerParser
    from thermocline.text.tool_formats import TemplateFacts

MakeParser: TypeAlias = "Callable[[], AnswerParser]"


@dataclass(frozen=True, slots=True)
class FormatFields:
    """The fields of a chat request that shape its answer, as OpenAI and vLLM write them; None: not given.

    tools: [{"type": "function", "function": {"name", "description", "parameters", "strict"}}].
    tool_choice: "none" | "auto" | "required" | {"type": "function", "function": {"name"}} |
    {"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}. response_format: {"type": "text" |
    "json_object" | "json_schema", ...}. structured_outputs: {"json" | "regex" | "choice" | "grammar" |
    "json_object": ...}.
    """

    tools: object = None
    tool_choice: object = None
    parallel_tool_calls: bool | None = None
    response_format: object = None
    structured_outputs: object = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Mapping[str, object] | None = None
    thinking_token_budget: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """constraint: goes into SamplingParams. make_parser: one parser for each choice of the answer."""

    constraint: Constraint | None
    make_parser: MakeParser


@dataclass(frozen=True, slots=True)
class FormatPlan:
    """What to render the prompt with, and then what its answer must be.

    tools, template_variables: for `Engine.encode_chat`.
    """

    tools: tuple[dict[str, Any], ...] | None
    template_variables: Mapping[str, object]

    def for_prompt(self, prompt_end: str) -> AnswerFormat:
        """Return the answer's format after a prompt that ends with `prompt_end`.

        prompt_end: the text of its last tokens (16 are enough), control tokens shown: whether the
        answer begins inside of reasoning stands there.
        """
        return AnswerFormat(None, TextParser)


def plan_format(facts: TemplateFacts, fields: FormatFields) -> FormatPlan:
    """Return how a model with this template must answer. Raises RequestError that names the field."""
    return FormatPlan(None, dict(fields.chat_template_kwargs or {}))
