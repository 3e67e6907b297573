"""What a format of tool calls consists of: the columns of the table in `format_table`.

Pure. Knows no format by name, no request and no parser.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

SLOTS: Final = frozenset(
    ("name", "number", "id", "json", "arguments", "keywords", "dict", "parameters", "key", "value", "type", "is_text")
)  # fmt: skip
GEMMA_QUOTE: Final = '<|"|>'
"""What stands around a text in {dict}."""
_SLOT: Final = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a pattern that a call fills."""

    kind: str


PatternPart: TypeAlias = str | Slot


def parts_of(pattern: str) -> tuple[PatternPart, ...]:
    """Return the literal texts and the slots of `pattern`; braces around other words are text."""
    parts: list[PatternPart] = []
    end = 0
    for found in _SLOT.finditer(pattern):
        if found[1] not in SLOTS:
            continue
        if pattern[end : found.start()]:
            parts.append(pattern[end : found.start()])
        parts.append(Slot(found[1]))
        end = found.end()
    return (*parts, pattern[end:]) if pattern[end:] else tuple(parts)


class ThinkingMode(Enum):
    """Where an answer's reasoning may be."""

    NEVER = auto()
    MAY_BEGIN = auto()
    """The answer may open it."""
    HAS_BEGUN = auto()
    """The prompt has opened it."""


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """What stands around reasoning.

    closing: what a model is made to write when its budget is used up. other_ends: texts that end it too.
    is_repeated: reasoning may begin again later in the answer.
    """

    begin: str
    end: str
    closing: str = ""
    other_ends: tuple[str, ...] = ()
    is_repeated: bool = False

    def closing_text(self) -> str:
        """As Qwen 3 closes reasoning that it is told to end, unless the format has a way of its own."""
        return self.closing or f"\n{self.end}\n\n"


@dataclass(frozen=True, slots=True)
class Messages:
    """An answer of several messages, each with a header that says what it is.

    starts: what a header begins with. header_end: what it ends with. ends: what ends a message.
    reasoning, text, call, calls: the headers of each kind, as regular expressions; `call` has the
    group "name" and is followed by the arguments, `calls` by calls as in other formats. All others are
    passed over with their messages. next: what stands between two messages. text_begins: the headers
    that a grammar writes for text, the last message's first.
    """

    starts: tuple[str, ...]
    header_end: str
    ends: tuple[str, ...]
    next: str
    text_begins: tuple[str, ...]
    reasoning: str = r"(?!)"
    text: str = r"(?!)"
    call: str = r"(?!)"
    calls: str = r"(?!)"
    header: str = r"(?s:.*)"
    begins_inside: bool = False


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls. Rows of the table in `format_table`.

    signs: texts that are all in a chat template of this format. call: one call; parameter: one of its
    arguments, where each stands alone; section_begin, section_end: what stands around all calls;
    separator: what stands between two.

    Slots of call: {name}, {number} (counted by the model), {id}; and one of {arguments} (a JSON object),
    {json} (an object with the name in it, written as `json` says), {keywords} (name=literal, as in
    Python), {dict} (as Gemma quotes), {parameters} (each as `parameter` says). Slots of parameter:
    {key}, {value}, {type} (its JSON type), {is_text} (true for strings).

    Space in a pattern is written, and any or none is read. It is a value's where it stands next to
    {value}, but for one line end on each side where the pattern has it.

    is_bare: calls have no mark, and stand at the start of the answer. may_lack_begin: the pattern's
    second word may come without its first. drops: texts around what is said that are no part of it.
    ends_reasoning: a call in reasoning ends it, and is none otherwise. one_call: an answer ends with its
    first call. has_cdata: a value may stand in <![CDATA[...]]>. nested: what stands before each tag of a
    value of several parts, which is written as elements in elements. efforts: the words that the template
    takes for reasoning_effort, the least first; () for any. also: other ways to write `call`, which a
    grammar allows. other_begins: what else models write for section_begin. envelope: texts around what is said that are no part of it, nor is the space beside them.
    """

    name: str
    call: str
    signs: tuple[str, ...] = ()
    parameter: str = ""
    section_begin: str = ""
    section_end: str = ""
    separator: str = "\n"
    json: str = '{"name": {name}, "arguments": {arguments}}'
    reasoning: ReasoningMarks | None = None
    messages: Messages | None = None
    drops: tuple[str, ...] = ()
    is_bare: bool = False
    may_lack_begin: bool = False
    ends_reasoning: bool = False
    one_call: bool = False
    has_cdata: bool = False
    nested: str = ""
    efforts: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    other_begins: tuple[str, ...] = ()
    envelope: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    def marks(self) -> tuple[str, ...]:
        """Return the texts that this format writes around names, values, messages and what is said."""
        patterns = (
            self.call,
            *self.also,
            self.parameter,
            self.section_begin,
            *self.other_begins,
            self.section_end,
        )
        texts = [part for one in patterns for part in parts_of(one) if isinstance(part, str)]
        if "{dict}" in self.call:
            texts.append(GEMMA_QUOTE)
        form = self.messages
        if form is not None:
            texts += (*form.starts, form.header_end, *form.ends, form.next, *form.text_begins)
        return (*texts, *self.drops, *self.envelope)


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What is known of a model's answers.

    knows_tools: the template tells the model of tools. reasoning: what stands around it; None for a
    model that does not think. variables: which of the known template variables it reads. control: the
    texts of the format's marks that are single control tokens of the vocabulary, and their ids.
    """

    tool_format: ToolFormat
    knows_tools: bool = False
    reasoning: ReasoningMarks | None = None
    variables: frozenset[str] = frozenset()
    control: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def shown(self) -> frozenset[int]:
        """The control tokens that an answer's parser has to see."""
        return frozenset(self.control.values())

    @property
    def text_header(self) -> str:
        """What stands before an answer's text; "" for formats without messages."""
        form = self.tool_format.messages
        return "" if form is None else form.text_begins[0]

    @property
    def thinks(self) -> bool:
        """Whether answers may begin with reasoning."""
        return self.reasoning is not None

    def thinking_after(self, prompt_end: str) -> ThinkingMode:
        """Return where the reasoning is of an answer to a prompt that ends with `prompt_end`, control tokens shown."""
        if self.reasoning is None:
            return ThinkingMode.NEVER
        has_begun = prompt_end.rstrip().endswith(self.reasoning.begin.strip())
        return ThinkingMode.HAS_BEGUN if has_begun else ThinkingMode.MAY_BEGIN
