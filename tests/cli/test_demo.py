"""`thermocline demo`: the page that a newcomer sees first."""

from __future__ import annotations

from pathlib import Path

import pytest

from thermocline.demo import DEMO_QUESTIONS
from thermocline.traces.chrome_reader import read_chrome
from thermocline.traces.lanes import Lane


@pytest.mark.slow
def test_the_demo_shows_placement_answers_and_overlap(invoke, tmp_path, monkeypatch):
    """One command shows where experts are, answers, speeds, busy lanes, and where the timeline is."""
    monkeypatch.chdir(tmp_path)
    result = invoke("demo")
    assert result.exit_code == 0, result.stderr
    page = result.output
    for part in (
        "hot experts",
        "cold experts",
        DEMO_QUESTIONS[1],
        "tokens/s",
        "cpu",
        "perfetto",
    ):
        assert part in page, part
    trace = Path("thermocline-demo-trace.json.gz")
    lanes = {event.lane for event in read_chrome(trace).events if hasattr(event, "lane")}
    assert Lane.CPU in lanes


@pytest.mark.slow
def test_the_demo_writes_the_timeline_where_it_is_told(invoke, tmp_path, monkeypatch):
    """--trace names the file, and nothing appears in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    result = invoke("demo", "--trace", "out/t.json")
    assert result.exit_code == 0, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert read_chrome(Path("out/t.json")).events


@pytest.mark.slow
def test_without_a_model_the_demo_model_answers(invoke):
    """run and info work without MODEL."""
    assert invoke("run", "--chat", DEMO_QUESTIONS[1], "-n", "3").stdout.strip()
    assert "runs here" in invoke("info").stdout


def test_the_demo_refuses_a_folder_that_is_not_there(invoke):
    """An explicit --trace is not moved elsewhere."""
    result = invoke("demo", "--trace", "/no/such/folder/t.json")
    assert result.exit_code == 1
    assert "/no/such/folder" in result.stderr
