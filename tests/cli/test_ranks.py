"""Commands under torchrun, as far as they go in one process: who is which rank, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thermocline.cli.ranks import as_rank
from thermocline.config import CpuConfig, EngineConfig, ParallelConfig
from thermocline.errors import ConfigError
from thermocline.kernels.cpu_topology import processors_by_node

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    """Without its variables, whoever runs the tests."""
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def start(monkeypatch, rank: int, size: int, local: int) -> None:
    """Set the variables that torchrun sets."""
    for name, value in zip(TORCHRUN, (rank, size, local, "127.0.0.1", 29400), strict=True):
        monkeypatch.setenv(name, str(value))


def test_without_torchrun_there_are_no_ranks(monkeypatch):
    """One process is as before, also as torchrun's only one; variables of another launcher alone say nothing."""
    config = EngineConfig()
    assert as_rank(config) is config
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert as_rank(config) is config, "nobody says where the ranks meet"
    start(monkeypatch, 0, 1, 1)
    assert as_rank(config) is config


def test_a_mesh_needs_torchrun():
    """The error says what to start."""
    config = EngineConfig(parallel=ParallelConfig(dp=2))
    with pytest.raises(ConfigError, match="start them with torchrun"):
        as_rank(config)


@pytest.mark.usefixtures("default_threads")
def test_ranks_of_one_machine_share_its_processors(monkeypatch):
    """Rank and number come from the variables; threads that were asked for stay."""
    start(monkeypatch, 3, 4, 2)
    whole = as_rank(EngineConfig())
    assert (whole.parallel.rank, whole.parallel.num_ranks) == (3, 4)
    start(monkeypatch, 3, 4, 1)
    alone = as_rank(EngineConfig())
    assert alone.cpu.threads is None, "the machine is this rank's"
    assert whole.cpu.threads is not None
    asked = as_rank(replace(EngineConfig(), cpu=CpuConfig(threads=3)))
    assert asked.cpu.threads == 3


@pytest.mark.parametrize(
    ("nodes", "cpu", "bound"),
    [
        (["0-3", "4-7"], CpuConfig(), {4, 5, 6, 7}),
        (["0-3", "4-7"], CpuConfig(threads=4), {4, 5, 6, 7}),
        (["0-3", "4-7"], CpuConfig(threads=5), None),
        (["0-7"], CpuConfig(), None),
        (["0-7"], CpuConfig(pin=True), {4, 5, 6, 7}),
    ],
    ids=["nodes", "as many threads", "more threads", "one node", "pinned"],
)
def test_ranks_keep_to_their_share_of_the_machine(monkeypatch, tmp_path, nodes, cpu, bound):
    """By NUMA nodes, or by cores where threads are pinned: two ranks' threads would be pinned to the same ones."""
    for number, text in enumerate(nodes):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(text)
    monkeypatch.setattr(processors_by_node, "__defaults__", (tmp_path,))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    found = []
    monkeypatch.setattr("os.sched_setaffinity", lambda _, share: found.append(set(share)))
    start(monkeypatch, 1, 2, 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    as_rank(EngineConfig(cpu=cpu))
    assert found == ([] if bound is None else [bound])
    start(monkeypatch, 1, 2, 1)
    as_rank(EngineConfig(cpu=cpu))
    assert len(found) == (bound is not None), "the machine is this rank's"


def test_a_mesh_of_another_size_is_refused(monkeypatch, invoke):
    """One line on stderr, before the model is read."""
    start(monkeypatch, 0, 2, 1)
    result = invoke("run", "--prompt", "x", "--dp", "3")
    assert result.exit_code == 1
    assert "3 ranks, but torchrun started 2" in result.stderr
