"""Reads how many bytes of files the system lets this process keep in memory. Knows no model.

A memory cgroup's limit covers its share of the page cache too, so that a file larger than the limit is
read again and again however much memory the machine has.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOUNT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
# File name of the limit, and the name in memory.stat of what is not the page cache: version 2, version 1.
_UNIFIED = ("memory.max", "anon")
_LEGACY = ("memory.limit_in_bytes", "total_rss")


def page_cache_room_bytes(mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> int:
    """Return the most bytes of files that can be in memory for this process, other files included."""
    room = int(psutil.virtual_memory().available)
    for folder, (limit_name, own_name) in _groups(mount, membership):
        limit = _number(folder / limit_name)
        if limit is not None:
            room = min(room, max(0, limit - _own_bytes(folder / "memory.stat", own_name)))
    return room


def _groups(mount: Path, membership: Path) -> Iterator[tuple[Path, tuple[str, str]]]:
    """Yield this process's memory cgroup and all above it; in a container only the mount may be there."""
    for line in _lines(membership):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = mount, _UNIFIED
        elif "memory" in controllers.split(","):
            top, names = mount / "memory", _LEGACY
        else:
            continue
        folder = top / path.lstrip("/")
        for each in (folder, *folder.parents):
            if each.is_relative_to(top):
                yield each, names


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _own_bytes(path: Path, name: str) -> int:
    fields = dict(line.rsplit(" ", 1) for line in _lines(path))
    return int(fields.get(name, 0))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
