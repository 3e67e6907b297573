"""The timelines of several ranks as one."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from thermocline.cli import cli
from thermocline.cli.ranks import rank_file
from thermocline.traces.chrome import write_chrome
from thermocline.traces.chrome_reader import read_chrome
from thermocline.traces.events import (
    AsyncSpanEvent,
    CounterEvent,
    FlowEvent,
    InstantEvent,
    SpanEvent,
    Trace,
)
from thermocline.traces.lanes import Lane, Name
from thermocline.traces.ranks import merge_ranks


def trace_of(rank: int, ahead_ns: int) -> Trace:
    """Return what a rank records of the same moments by its own clock."""
    events = (
        SpanEvent(Lane.CPU, Name.COLD, ahead_ns + 1000, ahead_ns + 3000, {"chunk": 1}, 1),
        SpanEvent(Lane.EXCHANGE, Name.EXCHANGE, ahead_ns + 2000, ahead_ns + 5000),
        FlowEvent(7, Lane.CPU, ahead_ns + 1000, "step", 1),
        CounterEvent("channel attend", 2, ahead_ns + 1500),
        AsyncSpanEvent(Name.HEDGE, 7, ahead_ns + 1000, ahead_ns + 2000),
        InstantEvent(Lane.PAGECACHE, Name.HIT, ahead_ns + 1000),
    )
    metadata = {"model": "toy", "rank": rank, "clock_offset_ns": ahead_ns}
    return Trace(events, metadata)


def test_one_timeline_has_every_rank_on_tracks_of_its_own_at_rank_0s_times():
    """Clocks that differ by an hour come out as one; arrows and counters of ranks stay apart."""
    one = merge_ranks([trace_of(1, 3600 * 10**9), trace_of(0, 0)])
    spans = [event for event in one.events if isinstance(event, SpanEvent)]
    assert [(each.lane, each.index, each.start_ns, each.end_ns) for each in spans] == [
        (Lane.CPU, 1, 1000, 3000),
        (Lane.EXCHANGE, 0, 2000, 5000),
        (Lane.CPU, 101, 1000, 3000),
        (Lane.EXCHANGE, 100, 2000, 5000),
    ]
    assert len({event.flow_id for event in one.events if isinstance(event, FlowEvent)}) == 2
    assert len({event.span_id for event in one.events if isinstance(event, AsyncSpanEvent)}) == 2
    counters = {event.track for event in one.events if isinstance(event, CounterEvent)}
    assert counters == {"channel attend", "rank 1 channel attend"}
    assert one.metadata == {"model": "toy", "rank": 0, "clock_offset_ns": 0, "ranks": 2}


def test_the_command_writes_one_file_and_refuses_what_are_no_ranks(tmp_path):
    """The file can be read again; one rank twice, or without rank 0, is an error that says what to name."""
    files = []
    for rank in (0, 1):
        trace = trace_of(rank, rank * 10**6)
        files.append(tmp_path / f"{rank}.json.gz")
        write_chrome(files[-1], trace.events, metadata=trace.metadata)
    target = tmp_path / "all.json.gz"

    def merge(*names: Path):
        return CliRunner().invoke(cli, ["trace", "merge", *map(str, names), "-o", str(target)])

    assert merge(*files).exit_code == 0
    found = read_chrome(target)
    assert found.metadata["ranks"] == 2
    assert sum(isinstance(event, SpanEvent) for event in found.events) == 4
    for wrong in ((files[0], files[0]), (files[1],)):
        result = merge(*wrong)
        assert result.exit_code == 1
        assert "name the files of one run under torchrun" in result.output


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("run.json.gz", "run.rank2.json.gz"),
        ("a/t.json", "a/t.rank2.json"),
        ("plain", "plain.rank2"),
    ],
)
def test_a_ranks_file_lies_beside_that_of_rank_0(name, expected):
    """The rank goes before the first dot, so that the form of the file stays."""
    assert rank_file(Path(name), 2) == Path(expected)
