"""Plans an answer's format: what the sampler enforces, and how the answer is parsed.

Pure, and the same for every interface, all of which use OpenAI's fields. Knows no engine, no prompt and no body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from thermocline.errors import RequestError
from thermocline.sampling.constraint import (
    Constraint,
    ConstraintKind,
    Reasoning,
    ReasoningBudget,
)
from thermocline.sampling.grammar import delimited, json_rule, rule
from thermocline.server.core.answer_fields import (
    ToolChoice,
    ToolMode,
    read_response_format,
    read_structured_outputs,
    read_tool_choice,
    read_tools,
)
from thermocline.text.answer_parser import AnswerShape
from thermocline.text.tool_calls.call_grammar import (
    CallableTool,
    calls_only,
    no_calls,
    reasoning_rules,
    text_and_calls,
)
from thermocline.text.tool_calls.format_table import THINK
from thermocline.text.tool_calls.tool_formats import ThinkingMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.server.core.answer_fields import Tool
    from thermocline.text.pieces import AnswerParser
    from thermocline.text.tool_calls.tool_formats import TemplateFacts, ToolFormat

MakeParser: TypeAlias = "Callable[[], AnswerParser]"

_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# The order of the words; "no_think" is one template's word for "none".
_LEVELS: Final = {word: level for level, word in enumerate(_EFFORTS)} | {"no_think": 0}
_MAX_BUDGET_TOKENS: Final = 1 << 31


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
    """constraint, reasoning_budget, shown_token_ids: go into SamplingParams. make_parser: one parser for
    each choice.
    """

    constraint: Constraint | None
    reasoning_budget: ReasoningBudget | None
    make_parser: MakeParser
    shown_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class FormatPlan:
    """What to render the prompt with, and then what its answer must be.

    tools, template_variables: for `Engine.encode_chat`.
    """

    tools: tuple[dict[str, Any], ...] | None
    template_variables: Mapping[str, object]
    facts: TemplateFacts
    callable_tools: tuple[Tool, ...]
    choice: ToolChoice
    parallel: bool
    wanted: Constraint | None
    budget_tokens: int | None

    def for_prompt(self, prompt_end: str) -> AnswerFormat:
        """Return the answer's format after a prompt that ends with `prompt_end`.

        prompt_end: the text of its last tokens (16 are enough), control tokens shown: whether the
        answer begins inside of reasoning stands there. Raises RequestError for a constraint whose text
        is not of its kind.
        """
        marks = self.facts.reasoning or THINK
        thinking = self.facts.thinking_after(prompt_end)
        is_closed = not self.facts.thinks or prompt_end.rstrip().endswith(marks.end.strip())
        reasoning = budget = None
        if not is_closed:
            reasoning = Reasoning(
                "" if thinking is ThinkingMode.HAS_BEGUN else marks.begin, marks.end
            )
            if self.budget_tokens is not None:
                budget = ReasoningBudget(
                    reasoning.begin, marks.end, marks.closing_text(), self.budget_tokens
                )
        can_call = bool(self.callable_tools) and self.choice.mode is not ToolMode.NONE
        shape = AnswerShape(
            thinking,
            self.facts.tool_format,
            can_call,
            marks,
            {tool.name: tool.schema for tool in self.callable_tools},
            frozenset(self.facts.control),
        )
        return AnswerFormat(
            self._constraint(thinking, reasoning),
            budget,
            shape.parser,
            self.facts.shown if can_call or self.facts.thinks else frozenset(),
        )

    def _constraint(self, thinking: ThinkingMode, reasoning: Reasoning | None) -> Constraint | None:
        wanted = self.wanted
        if not self.callable_tools:
            return self._alone(wanted, thinking, reasoning)
        tools = [
            CallableTool(
                tool.name,
                tool.schema,
                partial(json_rule, lenient=not tool.strict),
                delimited,
                is_strict=tool.strict,
            )
            for tool in self.callable_tools
            if self.choice.allows(tool.name)
        ]
        match self.choice.mode:
            case ToolMode.NONE:
                if wanted is not None:
                    return self._alone(wanted, thinking, reasoning)
                text = no_calls(self.facts, thinking)
                return None if text is None else _tool_grammar(text)
            case ToolMode.AUTO if wanted is None:
                text = text_and_calls(self.facts, tools, thinking, parallel=self.parallel)
                return _tool_grammar(text)
            case _:
                other = None if wanted is None else rule(wanted)
                text = calls_only(self.facts, tools, parallel=self.parallel, other=other)
                return self._after_reasoning(_tool_grammar(text), thinking, reasoning)

    def _alone(
        self, wanted: Constraint | None, thinking: ThinkingMode, reasoning: Reasoning | None
    ) -> Constraint | None:
        """Return the constraint of an answer without calls."""
        if wanted is None:
            return None
        return self._after_reasoning(wanted, thinking, reasoning, before_text=True)

    def _after_reasoning(
        self,
        constraint: Constraint,
        thinking: ThinkingMode,
        reasoning: Reasoning | None,
        *,
        before_text: bool = False,
    ) -> Constraint:
        """Return `constraint` for the text after the reasoning and the format's other marks."""
        if reasoning is None:
            return constraint
        if self.facts.control or self.facts.tool_format.messages is not None:
            rules = reasoning_rules(self.facts, thinking, before_text=before_text)
            reasoning = replace(reasoning, rules=rules)
        return replace(constraint, reasoning=reasoning)


def plan_format(facts: TemplateFacts, fields: FormatFields) -> FormatPlan:
    """Return how a model with this template must answer. Raises RequestError that names the field."""
    tools = read_tools(fields.tools)
    choice = read_tool_choice(fields.tool_choice, tools)
    wanted = _wanted(fields)
    if wanted is not None and choice.mode is ToolMode.REQUIRED:
        raise RequestError(
            f"tool_choice asks for a call, and {wanted.param} for another answer: leave one of them out",
            param=wanted.param,
        )
    is_free = choice.mode is ToolMode.AUTO and tools
    if wanted is not None and is_free and wanted.kind is ConstraintKind.GRAMMAR:
        raise RequestError(
            f'{wanted.param} leaves no place for calls: send tool_choice "none"', param=wanted.param
        )
    return FormatPlan(
        tools=tuple(tool.as_body() for tool in tools) or None,
        template_variables=_template_variables(facts, fields),
        facts=facts,
        callable_tools=tools,
        choice=choice,
        parallel=fields.parallel_tool_calls is not False,
        wanted=wanted,
        budget_tokens=_budget(fields.thinking_token_budget),
    )


def _wanted(fields: FormatFields) -> Constraint | None:
    from_format = read_response_format(fields.response_format)
    from_outputs = read_structured_outputs(fields.structured_outputs)
    if from_format is not None and from_outputs is not None:
        raise RequestError(
            "response_format and structured_outputs both ask for a format: leave one of them out",
            param="structured_outputs",
        )
    wanted = from_format or from_outputs
    if wanted is not None and wanted.kind is not ConstraintKind.GRAMMAR:
        rule(wanted)  # raises for a text that is not of its kind
    return wanted


def _tool_grammar(text: str) -> Constraint:
    return Constraint(ConstraintKind.GRAMMAR, text, param="tools")


def _template_variables(facts: TemplateFacts, fields: FormatFields) -> dict[str, object]:
    variables: dict[str, object] = {}
    effort = fields.reasoning_effort
    if effort is not None:
        if effort not in _EFFORTS:
            raise RequestError(
                f"reasoning_effort is {effort!r}: use one of {', '.join(_EFFORTS)}",
                param="reasoning_effort",
            )
        variables["reasoning_effort"] = _effort_word(facts.tool_format, effort)
        variables |= _switches(effort != "none")
    given = fields.chat_template_kwargs
    if given is not None and not isinstance(given, Mapping):
        raise RequestError(
            "chat_template_kwargs must be an object of template variables",
            param="chat_template_kwargs",
        )
    # Templates differ in the name of the switch; clients send this one.
    wanted = (given or {}).get("enable_thinking")
    if isinstance(wanted, bool):
        variables |= _switches(wanted)
    known = {name: value for name, value in variables.items() if name in facts.variables}
    return known | dict(given or {})


def _switches(thinks: bool) -> dict[str, object]:
    """Return the variables by which templates switch reasoning on or off."""
    return {
        "enable_thinking": thinks,
        "thinking": thinks,
        "thinking_mode": "enabled" if thinks else "disabled",
    }


def _effort_word(tool_format: ToolFormat, effort: str) -> str:
    """Return the template's word that is nearest to `effort`."""
    if not tool_format.efforts:
        return effort
    return min(tool_format.efforts, key=lambda word: abs(_LEVELS[word] - _LEVELS[effort]))


def _budget(tokens: object) -> int | None:
    if tokens is None or tokens == -1:
        return None
    if (
        isinstance(tokens, int)
        and not isinstance(tokens, bool)
        and 0 <= tokens < _MAX_BUDGET_TOKENS
    ):
        return tokens
    raise RequestError(
        "thinking_token_budget must be a number of tokens, or -1 for no limit",
        param="thinking_token_budget",
    )
