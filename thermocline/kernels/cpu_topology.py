"""Counts the threads that should compute, by the processors, physical cores and processor time that this process may use.

Divides the processors of a machine between several processes, by its NUMA nodes.

Knows no kernel and no GPU.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from thermocline.control_groups import processor_limit
from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

_PROCESSORS: Final = Path("/sys/devices/system/cpu")
_NODES: Final = Path("/sys/devices/system/node")
_MAX_THREADS: Final = 1024  # that the core takes


def checked_threads(wanted: int | None, *, beside_gpu: bool = False) -> int:
    """Return `wanted`, or `default_threads`. Raises ConfigError for what makes no sense."""
    threads = default_threads(beside_gpu=beside_gpu) if wanted is None else wanted
    if not 1 <= threads <= _MAX_THREADS:
        raise ConfigError(f"--threads is {threads}: use 1 to {_MAX_THREADS}")
    return threads


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


def processors_by_node(
    processors: Collection[int], root: Path = _NODES
) -> tuple[frozenset[int], ...]:
    """Return those of `processors` that are in each NUMA node, nodes in order; nodes with none are left out.

    Where the system does not say, all are of one node.
    """
    found = []
    for path in sorted(root.glob("node[0-9]*"), key=lambda each: int(each.name[4:])):
        with suppress(OSError):
            found.append(_listed((path / "cpulist").read_text()) & set(processors))
    known = frozenset().union(*found)
    if rest := frozenset(processors) - known:
        found.append(rest)
    return tuple(node for node in found if node)


def share_of(
    number: int, count: int, nodes: Sequence[frozenset[int]], core_of: Mapping[int, str]
) -> frozenset[int]:
    """Return the processors of process `number` of `count` on one machine: whole nodes, or whole cores of a node.

    nodes: at least one. More processes than cores share some.
    """
    if count <= len(nodes):
        first, last = (n * len(nodes) // count for n in (number, number + 1))
        return frozenset().union(*nodes[first:last])
    which = number * len(nodes) // count
    here = [n for n in range(count) if n * len(nodes) // count == which]
    cores: dict[str, set[int]] = {}
    for processor in sorted(nodes[which]):
        cores.setdefault(core_of[processor], set()).add(processor)
    names, place = list(cores), here.index(number)
    first, last = (n * len(names) // len(here) for n in (place, place + 1))
    mine = names[first:last] or [names[place % len(names)]]
    return frozenset().union(*(cores[name] for name in mine))


def _listed(text: str) -> frozenset[int]:
    """Return the numbers of a list such as 0-3,8."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
