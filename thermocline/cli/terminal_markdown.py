"""Markdown as a terminal shows it, while it is being written. Sans-I/O: text goes in, styled text comes out.

What can not be judged yet is held back: the start of a line, emphasis that is still open, a table. No line is ever
written twice, so that nothing depends on the height of the screen. What is no valid markup is shown as it is.
"""

from __future__ import annotations

import re
from typing import Final

from rich.cells import cell_len

BOLD, DIM, ITALIC, UNDERLINED, STRUCK, CODE = "1", "2", "3", "4", "9", "36"
# Open emphasis is held back up to so many characters.
_MAX_HELD: Final = 400
_SPECIAL: Final = re.compile(r"[\\`*_~]")
_PUNCTUATION: Final = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
_CODE_SPAN: Final = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)")
# By the mark; what is inside begins and ends with no space.
_EMPHASIS: Final = (
    (re.compile(r"\*\*\*(?=[^\s*])(.+?)(?<=[^\s*\\])\*\*\*(?!\*)"), (BOLD, ITALIC)),
    (re.compile(r"\*\*(?=[^\s*])(.+?)(?<=[^\s\\])\*\*(?!\*)"), (BOLD,)),
    (re.compile(r"\*(?=[^\s*])((?:[^*]|\*\*)+?)(?<=[^\s*\\])\*(?!\*)"), (ITALIC,)),
    (re.compile(r"__(?=[^\s_])(.+?)(?<=[^\s_\\])__(?!\w)"), (BOLD,)),
    (re.compile(r"_(?=[^\s_])([^_]+?)(?<=[^\s_\\])_(?!\w)"), (ITALIC,)),
    (re.compile(r"~~(?=[^\s~])(.+?)(?<=[^\s~\\])~~(?!~)"), (STRUCK,)),
)
_FENCE: Final = re.compile(r"(`{3,}|~{3,})\s*([^`]*)$")
_HEADING: Final = re.compile(r"(#{1,6})[ \t]+(.*)", re.DOTALL)
_BULLET: Final = re.compile(r"[-*+][ \t]+")
_NUMBER: Final = re.compile(r"\d{1,9}[.)][ \t]+")
_RULE: Final = re.compile(r"([-*_])[ \t]*(?:\1[ \t]*){2,}$")
_DIVIDER_CELL: Final = re.compile(r"\s*:?-+:?\s*$")
# Starts of lines that may still become one of the above.
_UNDECIDED: Final = re.compile(
    r"(?:#{1,6}|[-+*>]|\d{1,9}[.)]?)[ \t]*$|`{1,2}$|~{1,2}$|([-*_])(?:[ \t]*\1)*[ \t]*$"
)


class TerminalMarkdown:
    """Styles one answer as it comes. width: columns of the terminal."""

    def __init__(self, width: int = 80) -> None:
        self._width = width
        self._held = ""
        # The style of the line that is being written; None at a line's start.
        self._line: tuple[str, ...] | None = None
        self._before = ""  # the character before what is held
        self._fence: str | None = None
        self._table: list[str] = []

    def push(self, text: str) -> str:
        """Return what can be shown now."""
        self._held += text
        return self._read_on(has_ended=False)

    def finish(self) -> str:
        """Return what was held back; the answer has ended."""
        return self._read_on(has_ended=True) + self._end_table()

    def _read_on(self, *, has_ended: bool) -> str:
        shown = []
        while self._held:
            line, end, rest = self._held.partition("\n")
            is_whole = bool(end) or has_ended
            if self._line is None:
                start = self._start(line, is_whole=is_whole)
                if start is None:
                    break
                text, line = start
                shown.append(text)
            text, left = self._inline(line, is_whole=is_whole)
            shown.append(text)
            if not is_whole:
                self._held = left
                break
            self._held = rest
            if end and not (self._table and self._line == ()):
                shown.append("\n")
            self._line, self._before = None, ""
        return "".join(shown)

    def _start(self, line: str, *, is_whole: bool) -> tuple[str, str] | None:
        """Return what a line begins with on the screen, and the rest of it; None while that is not certain."""
        if self._fence is not None:
            return self._code_line(line, is_whole=is_whole)
        content = line.lstrip(" \t")
        indent = line[: len(line) - len(content)]
        if not is_whole and (not content or content[0] == "|" or _UNDECIDED.match(content)):
            return None
        if content.startswith(("```", "~~~")) and (not is_whole or _FENCE.match(content)):
            return self._open_fence(indent, content) if is_whole else None
        if content.startswith("|"):
            self._table.append(content)
            self._line = ()
            return "", ""
        before = self._end_table()
        return self._block(before, indent, content, is_whole=is_whole)

    def _block(self, before: str, indent: str, content: str, *, is_whole: bool) -> tuple[str, str]:
        self._line = ()
        if (heading := _HEADING.match(content)) is not None:
            self._line = (BOLD, UNDERLINED) if len(heading[1]) == 1 else (BOLD,)
            return before, heading[2]
        if is_whole and _RULE.match(content):
            return before + _styled("─" * min(self._width, 40), (DIM,)), ""
        if (bullet := _BULLET.match(content)) is not None:
            return f"{before}{indent}• ", content[bullet.end() :]
        if (number := _NUMBER.match(content)) is not None:
            return before + indent + number[0], content[number.end() :]
        if content.startswith(">"):
            self._line = (ITALIC,)
            bar = _styled("│ ", (DIM,))
            return before + indent + bar, content.removeprefix(">").removeprefix(" ")
        return before + indent, content

    def _open_fence(self, indent: str, content: str) -> tuple[str, str]:
        fence = _FENCE.match(content)
        self._fence = content[:3] if fence is None else fence[1]
        self._line = ()
        language = "" if fence is None else fence[2].strip()
        return self._end_table() + indent + _styled(f"── {language or 'code'}", (DIM,)), ""

    def _code_line(self, line: str, *, is_whole: bool) -> tuple[str, str] | None:
        fence = self._fence or ""
        content = line.strip()
        if fence.startswith(content) and not is_whole:
            return None  # it may become the end of the fence
        if content.startswith(fence) and not content.strip(fence[0]):
            if not is_whole:
                return None
            self._fence, self._line = None, ()
            return _styled("──", (DIM,)), ""
        self._line = (CODE,)
        return "", line

    def _inline(self, line: str, *, is_whole: bool) -> tuple[str, str]:
        """Return the rest of a line as far as it can be shown, and what is held back of it."""
        style = self._line or ()
        if style == (CODE,):
            return _styled(line, style), ""
        shown, left, before = _spans(line, style, self._before, is_whole=is_whole)
        self._before = before
        return shown, left

    def _end_table(self) -> str:
        """Return the table that has just ended, aligned; its lines as they are if it is none, or too wide."""
        lines, self._table = self._table, []
        if not lines:
            return ""
        rows = [_cells(line) for line in lines]
        plain = "".join(_whole(line, ()) + "\n" for line in lines)
        if len(rows) < 2 or not all(_DIVIDER_CELL.match(cell) for cell in rows[1]):
            return plain
        num_columns = len(rows[0])
        body = [(row + [""] * num_columns)[:num_columns] for row in (rows[0], *rows[2:])]
        shown = [
            [_whole(cell, (BOLD,) if number == 0 else ()) for cell in row]
            for number, row in enumerate(body)
        ]
        widths = [max(map(_visible_cells, column)) for column in zip(*shown, strict=True)]
        if sum(widths) + 3 * num_columns > self._width:
            return plain
        texts = ["  ".join(map(_padded, row, widths)).rstrip() for row in shown]
        rule = _styled("  ".join("─" * width for width in widths), (DIM,))
        return "".join(f"{text}\n" for text in (texts[0], rule, *texts[1:]))


def _whole(text: str, style: tuple[str, ...]) -> str:
    return _spans(text, style, "", is_whole=True)[0]


def _spans(
    text: str, style: tuple[str, ...], before: str, *, is_whole: bool
) -> tuple[str, str, str]:
    """Return `text` styled as far as it is certain, what is held back, and the last character shown.

    before: the character before `text`, "" at a line's start.
    """
    shown: list[str] = []
    at = 0
    while (found := _SPECIAL.search(text, at)) is not None:
        start = found.start()
        shown.append(_styled(text[at:start], style))
        before = text[start - 1] if start > 0 else before
        span = _span(text, start, style, before)
        is_escape = text[start] == "\\"
        if span is not None and (span[1] < len(text) or is_whole or is_escape):
            shown.append(span[0])
            at = span[1]
        elif not is_whole and _may_open(text, start, before):
            return "".join(shown), text[start:], before
        else:
            run = _run_end(text, start)
            shown.append(_styled(text[start:run], style))
            at = run
        before = text[at - 1]
    shown.append(_styled(text[at:], style))
    return "".join(shown), "", text[-1:] or before


def _span(text: str, start: int, style: tuple[str, ...], before: str) -> tuple[str, int] | None:
    """Return the styled span that begins at `start`, and where it ends; None if there is none (yet)."""
    if text[start] == "\\":
        if text[start + 1 : start + 2] in _PUNCTUATION and start + 1 < len(text):
            return _styled(text[start + 1], style), start + 2
        return None
    if text[start] == "`":
        code = _CODE_SPAN.match(text, start)
        if code is None:
            return None
        inner = code[2]
        if inner[:1] == inner[-1:] == " " and inner.strip():
            inner = inner[1:-1]
        return _styled(inner, (*style, CODE)), code.end()
    if text[start] == "_" and before.isalnum():
        return None
    for pattern, more in _EMPHASIS:
        match = pattern.match(text, start)
        if match is not None:
            return _whole(match[1], (*style, *more)), match.end()
    return None


def _may_open(text: str, start: int, before: str) -> bool:
    """Whether what begins at `start` may become a span when more text comes."""
    if len(text) - start > _MAX_HELD:
        return False
    end = _run_end(text, start)
    if end == len(text):
        return True
    if text[start] == "\\":
        return False
    if text[start] == "_" and before.isalnum():
        return False
    return text[start] == "`" or not text[end].isspace()


def _run_end(text: str, start: int) -> int:
    """Return the end of the run of equal characters at `start`."""
    if text[start] == "\\":
        return start + 1
    end = start
    while end < len(text) and text[end] == text[start]:
        end += 1
    return end


def _styled(text: str, style: tuple[str, ...]) -> str:
    return f"\x1b[{';'.join(style)}m{text}\x1b[0m" if style and text else text


def _cells(line: str) -> list[str]:
    """Return the cells of a table's line."""
    inner = line.strip().removeprefix("|")
    inner = inner[:-1] if inner.endswith("|") and not inner.endswith("\\|") else inner
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", inner)]


def _visible_cells(text: str) -> int:
    return cell_len(re.sub(r"\x1b\[[\d;]*m", "", text))


def _padded(text: str, width: int) -> str:
    return text + " " * (width - _visible_cells(text))
