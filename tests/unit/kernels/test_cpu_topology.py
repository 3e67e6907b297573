"""How many threads compute by default, on made-up machines."""

from __future__ import annotations

import math
import os

import pytest

from thermocline.control_groups import processor_limit
from thermocline.kernels import cpu_topology
from thermocline.kernels.cpu_topology import (
    core_of_each,
    default_threads,
    num_threads,
    processors_by_node,
    share_of,
)

PAIRS = {n: f"{n % 8},{n % 8 + 8}" for n in range(16)}
HYBRID = {n: f"{n // 2 * 2}-{n // 2 * 2 + 1}" for n in range(16)} | {
    n: str(n) for n in range(16, 24)
}
ALONE = {n: str(n) for n in range(4)}


@pytest.mark.parametrize(
    ("core_of", "alone", "beside_gpu"),
    [
        (PAIRS, 16, 7),
        (HYBRID, 24, 15),
        (ALONE, 4, 3),
        ({0: "0-1", 1: "0-1"}, 2, 1),
        ({0: "0"}, 1, 1),
        ({n: PAIRS[n] for n in (0, 8, 1)}, 3, 1),
        ({}, 1, 1),
    ],
    ids=["pairs", "hybrid", "no pairs", "one core", "one processor", "some allowed", "none"],
)
def test_a_gpu_takes_a_core_and_the_second_threads(core_of, alone, beside_gpu):
    """All processors without a GPU; with one, a thread per physical core but for one, and one at least."""
    assert num_threads(core_of, beside_gpu=False) == alone
    assert num_threads(core_of, beside_gpu=True) == beside_gpu


@pytest.mark.parametrize(
    ("limit", "alone", "beside_gpu"),
    [(None, 16, 7), (64.0, 16, 7), (8.0, 8, 7), (4.0, 4, 3), (2.5, 3, 2), (1.0, 1, 1), (0.2, 1, 1)],
)
def test_a_limit_of_processor_time_is_a_limit_of_threads(limit, alone, beside_gpu):
    """A container of four processors' time has four threads on a machine of sixteen; the one that spins for a GPU is one."""
    assert num_threads(PAIRS, beside_gpu=False, limit=limit) == alone
    assert num_threads(PAIRS, beside_gpu=True, limit=limit) == beside_gpu


def test_the_groups_limit_is_the_default(monkeypatch):
    """What this process's groups allow, and not what the machine has."""
    monkeypatch.setattr(cpu_topology, "processor_limit", lambda: 0.5)
    assert default_threads() == default_threads(beside_gpu=True) == 1


def test_cores_are_read_where_the_system_tells_them(tmp_path):
    """A processor of which nothing is said is a core of its own."""
    for number in (0, 4):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text("0,4\n")
    assert core_of_each({0, 4, 5}, tmp_path) == {0: "0,4", 4: "0,4", 5: "5"}


def test_this_machine_has_threads():
    """As many as processors that may be used, and no more beside a GPU."""
    most = len(os.sched_getaffinity(0))
    assert default_threads() == (
        most if (limit := processor_limit()) is None else min(most, math.ceil(limit))
    )
    assert 1 <= default_threads(beside_gpu=True) <= default_threads()


def make_nodes(root, *lists: str):
    """Write what the system says of NUMA nodes."""
    for number, text in enumerate(lists):
        (root / f"node{number}").mkdir()
        (root / f"node{number}" / "cpulist").write_text(text + "\n")
    return root


def test_nodes_are_read_where_the_system_tells_them(tmp_path):
    """In the order of their numbers; of those that may be used, and without nodes of memory alone."""
    root = make_nodes(tmp_path, *(["0-1,8-9", "", "2-3,10-11"] + [str(n) for n in range(20, 29)]))
    allowed = {0, 1, 3, 8, 10, 28, 27}
    assert processors_by_node(allowed, root) == ({0, 1, 8}, {3, 10}, {27}, {28})
    assert processors_by_node({0, 77}, root) == ({0}, {77})
    assert processors_by_node({0, 5}, tmp_path / "none") == ({0, 5},)


NODES = (frozenset({0, 1, 2, 3, 8, 9, 10, 11}), frozenset({4, 5, 6, 7, 12, 13, 14, 15}))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8, 20])
def test_processes_divide_nodes_and_then_cores(count):
    """Each has whole nodes, or whole cores of one; none is left out, and none is shared while there are enough."""
    shares = [share_of(number, count, NODES, PAIRS) for number in range(count)]
    assert frozenset().union(*shares) == frozenset(PAIRS)
    for share in shares:
        assert {PAIRS[n] for n in PAIRS if n not in share}.isdisjoint(PAIRS[n] for n in share)
        if count <= len(NODES):
            assert all(node <= share or node.isdisjoint(share) for node in NODES)
        else:
            assert any(share <= node for node in NODES)
    if count <= 8:
        assert sum(map(len, shares)) == len(PAIRS)


def test_of_three_nodes_two_processes_have_one_and_two():
    """Whole nodes, not halves of one."""
    nodes = tuple(frozenset({2 * n, 2 * n + 1}) for n in range(3))
    core_of = {n: str(n) for n in range(6)}
    assert [share_of(number, 2, nodes, core_of) for number in range(2)] == [{0, 1}, {2, 3, 4, 5}]
