"""Keeps measured speeds in the user's cache directory, by machine, settings and model file.

Knows neither how speeds are measured nor what they are for.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from thermocline import __version__
from thermocline.costmodel.machine_speeds import parse_speeds
from thermocline.environment import user_cache_folder
from thermocline.errors import ConfigError
from thermocline.machine import machine_facts
from thermocline.whole_files import whole_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from thermocline.costmodel.machine_speeds import MachineSpeeds


def cached_speeds(paths: Sequence[Path], settings: str) -> MachineSpeeds | None:
    """Return what was measured here before, None where that is nothing, or nothing that can be read.

    paths: the files of the model; settings: what else speeds depend on, such as the number of threads.
    """
    place = speeds_place(paths, settings)
    if place is None:
        return None
    try:
        return parse_speeds(place.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError):
        return None


def keep_speeds(paths: Sequence[Path], settings: str, speeds: MachineSpeeds) -> Path | None:
    """Keep `speeds` and return where; None where nothing can be written, which is no error."""
    place = speeds_place(paths, settings)
    if place is None:
        return None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(place) as file:
            file.write(speeds.to_json().encode())
    except OSError:
        return None
    return place


def speeds_place(paths: Sequence[Path], settings: str) -> Path | None:
    """Return the file for these speeds; None for a user without a home."""
    folder = user_cache_folder()
    if folder is None:
        return None
    facts = machine_facts()
    digest = hashlib.blake2b(digest_size=8)
    machine = (facts.cpu, facts.num_usable_cores, facts.cpu_limit, facts.system)
    digest.update(repr((__version__, machine, settings)).encode())
    for path in paths:
        status = path.stat()
        digest.update(
            b"|%b|%d|%d" % (os.fsencode(path.resolve()), status.st_size, status.st_mtime_ns)
        )
    return folder / "speeds" / f"{paths[0].stem}-{digest.hexdigest()}.json"
