"""Markdown in a terminal: the same emphasis as in markdown-it, however the text is cut."""

from __future__ import annotations

import re

import pytest
from markdown_it import MarkdownIt

from thermocline.cli.console import MarkdownWriter
from thermocline.cli.terminal_markdown import TerminalMarkdown

DOCUMENT = """\
# Head *slanted* above

Some **bold** and *it* with `code **x**`, 2 * 3 * 4, snake_case_name, __b__ _i_ and \\*no\\*.
- item **one**
- item *two* and ``a ` b``

1. first ***both***
2. **a *b* c**

> quoted **strong** passage

**never closed, and `neither
and ** not * these **
- - -
```python
def f(**more):  # *no*
    return `x`
```
last **word**
"""
STYLES = {"1": "strong", "3": "em", "36": "code"}
RUN = re.compile(r"\x1b\[([\d;]*)m|(.)", re.DOTALL)


def styled(text: str) -> list[tuple[str, frozenset[str]]]:
    """Return each character with what a terminal makes of it."""
    style: frozenset[str] = frozenset()
    found = []
    for codes, char in RUN.findall(text):
        if codes:
            style = frozenset(STYLES[each] for each in codes.split(";") if each in STYLES)
        elif char:
            found.append((char, style))
    return found


def shown(text: str, size: int, width: int = 80) -> str:
    """Return what is shown of a text that comes in pieces."""
    markdown = TerminalMarkdown(width)
    pieces = [markdown.push(text[at : at + size]) for at in range(0, len(text), size)]
    return "".join(pieces) + markdown.finish()


def words_by_style(pairs: list[tuple[str, frozenset[str]]]) -> list[tuple[str, frozenset[str]]]:
    """Return the words, those of a code block's first and last line left out; a word has the style of its first letter."""
    words: list[tuple[str, frozenset[str]]] = []
    line: list[tuple[str, frozenset[str]]] = []
    for pair in [*pairs, ("\n", frozenset())]:
        line.append(pair)
        if pair[0] == "\n":
            text = "".join(char for char, _ in line)
            if not text.startswith("──"):
                words += [(word[0], line[word.start()][1]) for word in re.finditer(r"\w+", text)]
            line = []
    return words


def judged(text: str) -> list[tuple[str, frozenset[str]]]:
    """Return the same of markdown-it's tokens."""
    pairs: list[tuple[str, frozenset[str]]] = []
    for block in MarkdownIt().parse(text):
        if block.type == "fence":
            pairs += [(char, frozenset({"code"})) for char in block.content]
        is_open: list[str] = []
        for token in block.children or ():
            if token.type.endswith("_open"):
                is_open.append(token.tag)
            elif token.type.endswith("_close"):
                is_open.remove(token.tag)
            else:
                more = {"code"} if token.type == "code_inline" else set()
                char = "\n" if token.type == "softbreak" else token.content
                pairs += [(each, frozenset({*is_open, *more})) for each in char]
        pairs.append(("\n", frozenset()))
    return words_by_style(pairs)


def test_emphasis_is_what_markdown_it_finds():
    """Every word of a document is bold, italic or code where a known parser says so, and nowhere else."""
    ours = [
        (word, style - {"em"} if word in ("quoted", "strong", "passage") else style)
        for word, style in words_by_style(styled(shown(DOCUMENT, len(DOCUMENT))))
    ]
    # Headings are bold here, quotes are italic, and numbers of lists are no text there.
    heading = {"Head", "slanted", "above"}
    expected = [
        (word, style | {"strong"} if word in heading else style) for word, style in judged(DOCUMENT)
    ]
    numbers = [("1", frozenset()), ("2", frozenset())]
    assert [each for each in ours if each[0] not in "12"] == [
        each for each in expected if each[0] not in "12"
    ]
    assert [each for each in ours if each in numbers] == [*numbers[1:], *numbers]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 31])
def test_the_cut_of_a_text_does_not_matter(size):
    """Pieces of any size give what the whole text gives."""
    table = "\n| a | **b** |\n|---|:-:|\n| 漢字 | `x` |\n\nend"
    text = DOCUMENT + table
    assert styled(shown(text, size)) == styled(shown(text, len(text)))


def test_text_without_markup_is_shown_at_once():
    """Nothing is held back that can not become markup."""
    markdown = TerminalMarkdown()
    assert markdown.push("Plain words, 2 * 3") == "Plain words, 2 * 3"
    assert markdown.push(" and more") == " and more"
    assert markdown.push(" **bo") == " "
    assert markdown.push("ld** ") == "\x1b[1mbold\x1b[0m "


def test_a_table_is_aligned_where_it_fits():
    """Columns have one width, wide characters counted; a table that is too wide stays as it is."""
    table = "| a | b |\n|---|---|\n| 漢字 | x |\n"
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown(table, 5))
    assert plain.splitlines() == ["a     b", "────  ─", "漢字  x"]
    assert shown(table, 5, width=8) == table
    assert shown("| no table\nmore", 3) == "| no table\nmore"


def test_no_control_code_of_a_model_reaches_the_terminal(capsys):
    """The only escape sequences are those of the styles."""
    with MarkdownWriter() as writer:
        writer.think("\x1b[2J")
        writer.write("**a\x1b]0;b\x07**\n")
    out = capsys.readouterr().out
    assert set(re.findall(r"\x1b[^m]*m?", out)) == {"\x1b[2m", "\x1b[1m", "\x1b[0m"}
