"""Reads what this process's control groups leave it of the machine: memory for files, and processor time.

A container's limits, a service's, or a batch system's; in both versions of the interface. A group's limit holds for all groups
within it, so each group above counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MOUNT: Final = Path("/sys/fs/cgroup")
MEMBERSHIP: Final = Path("/proc/self/cgroup")

# Version 1 has no word for no limit, but a number of this size.
_NO_LIMIT_BYTES: Final = 1 << 60

# Of memory.stat, what is no page of a file and stays: names of version 2, and of version 1.
_UNIFIED_OWN: Final = ("anon", "shmem", "pagetables")
_LEGACY_OWN: Final = ("total_rss", "total_shmem")


def memory_limit_bytes(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Return the bytes of memory that the tightest group allows, those of files included; None for no limit.

    Above memory.high a group is slowed down and loses pages as at its end, so the lower of both counts.
    """
    return min((limit for limit, _ in _memory_limits(mount, membership)), default=None)


def file_room_bytes(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Return the bytes of files that the groups can hold beside what is no file's; None for no limit."""
    limits = _memory_limits(mount, membership)
    return min((max(0, limit - own) for limit, own in limits), default=None)


def processor_limit(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> float | None:
    """Return how many processors' time the tightest group allows (cpu.max); None for no limit."""
    found = []
    for folder, is_unified in _groups("cpu", mount, membership):
        if is_unified:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def _memory_limits(mount: Path, membership: Path) -> Iterator[tuple[int, int]]:
    """Yield each group's limit, and the bytes in it that are no file's."""
    for folder, is_unified in _groups("memory", mount, membership):
        names = ("memory.max", "memory.high") if is_unified else ("memory.limit_in_bytes",)
        found = [_text(folder / name) for name in names]
        limits = [int(text) for text in found if text.isdigit() and int(text) < _NO_LIMIT_BYTES]
        if limits:
            own = _UNIFIED_OWN if is_unified else _LEGACY_OWN
            yield min(limits), _sum_of(folder / "memory.stat", own)


def _groups(controller: str, mount: Path, membership: Path) -> Iterator[tuple[Path, bool]]:
    """Yield this process's group and all above it, each with whether it is of version 2.

    In a container only the mount may be there.
    """
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top = mount
        elif controller in controllers.split(","):
            together = mount / controllers  # two controllers may have one folder
            top = together if together.is_dir() else mount / controller
        else:
            continue
        folder = top / path.lstrip("/")
        for each in (folder, *folder.parents):
            if each.is_relative_to(top):
                yield each, not controllers


def _sum_of(path: Path, names: Iterable[str]) -> int:
    fields = dict(line.rsplit(" ", 1) for line in _text(path).splitlines())
    return sum(int(fields.get(name, 0)) for name in names)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
