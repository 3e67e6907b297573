"""What a chat template's text tells about the answers of its model: how it calls tools, how it thinks.

Pure. Knows no request and no parser.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

THINK_BEGIN: Final = "<think>"
THINK_END: Final = "</think>"


class ToolFormat(StrEnum):
    """How a model writes the call of a tool."""

    HERMES = "hermes"
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen 2.5 and 3."""
    XML = "xml"
    """<tool_call><function=name><parameter=key>value</parameter></function></tool_call>: Qwen3-Coder."""
    PLAIN = "plain"
    """{"name": ..., "arguments": {...}} and nothing around it: models that say nothing else."""


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What is known of a model's answers.

    knows_tools: the template tells the model of tools. thinks: answers may begin with reasoning
    between THINK_BEGIN and THINK_END. variables: which of the known template variables it reads.
    """

    tool_format: ToolFormat = ToolFormat.PLAIN
    knows_tools: bool = False
    thinks: bool = False
    variables: frozenset[str] = frozenset()


_KNOWN_VARIABLES: Final = ("enable_thinking", "reasoning_effort")


def read_template(source: str, tool_format: ToolFormat | None = None) -> TemplateFacts:
    """Return what the Jinja text `source` tells; `tool_format` overrides what it would be taken for."""
    if tool_format is None:
        if "<function=" in source and "<parameter=" in source:
            tool_format = ToolFormat.XML
        elif "<tool_call>" in source:
            tool_format = ToolFormat.HERMES
        else:
            tool_format = ToolFormat.PLAIN
    return TemplateFacts(
        tool_format,
        knows_tools="tools" in source,
        thinks=THINK_END in source,
        variables=frozenset(name for name in _KNOWN_VARIABLES if name in source),
    )
