"""Facts about the machine that a measurement was taken on: processor, memory, versions.

Leaves out what identifies a machine (host name, user, paths): the facts are published beside the numbers.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import psutil

from thermocline import __version__
from thermocline.control_groups import memory_limit_bytes, processor_limit

_PACKAGES: Final = ("numpy", "gguf", "tokenizers")


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What a speed depends on, besides the model.

    num_cores are the logical cores of the machine, num_usable_cores those that this process may run
    on; cpu_limit is a container's share of them, memory_limit_bytes its memory (None: no limit).
    """

    cpu: str
    num_cores: int
    num_usable_cores: int
    cpu_limit: float | None
    memory_bytes: int
    memory_limit_bytes: int | None
    system: str
    python: str
    versions: dict[str, str]

    def as_dict(self) -> dict[str, object]:
        """Return the facts as plain values for JSON."""
        return asdict(self)


def machine_facts() -> MachineFacts:
    """Read the facts; takes some milliseconds."""
    num_cores = os.cpu_count() or 1
    return MachineFacts(
        cpu=_cpu_model(Path("/proc/cpuinfo")),
        num_cores=num_cores,
        num_usable_cores=_num_usable_cores(num_cores),
        cpu_limit=processor_limit(),
        memory_bytes=int(psutil.virtual_memory().total),
        memory_limit_bytes=memory_limit_bytes(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        versions={"thermocline": __version__} | _package_versions(),
    )


def bytes_read_from_storage() -> int:
    """Return the bytes that the system read from storage for this process, page faults included.

    0 where the system does not tell.
    """
    try:
        return int(psutil.Process().io_counters().read_bytes)
    except (AttributeError, psutil.Error, OSError):
        return 0


def _cpu_model(cpuinfo: Path) -> str:
    for line in _read(cpuinfo).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _num_usable_cores(num_cores: int) -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return num_cores


def _package_versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
