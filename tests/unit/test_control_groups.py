"""What control groups leave a process, in both versions of the interface: made-up groups, and what this kernel does by them."""

from __future__ import annotations

import pytest

from thermocline.control_groups import file_room_bytes, memory_limit_bytes, processor_limit


@pytest.fixture
def here(tmp_path):
    """The mount of all groups, and the file that says in which this process is."""
    mount = tmp_path / "mount"
    mount.mkdir()
    return mount, tmp_path / "cgroup"


def group(folder, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".", 1)).write_text(text)


def test_a_unified_groups_limit_less_its_own_memory(here):
    """Version 2: memory.max less what is no page of a file on a disk."""
    mount, membership = here
    membership.write_text("0::/a\n")
    stat = "anon 300\nfile 500\nshmem 20\npagetables 3\n"
    group(mount / "a", memory__max="1000\n", memory__stat=stat)
    assert file_room_bytes(*here) == 677
    assert memory_limit_bytes(*here) == 1000


def test_a_legacy_groups_limit_less_its_own_memory(here):
    """Version 1: limit_in_bytes less total_rss, of the memory controller's line alone."""
    mount, membership = here
    membership.write_text("3:cpu:/elsewhere\n2:memory:/a\n0::/\n")
    stat = "rss 1\ntotal_rss 250\ntotal_shmem 50\n"
    group(mount / "memory" / "a", memory__limit_in_bytes="1000\n", memory__stat=stat)
    assert file_room_bytes(*here) == 700
    assert memory_limit_bytes(*here) == 1000
    group(mount / "memory" / "a", memory__limit_in_bytes="9223372036854771712\n")
    assert file_room_bytes(*here) is None
    assert memory_limit_bytes(*here) is None


def test_memory_above_which_a_group_is_slowed_down_is_no_room(here):
    """A service's MemoryHigh: the kernel takes pages away from there on, long before memory.max."""
    mount, membership = here
    membership.write_text("0::/a\n")
    group(mount / "a", memory__max="1000\n", memory__high="600\n", memory__stat="anon 100\n")
    assert file_room_bytes(*here) == 500
    group(mount / "a", memory__max="max\n")
    assert file_room_bytes(*here) == 500
    group(mount / "a", memory__high="max\n")
    assert file_room_bytes(*here) is None


def test_the_tightest_group_above_counts(here):
    """A parent's lower limit holds for its children."""
    mount, membership = here
    membership.write_text("0::/a/b\n")
    group(mount / "a", memory__max="500\n", memory__stat="anon 100\n", cpu__max="400000 100000\n")
    group(mount / "a" / "b", memory__max="max\n", memory__stat="anon 50\n", cpu__max="max 100000\n")
    assert file_room_bytes(*here) == 400
    assert memory_limit_bytes(*here) == 500
    assert processor_limit(*here) == 4
    group(mount / "a" / "b", cpu__max="150000 100000\n")
    assert processor_limit(*here) == 1.5


def test_the_mount_counts_where_the_path_is_not_visible(here):
    """In a container the group's own folder is the mount."""
    mount, membership = here
    membership.write_text("0::/out/of/sight\n")
    group(mount, memory__max="900\n", memory__stat="anon 0\n", cpu__max="200000 100000")
    assert file_room_bytes(*here) == 900
    assert processor_limit(*here) == 2


def test_own_memory_beyond_the_limit_leaves_no_room(here):
    """Never negative."""
    mount, membership = here
    membership.write_text("0::/\n")
    group(mount, memory__max="10\n", memory__stat="anon 30\n")
    assert file_room_bytes(*here) == 0


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
def test_a_legacy_groups_processor_time(here, folder):
    """A quota of -1 is none; two controllers may have one folder, whose name is both."""
    mount, membership = here
    membership.write_text("4:cpu,cpuacct:/a\n3:cpuset:/b\n")
    group(mount / folder / "a", cpu__cfs_quota_us="250000\n", cpu__cfs_period_us="100000\n")
    assert processor_limit(*here) == 2.5
    group(mount / folder / "a", cpu__cfs_quota_us="-1\n")
    assert processor_limit(*here) is None


@pytest.mark.parametrize("text", ["max 100000\n", "", "5", "1 0", "no 5"])
def test_what_is_no_quota_is_no_limit(here, text):
    """Whatever a kernel writes."""
    mount, membership = here
    membership.write_text("0::/\n")
    group(mount, cpu__max=text)
    assert processor_limit(*here) is None


def test_without_groups_there_is_no_limit(tmp_path):
    """No membership file: another system."""
    here = tmp_path, tmp_path / "missing"
    assert file_room_bytes(*here) is None
    assert memory_limit_bytes(*here) is None
    assert processor_limit(*here) is None
