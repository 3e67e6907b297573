"""The lines that a user typed in earlier chats: a file that only they can read. Knows no terminal.

Each line of the file is one message as a JSON string, so that messages of several lines stay whole. Chats that run at
the same time append to it.
"""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING, Final

from thermocline.whole_files import whole_file

if TYPE_CHECKING:
    from pathlib import Path

MAX_MESSAGES: Final = 1000
_MAX_BYTES: Final = 4 << 20
_FILE_NAME: Final = "chat_history.jsonl"


class LineHistory:
    """The messages of earlier chats, and of this one, in a file of `folder`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / _FILE_NAME

    def load(self) -> list[str]:
        """Return the last messages, the newest last; shortens a file that has grown. Raises OSError."""
        try:
            self._protect()
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - _MAX_BYTES))
                lines = file.read().split(b"\n")
        except FileNotFoundError:
            return []
        found = [text for line in lines if (text := _message(line)) is not None]
        kept = found[-MAX_MESSAGES:]
        if len(found) > 2 * MAX_MESSAGES or size > _MAX_BYTES:
            with whole_file(self.path, private=True) as file:
                file.writelines(map(_line, kept))
        return kept

    def append(self, message: str) -> None:
        """Add a message. Raises OSError."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        descriptor = os.open(self.path, flags, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            file.write(_line(message))

    def _protect(self) -> None:
        """Take a file's permissions away from others."""
        mode = stat.S_IMODE(self.path.stat().st_mode)
        if mode & 0o077:
            self.path.chmod(mode & 0o700)


def _line(message: str) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _message(line: bytes) -> str | None:
    """Return the message of a line; None for what is none, such as a line that was cut."""
    try:
        text = json.loads(line)
    except ValueError:
        return None
    return text if isinstance(text, str) and text else None
