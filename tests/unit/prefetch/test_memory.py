"""Room for file pages: the machine's, or what its control groups leave."""

from __future__ import annotations

import psutil

from thermocline.prefetch import memory
from thermocline.prefetch.governor_builder import spare_bytes
from thermocline.prefetch.memory import page_cache_room_bytes


def test_the_tighter_of_machine_and_groups_counts(monkeypatch):
    """Available memory of the machine, unless a group leaves less."""
    monkeypatch.setattr(memory, "file_room_bytes", lambda: None)
    assert 0 < page_cache_room_bytes() <= psutil.virtual_memory().total
    monkeypatch.setattr(memory, "file_room_bytes", lambda: 700)
    assert page_cache_room_bytes() == 700
    monkeypatch.setattr(memory, "file_room_bytes", lambda: 1 << 60)
    assert page_cache_room_bytes() <= psutil.virtual_memory().total


def test_little_memory_is_not_mostly_spared():
    """A sixteenth is left free, and never more than 256 MiB."""
    assert spare_bytes(640 << 20) == 40 << 20
    assert spare_bytes(4 << 30) == spare_bytes(64 << 30) == 256 << 20
