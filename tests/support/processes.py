"""Which child processes this process has, and which signals they ignore from their start."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator


def child_pids() -> set[int]:
    """Return the process ids of this process's children, ended ones that nobody waited for included.

    psutil looks at all processes, as threads (each has its own list of children in /proc) may end meanwhile.
    """
    return {child.pid for child in psutil.Process().children()}


@contextmanager
def disposition(number: signal.Signals, action: signal.Handlers) -> Iterator[None]:
    """Let processes that are started meanwhile ignore a signal, or not, whatever the tests themselves were started with."""
    before = signal.signal(number, action)
    try:
        yield
    finally:
        signal.signal(number, before)
