"""Writes files that appear whole or not at all, and never takes the place of anything but a file. Knows no content."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def whole_file(path: Path, *, sync: bool = False, private: bool = False) -> Iterator[IO[bytes]]:
    """Yield a binary file whose bytes are at `path` afterwards; a file that was there stays until then.

    A symbolic link stays, and the file that it names is written. Devices and pipes with a reader are written to
    directly, since a file in their place would take them from the system. sync: the bytes are on the disk before the
    file appears. private: nobody but its owner may read or write the file. Raises OSError, also for a pipe that nobody
    reads.
    """
    target = Path(os.path.realpath(path))
    if _is_special(path):
        # A pipe without a reader is an error at once; writing to one waits for its reader as usual.
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        os.set_blocking(descriptor, True)
        with os.fdopen(descriptor, "wb") as file:
            yield file
        return
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            if private:
                os.fchmod(file.fileno(), 0o600)  # while it is empty
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _is_special(path: Path) -> bool:
    """Whether something else than a file is there. Raises OSError for a folder."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    return not stat.S_ISREG(mode)
