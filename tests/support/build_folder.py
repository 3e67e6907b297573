"""Keeps tests that use the folder of the native build apart, also those of other processes."""

from __future__ import annotations

import fcntl
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).parents[2]


@contextmanager
def build_folder_to_oneself():
    """Wait until nobody else compiles there, and keep others out."""
    folder = _ROOT / "build"
    folder.mkdir(exist_ok=True)
    with (folder / ".tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
