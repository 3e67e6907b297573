"""What a terminal is shown: nothing that could control it."""

from __future__ import annotations

import pytest

from thermocline.cli.console import AnswerWriter, one_line, without_controls


def test_control_characters_are_made_visible():
    """Escape sequences of a model reach no terminal; text, tabs and line ends do."""
    assert without_controls("a\x1b[2Jb\tc\r\n\x9bé漢") == "a\ufffd[2Jb\tc\n\ufffdé漢"


def test_an_error_is_one_line():
    """Line ends become spaces, other unprintable characters escapes."""
    assert one_line("a\nb\x1b[31m\udcff é") == r"a b\x1b[31m\udcff é"


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [(["a", "b"], "ab\n"), (["a\n"], "a\n"), (["", ""], "\n"), (["a", ""], "a\n")],
)
def test_an_answer_ends_with_one_line_end(capsys, pieces, shown):
    """Whatever the pieces, the next output starts on a new line."""
    with AnswerWriter() as writer:
        for piece in pieces:
            writer.write(piece)
    assert capsys.readouterr().out == shown


def test_a_failed_answer_leaves_nothing_behind(capsys):
    """An answer that never began prints nothing; one that began gets its line end."""

    def fail_after(text: str) -> None:
        with AnswerWriter() as writer:
            writer.write(text)
            raise KeyError

    with pytest.raises(KeyError):
        fail_after("")
    assert capsys.readouterr().out == ""
    with pytest.raises(KeyError):
        fail_after("a")
    assert capsys.readouterr().out == "a\n"
