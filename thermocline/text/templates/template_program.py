"""Compiles and renders one chat template, in a child process with limits.

Run by its path, never imported by the package: it imports jinja2 and the standard library only. Owns the jinja
environment. It knows no tokenizer; what it knows of control tokens is the list of texts to mark.

Requests (see `thermocline/child/main.py`):
    {"op": "load", "source", "bos_token", "eos_token", "control": [text...], "nonce"}
    {"op": "render", "context": {...}, "marked": bool}
Failures are of kind "syntax", "template" or "limit".

A marked render writes each control token of the *template* as nonce + index + end mark; text that
came in with the context has no way to write such a mark. See `ChatTemplate.render_parts`.
"""

from __future__ import annotations

import json
import re
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from collections.abc import Callable

    from jinja2.parser import Parser

END_MARK = "\ue2ff"

# In these calls a constant is looked for in other text, it is not written: it stays as it is.
_SEARCH_METHODS = frozenset(
    (
        "split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind",
        "index", "rindex", "count", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix",
    )
)  # fmt: skip


class RaisedByTemplateError(jinja2.TemplateError):
    """The template called raise_exception."""


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, but an unsafe attribute is an error at once, not an empty text.

    A template may change lists of its own, which Kimi K2's does; `given` are the caller's.
    """

    given: frozenset[int] = frozenset()

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        """Whether a template may use this attribute."""
        if type(obj) is list and attr in ("append", "pop"):
            return id(obj) not in self.given
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: object, attribute: str) -> jinja2.Undefined:
        """Raise SecurityError."""
        raise SecurityError(f"access to {attribute!r} of {type(obj).__name__!r} is unsafe")


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training: pass them on."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body as it is."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> None:
    raise RaisedByTemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return time.strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_as_list,
    )


def _as_list(value: object) -> list[object]:
    """Return what a filter such as `map` made, which gives its values one by one."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def build_environment() -> Sandbox:
    """The sandbox, with what chat templates expect."""
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
    )
    environment.globals.pop("lipsum", None)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _to_json
    return environment


def _lists_in(context: dict[str, Any]) -> list[list[Any]]:
    """Return all lists of the caller's, however deep."""
    found, level = [], list(context.values())
    while level:
        lists = [one for one in level if type(one) is list]
        found += lists
        inner = [one for each in lists for one in each]
        level = inner + [one for each in level if type(each) is dict for one in each.values()]
    return found


def _searched_constants(node: nodes.Node) -> Iterator[nodes.Node]:
    """Direct operands of `node` that are looked for or compared, not written."""
    if isinstance(node, nodes.Compare):
        yield node.expr
        yield from (operand.expr for operand in node.ops)
    elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        if node.node.attr in _SEARCH_METHODS:
            yield from node.args
        elif node.node.attr == "replace":
            yield from node.args[:1]
    elif isinstance(node, nodes.Filter) and node.name == "replace":
        yield from node.args[:1]
    elif isinstance(node, nodes.Test):
        yield from node.args


def mark_control(tree: nodes.Template, mark: Callable[[str], str]) -> nodes.Template:
    """Apply `mark` to every piece of text that the template itself writes."""
    searched = {
        id(leaf) for node in tree.find_all(nodes.Node) for leaf in _searched_constants(node)
    }
    for data in tree.find_all(nodes.TemplateData):
        data.data = mark(data.data)
    for constant in tree.find_all(nodes.Const):
        if isinstance(constant.value, str) and id(constant) not in searched:
            constant.value = mark(constant.value)
    return tree


def _marker(control: list[str], nonce: str) -> Callable[[str], str]:
    """Replaces each control text by its mark, the longest first where several begin."""
    if not control:
        return str
    index_of = {text: index for index, text in enumerate(control)}
    ordered = sorted(control, key=lambda text: -len(text))
    pattern = re.compile("|".join(re.escape(text) for text in ordered))
    return lambda text: pattern.sub(lambda m: f"{nonce}{index_of[m[0]]}{END_MARK}", text)


@dataclass(frozen=True)
class Loaded:
    """One template, compiled as written and with its control tokens marked."""

    plain: jinja2.Template
    marked: jinja2.Template
    environment: Sandbox
    plain_globals: dict[str, str]
    marked_globals: dict[str, str]

    def render(self, context: dict[str, Any], marked: bool, max_chars: int) -> str:
        """Render; ends soon past `max_chars` characters, of which it then returns more."""
        self.environment.given = frozenset(map(id, _lists_in(context)))
        template = self.marked if marked else self.plain
        tokens = self.marked_globals if marked else self.plain_globals
        pieces: list[str] = []
        length = 0
        for piece in template.generate({**context, **tokens}):
            pieces.append(piece)
            length += len(piece)
            if length > max_chars:
                break
        return "".join(pieces)


def load(request: dict[str, Any]) -> Loaded:
    """Compile `request["source"]` twice. Raises TemplateSyntaxError."""
    environment = build_environment()
    source = request["source"]
    mark = _marker(request["control"], request["nonce"])
    names = ("bos_token", "eos_token")
    return Loaded(
        plain=environment.from_string(source),
        marked=environment.from_string(mark_control(environment.parse(source), mark)),
        environment=environment,
        plain_globals={name: request[name] for name in names},
        marked_globals={name: mark(request[name]) for name in names},
    )


def _line_of(error: BaseException) -> str:
    """Where in the template the error arose, as text to append."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f" (line {error.lineno})"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename in ("<template>", "<unknown>")
    ]
    return f" (line {lines[-1]})" if lines else ""


class TemplateProgram:
    """Answers "load" and "render"; `thermocline/child/main.py` runs it."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._loaded: Loaded | None = None

    def answer(self, request: dict[str, Any]) -> str:
        """Return the rendered text; "" for a template that was loaded."""
        if request["op"] == "load":
            self._loaded = load(request)
            return ""
        assert self._loaded is not None, "render before load"
        return self._loaded.render(request["context"], request["marked"], self._max_chars)

    def describe(self, error: Exception) -> tuple[str, str]:
        """Return the kind of a failure, and what to tell about it."""
        if isinstance(error, jinja2.TemplateSyntaxError):
            return "syntax", f"{error.message}{_line_of(error)}"
        if isinstance(error, RaisedByTemplateError):
            return "template", str(error)
        return "template", f"{type(error).__name__}: {error}{_line_of(error)}"


PROGRAM = TemplateProgram
