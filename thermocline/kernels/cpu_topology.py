"""Counts the threads that should compute, by the processors, physical cores and processor time that this process may use.

Knows no kernel and no GPU.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from thermocline.control_groups import processor_limit

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_PROCESSORS: Final = Path("/sys/devices/system/cpu")


def default_threads(*, beside_gpu: bool = False) -> int:
    """Return how many threads compute if nobody says so. beside_gpu: while a thread waits for a GPU, spinning."""
    processors = core_of_each(os.sched_getaffinity(0))
    return num_threads(processors, beside_gpu=beside_gpu, limit=processor_limit())


def num_threads(core_of: Mapping[int, str], *, beside_gpu: bool, limit: float | None = None) -> int:
    """Return one thread per processor; beside a GPU one per physical core, but for one core.

    core_of: the core of each processor that may be used. The thread that spins for a GPU keeps a core busy: a
    computing thread on it would hold up all others, which wait for the last of them. limit: how many processors' time is
    allowed; more threads than that would use it up early, and all be stopped for the rest of each tenth of a second.
    """
    places = len(set(core_of.values())) if beside_gpu else len(core_of)
    if limit is not None:
        places = min(places, math.ceil(limit))
    return max(places - 1 if beside_gpu else places, 1)


def core_of_each(processors: Collection[int], root: Path = _PROCESSORS) -> dict[int, str]:
    """Return the physical core of each processor, as the list of all its processors.

    Where the system does not say, each processor is a core of its own.
    """
    found = {}
    for number in processors:
        path = root / f"cpu{number}" / "topology" / "thread_siblings_list"
        try:
            found[number] = path.read_text().strip()
        except OSError:
            found[number] = str(number)
    return found
