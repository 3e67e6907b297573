"""The grammar of answers that call tools, in each format, as llguidance's Lark.

Owns where free text may stand beside calls. Pure; knows no request.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from thermocline.text import hermes_calls, plain_calls, xml_calls
from thermocline.text.answer_parser import Thinking
from thermocline.text.tool_formats import ToolFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_ANY: Final = "(?s:.*)"
_CLOSED: Final = rf"{_ANY}<\/think>"
_OPENED: Final = r"\s*<think>"


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that may be called. schema: of its arguments; json_rule: makes the rule of a schema."""

    name: str
    schema: Mapping[str, Any]
    json_rule: Callable[[Any], str]


def calls_only(
    form: ToolFormat, tools: Sequence[CallableTool], *, parallel: bool, other: str | None = None
) -> str:
    """Return the grammar of an answer that is a call, or several if `parallel`; or `other`, a rule."""
    first = {
        ToolFormat.HERMES: f"{json.dumps(hermes_calls.CALL_BEGIN)} tool",
        ToolFormat.XML: f"{json.dumps(xml_calls.CALL_BEGIN)} {json.dumps(chr(10) + xml_calls.FUNCTION)} tool",
        ToolFormat.PLAIN: "tool",
    }[form]
    calls = 'call ("\\n" call)*' if parallel else "call"
    start = calls if other is None else f"({calls}) | other"
    lines = [f"start: {start}", f"call: {first}", *_tool_rules(form, tools)]
    if other is not None:
        lines.append(f"other: {other}")
    return "\n".join(lines)


def text_and_calls(
    form: ToolFormat, tools: Sequence[CallableTool], thinking: Thinking, *, parallel: bool
) -> str:
    """Return the grammar of an answer that is free until a call begins, which then fits its tool.

    thinking: where reasoning may be; what looks like a call in it is none.
    """
    if form is ToolFormat.PLAIN:
        return _text_or_calls(tools, thinking, parallel=parallel)
    begins = {"lead": hermes_calls.CALL_BEGIN}
    if form is ToolFormat.XML:
        begins["bare"] = xml_calls.FUNCTION
    # Once the lazy beginning of a call matches, the text can not go on as text.
    start = "(first (later)*)? tail" if parallel else "tail | first"
    lines = [
        f"start: {start}",
        f"first: {_alternatives(begins, form, 'first')}",
        f"tail: /{_ANY}/",
    ]
    if parallel:
        lines.append(f"later: {_alternatives(begins, form, 'later')}")
    for name, marker in begins.items():
        lines.append(f"first_{name}[lazy]: FIRST_{name.upper()}")
        lines.append(f"FIRST_{name.upper()}: {_lead(marker, thinking)}")
        if parallel:
            lines.append(f"later_{name}[lazy]: /{_ANY}{marker}/")
    return "\n".join((*lines, *_tool_rules(form, tools)))


def no_calls(form: ToolFormat) -> str | None:
    """Return the grammar of an answer that calls nothing; None if nothing has to be held back."""
    if form is ToolFormat.PLAIN:
        return None
    markers = hermes_calls.CALL_BEGIN
    if form is ToolFormat.XML:
        markers += f"|{xml_calls.FUNCTION}"
    return f"start: TEXT\nTEXT: /{_ANY}/ & ~/{_ANY}({markers}){_ANY}/"


def _tool_rules(form: ToolFormat, tools: Sequence[CallableTool]) -> list[str]:
    names = [f"tool_{number}" for number in range(len(tools))]
    lines = [f"tool: {' | '.join(names)}"]
    for name, tool in zip(names, tools, strict=True):
        if form is ToolFormat.XML:
            lines += xml_calls.call_rules(tool.name, tool.schema, tool.json_rule, name)
        else:
            module = hermes_calls if form is ToolFormat.HERMES else plain_calls
            lines.append(f"{name}: {module.call_rule(tool.name, tool.json_rule(tool.schema))}")
    return lines


def _alternatives(begins: Mapping[str, str], form: ToolFormat, place: str) -> str:
    between = json.dumps("\n" + xml_calls.FUNCTION) if form is ToolFormat.XML else ""
    middle = {"lead": between, "bare": ""}
    return " | ".join(f"{place}_{name} {middle[name]} tool" for name in begins)


def _lead(marker: str, thinking: Thinking) -> str:
    """Return the terminal of the text up to the first call's `marker`, which is not in reasoning."""
    match thinking:
        case Thinking.NEVER:
            return f"/{_ANY}{marker}/"
        case Thinking.HAS_BEGUN:
            return f"/{_CLOSED}{_ANY}{marker}/"
        case Thinking.MAY_BEGIN:
            return f"/{_ANY}{marker}/ & ~(/{_OPENED}{_ANY}/ & ~/{_CLOSED}{_ANY}/)"


def _text_or_calls(tools: Sequence[CallableTool], thinking: Thinking, *, parallel: bool) -> str:
    """Return the grammar of PLAIN answers: calls stand at the start, after reasoning, or not at all."""
    text = rf"/\s*[^\s{{]{_ANY}/"
    reasoning = {
        Thinking.NEVER: "",
        Thinking.MAY_BEGIN: "(thinking GAP)?",
        Thinking.HAS_BEGUN: "thinking GAP",
    }[thinking]
    if thinking is Thinking.MAY_BEGIN:
        text += f" & ~/{_OPENED}{_ANY}/"
    calls = 'tool ("\\n" tool)*' if parallel else "tool"
    lines = [f"start: {reasoning} ({calls} | TEXT)?", f"TEXT: {text}"]
    if reasoning:
        opening = "<think>" if thinking is Thinking.MAY_BEGIN else ""
        lines += [f"thinking[lazy]: /{opening}{_CLOSED}/", r"GAP: /\s{0,4}/"]
    return "\n".join((*lines, *_tool_rules(ToolFormat.PLAIN, tools)))
