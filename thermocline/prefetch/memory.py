"""Reads how many bytes of files the system lets this process keep in memory. Knows no model.

A control group's limit covers its share of the page cache too, so that a file larger than the limit is read again and
again however much memory the machine has.
"""

from __future__ import annotations

import psutil

from thermocline.control_groups import file_room_bytes


def page_cache_room_bytes() -> int:
    """Return the most bytes of files that can be in memory for this process, other files included."""
    available, room = int(psutil.virtual_memory().available), file_room_bytes()
    return available if room is None else min(available, room)
