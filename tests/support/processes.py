"""Which child processes this process has."""

from __future__ import annotations

import psutil


def child_pids() -> set[int]:
    """Return the process ids of this process's children, ended ones that nobody waited for included.

    psutil looks at all processes, as threads (each has its own list of children in /proc) may end meanwhile.
    """
    return {child.pid for child in psutil.Process().children()}
