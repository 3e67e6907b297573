"""The bounds that prefetch's reading is compared with, and the refusal to measure what is not cold."""

from __future__ import annotations

import json
import random
import subprocess

import pytest

from benchmarks.foresight import offline_misses, recent_misses
from benchmarks.larger_than_ram import Field, drop_pages
from benchmarks.sides import Work
from benchmarks.synthetic_model import write_model


def test_with_room_for_all_both_read_each_expert_once():
    """Only first uses miss."""
    selections = [(0, [1, 2]), (1, [1]), (0, [2, 1]), (1, [1])]
    assert offline_misses(selections, 10) == recent_misses(selections, 10) == 3


def test_a_cyclic_scan_tells_them_apart():
    """Four in turn with room for three: the recently used one always misses, the optimum one in three."""
    selections = [(0, [n % 4]) for n in range(40)]
    assert recent_misses(selections, 3) == 40
    assert offline_misses(selections, 3) == 4 + 12


def test_the_optimum_never_reads_more():
    """Over random selections it is at most what least recently used reads, and at least every first use."""
    draw = random.Random(5)
    for room in (2, 5, 9):
        selections = [(n % 3, draw.sample(range(6), 2)) for n in range(90)]
        first = len({(layer, expert) for layer, experts in selections for expert in experts})
        assert first <= offline_misses(selections, room) <= recent_misses(selections, room)


def test_a_file_that_is_in_use_is_not_measured(tmp_path, monkeypatch):
    """Where the pages stay, the run ends with a message that says why."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    monkeypatch.setattr("os.posix_fadvise", lambda *_: None)
    with pytest.raises(SystemExit, match="another program"):
        drop_pages(path)


def test_a_side_runs_as_it_was_asked(tmp_path, monkeypatch):
    """The process gets the work, the threads, the instruction set and further arguments, and its answer comes back."""
    given = []

    def run(command, **_):
        given.extend(command)
        return subprocess.CompletedProcess(command, 0, json.dumps({"prefill_s": 2.5}))

    monkeypatch.setattr("subprocess.run", run)
    field = Field(write_model(tmp_path / "tiny.gguf", "tiny"), Work(64, 4), 2)
    assert field.thermocline(None, "--seed", "1", warm=True) == {"prefill_s": 2.5}
    pairs = dict(zip(given[4::2], given[5::2], strict=True))
    asked = {
        "--prompt": "64",
        "--decode": "4",
        "--threads": "2",
        "--cpu-isa": "auto",
        "--seed": "1",
    }
    assert pairs == asked
