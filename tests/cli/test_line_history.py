"""What was typed in earlier chats: whole messages, for one user, in a bounded file."""

from __future__ import annotations

import pytest

from thermocline.cli.line_history import MAX_MESSAGES, LineHistory


def test_messages_come_back_as_they_were(tmp_path):
    """Lines, quotes and other scripts survive; a line that was cut is left out."""
    history = LineHistory(tmp_path / "new" / "folder")
    assert history.load() == []
    messages = ["one", "two\nlines", 'with "quotes"', "é漢", "\udcff"]
    for message in messages:
        history.append(message)
    with history.path.open("ab") as file:
        file.write(b'"cut')
    assert LineHistory(tmp_path / "new" / "folder").load() == messages


def test_the_file_is_for_its_user_alone(tmp_path):
    """It is made so, and made so again if it was not."""
    history = LineHistory(tmp_path)
    history.append("one")
    assert history.path.stat().st_mode & 0o777 == 0o600
    history.path.chmod(0o644)
    assert history.load() == ["one"]
    assert history.path.stat().st_mode & 0o777 == 0o600


def test_the_file_does_not_grow_for_ever(tmp_path):
    """Of many messages the last ones are kept, and the file is still for its user alone."""
    history = LineHistory(tmp_path)
    for number in range(2 * MAX_MESSAGES + 1):
        history.append(str(number))
    assert history.load() == [str(n) for n in range(MAX_MESSAGES + 1, 2 * MAX_MESSAGES + 1)]
    assert len(history.path.read_bytes().splitlines()) == MAX_MESSAGES
    assert history.path.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_can_not_be_written_is_an_error(tmp_path):
    """The chat hears of it, and does without."""
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        LineHistory(tmp_path / "file").append("one")
