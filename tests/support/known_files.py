"""Model files that many tests write: made once in a run, by the process that comes first, and copied. Knows no format."""

from __future__ import annotations

import hashlib
import shutil
from typing import TYPE_CHECKING
from uuid import uuid4

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

folder: Path | None = None
"""Of a run's processes together, while tests run (`tests/conftest.py`); without it every file is made."""


def write_known(path: Path, key: object, write: Callable[[Path], object]) -> Path:
    """Write to `path` what `write` writes, which is the same for all keys of one `repr`, and return it."""
    if folder is None:
        write(path)
        return path
    known = folder / hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()
    if not known.exists():
        folder.mkdir(exist_ok=True)
        mine = folder / uuid4().hex
        write(mine)
        mine.rename(known)
    shutil.copyfile(known, path)
    return path
