"""Room for file pages: the machine's, or the tightest memory group's, in both versions of the interface."""

from __future__ import annotations

import psutil

from thermocline.prefetch.governor_builder import spare_bytes
from thermocline.prefetch.memory import page_cache_room_bytes


def membership(tmp_path, text: str):
    path = tmp_path / "cgroup"
    path.write_text(text)
    return path


def group(folder, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_a_unified_groups_limit_less_its_own_memory(tmp_path):
    """Version 2: memory.max less anon."""
    mount = tmp_path / "mount"
    group(mount / "a", memory__max="1000\n", memory__stat="anon 300\nfile 500\n")
    room = page_cache_room_bytes(mount, membership(tmp_path, "0::/a\n"))
    assert room == 700


def test_a_legacy_groups_limit_less_its_own_memory(tmp_path):
    """Version 1: limit_in_bytes less total_rss, of the memory controller's line alone."""
    mount = tmp_path / "mount"
    stat = "rss 1\ntotal_rss 250\n"
    group(mount / "memory" / "a", memory__limit_in_bytes="1000\n", memory__stat=stat)
    text = "3:cpu:/elsewhere\n2:memory:/a\n0::/\n"
    assert page_cache_room_bytes(mount, membership(tmp_path, text)) == 750


def test_the_tightest_group_above_counts(tmp_path):
    """A parent's lower limit holds for its children."""
    mount = tmp_path / "mount"
    group(mount / "a", memory__max="500\n", memory__stat="anon 100\n")
    group(mount / "a" / "b", memory__max="max\n", memory__stat="anon 50\n")
    assert page_cache_room_bytes(mount, membership(tmp_path, "0::/a/b\n")) == 400


def test_the_mount_counts_where_the_path_is_not_visible(tmp_path):
    """In a container the group's own folder is the mount."""
    mount = tmp_path / "mount"
    group(mount, memory__max="900\n", memory__stat="anon 0\n")
    assert page_cache_room_bytes(mount, membership(tmp_path, "0::/out/of/sight\n")) == 900


def test_own_memory_beyond_the_limit_leaves_no_room(tmp_path):
    """Never negative."""
    mount = tmp_path / "mount"
    group(mount, memory__max="10\n", memory__stat="anon 30\n")
    assert page_cache_room_bytes(mount, membership(tmp_path, "0::/\n")) == 0


def test_without_groups_it_is_the_machines_available_memory(tmp_path):
    """No membership file (another system): what the machine could give."""
    room = page_cache_room_bytes(tmp_path, tmp_path / "missing")
    assert 0 < room <= psutil.virtual_memory().total


def test_little_memory_is_not_mostly_spared():
    """A sixteenth is left free, and never more than 256 MiB."""
    assert spare_bytes(640 << 20) == 40 << 20
    assert spare_bytes(4 << 30) == spare_bytes(64 << 30) == 256 << 20
