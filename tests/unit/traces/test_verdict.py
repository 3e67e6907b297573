"""What bounded a run, in a sentence; and what its requests felt."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files

import pytest

from tests.support.synthetic_trace import SyntheticRun
from thermocline.traces.events import AsyncSpanEvent, InstantEvent, SpanEvent, Trace
from thermocline.traces.lanes import Lane, Name
from thermocline.traces.report import make_report, report_as_dict

MS = 1_000_000


def request(number: int, start: int, end: int, tokens: int, first: int | None = None):
    """Return the events of a request; times in milliseconds."""
    args = {"request": number, "prompt_tokens": 5, "output_tokens": tokens}
    yield AsyncSpanEvent(Name.REQUEST, number, start * MS, end * MS, args)
    if first is not None:
        yield InstantEvent(Lane.REQUESTS, Name.FIRST_TOKEN, first * MS, {"request": number})


def span(lane: Lane, name: Name, start: int, end: int, index: int = 0, **args: int) -> SpanEvent:
    """Return a span; times in milliseconds."""
    return SpanEvent(lane, name, start * MS, end * MS, args or None, index)


def verdict(*events, **metadata) -> str:
    """Return the sentence about these events."""
    return make_report(Trace(tuple(events), metadata)).verdict


def decoding(end: int) -> list:
    """Return a decode step on the CPU that lasts from 0 to `end`."""
    plan = InstantEvent(Lane.SCHEDULER, Name.PLAN, 0, {"chunk": 1, "kind": "decode", "tokens": 1})
    return [plan, span(Lane.CPU, Name.COLD, 0, end, chunk=1, layer=0)]


@pytest.mark.parametrize(
    ("lane", "says"),
    [
        (Lane.CPU, "Computing on the CPU bounded this run: its busiest thread worked 90%"),
        (Lane.GPU_COMPUTE, "Computing on the GPU bounded this run: it worked 90%"),
        (Lane.GPU_H2D, "Copying weights to the GPU bounded"),
        (Lane.HOT, "Computing the hot experts bounded"),
        (Lane.PAGECACHE, "Reading the model from its file bounded"),
        (Lane.REMOTE, "Waiting for expert workers bounded"),
    ],
)
def test_a_resource_that_works_most_of_the_time_bounds_the_run(lane, says):
    """It is named with its share of the time in which a request was open, whatever was idle before and after."""
    events = (
        *request(1, 100, 200, 3),
        span(lane, Name.COLD, 105, 195),
        span(Lane.LOOP, Name.STEP, 0, 9),
    )
    assert verdict(*events).startswith(says)


def test_the_stage_that_took_most_is_named():
    """Of the busiest thread's spans."""
    events = (
        *request(1, 0, 100, 3),
        span(Lane.CPU, Name.ATTEND, 0, 30, index=1),
        span(Lane.CPU, Name.COLD, 30, 90, index=1),
        span(Lane.CPU, Name.HEAD, 0, 10),
    )
    assert "worked 90% of the time, most of it in cold (67%)" in verdict(*events)


def test_decoding_near_the_speed_of_memory_is_bounded_by_memory():
    """Only where decoding is most of the run, and reads most of what the machine reads."""
    window = (*request(1, 0, 100, 3), *decoding(90))
    near = verdict(*window, token_bytes=9e8, read_bytes_per_s=1.25e10)
    assert near.startswith("Reading weights from memory bounded this run")
    assert "10.0 GB/s, 80% of what this machine" in near
    assert verdict(*window, token_bytes=9e7, read_bytes_per_s=1.25e10).startswith(
        "Computing on the CPU"
    )
    prompt = (*window, *request(2, 100, 300, 1), span(Lane.CPU, Name.ATTEND, 100, 290))
    assert verdict(*prompt, token_bytes=9e8, read_bytes_per_s=1.25e10).startswith(
        "Computing on the CPU"
    )


def test_a_run_without_a_busy_resource_is_bounded_by_its_order():
    """Resources that take turns are named so; a run that mostly idles is told apart from that."""
    turns = [
        span(lane, Name.COLD, at, at + 10)
        for at, lane in zip(range(0, 100, 10), itertools.cycle((Lane.CPU, Lane.GPU_COMPUTE)))
    ]
    said = verdict(*request(1, 0, 100, 3), *turns)
    assert said.startswith("The order of the work bounded this run")
    assert "no resource worked more than 50% of the time" in said
    said = verdict(*request(1, 0, 300, 3), *turns, span(Lane.LOOP, Name.STEP, 100, 250))
    assert said.startswith(
        "What happens between the steps bounded this run: no resource worked in 67%"
    )
    assert "own loop was busy for 50%" in said


def test_nothing_has_a_sentence_too():
    """An empty recording, and one of requests without work."""
    assert verdict() == verdict(*request(1, 0, 5, 0)) == "Nothing was computed in this recording."


def test_requests_times_are_medians():
    """Of those whose first token is in the trace; speed counts what came after the first token."""
    events = (
        *request(1, 0, 1100, 11, first=100),
        *request(2, 0, 2200, 11, first=200),
        *request(3, 0, 900, 1, first=900),
        *request(4, 0, 100, 0),
    )
    report = make_report(Trace(tuple(events), {}))
    assert (report.requests.num_requests, report.requests.ttft_ns) == (4, 200 * MS)
    assert report.requests.tokens_per_s == pytest.approx(7.5)
    body = report_as_dict(Trace(tuple(events), {}), report)
    assert body["answers"] == {
        "requests": 4,
        "ttft_ns": 200 * MS,
        "tokens_per_s": pytest.approx(7.5),
    }
    alone = make_report(Trace(tuple(request(4, 0, 100, 0)), {})).requests
    assert (alone.ttft_ns, alone.tokens_per_s) == (None, None)


def test_every_trace_has_a_verdict():
    """Random runs: one sentence each, whose shares are shares."""
    for seed in range(20):
        trace = SyntheticRun(seed, num_threads=1 + seed % 3).trace()
        said = make_report(trace).verdict
        assert said.endswith(".")
        assert all(0 <= int(share) <= 100 for share in re.findall(r"(\d+)%", said)), said


def _lab(colour: str) -> tuple[float, float, float]:
    """Return CIE L*a*b* of "#rrggbb" (D65)."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def test_stages_have_colours_that_can_be_told_apart():
    """Every name of a span has one; only moving bytes to a device and into memory share theirs."""
    script = (files("thermocline.traces") / "page" / "model.js").read_text()
    palette = dict(re.findall(r'(\w+): "(#[0-9a-f]{6})"', script.split("CHUNK_COLORS")[0]))
    others = {"plan", "chunk", "hit", "late", "miss", "wasted", "evict", "request", "first_token"}
    spans = {str(name) for name in Name if " " not in name} - others
    assert set(palette) == spans
    palette.pop("load")
    palette["other"] = re.search(r'OTHER_COLOR = "(#\w+)"', script)[1]
    for first, second in itertools.combinations(palette, 2):
        a, b = _lab(palette[first]), _lab(palette[second])
        distance = sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5
        assert distance > 18, (first, second, distance)
