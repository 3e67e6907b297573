"""Claims about the page: it holds the whole trace, loads nothing, and runs no text of a trace."""

from __future__ import annotations

import base64
import gzip
import json
import re

import pytest

from tests.support.synthetic_trace import SyntheticRun
from thermocline.traces.events import (
    AsyncSpanEvent,
    CounterEvent,
    InstantEvent,
    SpanEvent,
    Trace,
)
from thermocline.traces.lanes import Lane, Name
from thermocline.traces.timeline_page import timeline_page


def _data(page):
    packed = re.search(r'<script id="data"[^>]*>([^<]*)</script>', page)
    assert packed is not None
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


def _spans(data):
    """Return the spans as the page's script reads them."""
    found = []
    for track in data["tracks"]:
        at = 0
        columns = zip(*(track[c] for c in ("start", "duration", "name", "chunk", "layer", "more")), strict=True)  # fmt: skip
        for delta, duration, name, chunk, layer, more in columns:
            at += delta
            args = dict(data["extras"][more])
            args |= {"chunk": chunk} if chunk >= 0 else {}
            args |= {"layer": layer} if layer >= 0 else {}
            found.append((track["label"], data["names"][name], at, at + duration, args))
    return found


def test_every_span_is_on_the_page():
    """The columns give back each span with its track, times and arguments."""
    trace = SyntheticRun(3, num_layers=2, prompt_chunks=1, decode_steps=1).trace()
    origin = min(e.start_ns for e in trace.events if isinstance(e, SpanEvent | AsyncSpanEvent))
    spans = [event for event in trace.events if isinstance(event, SpanEvent)]
    expected = [
        (
            f"cpu {span.index}" if span.lane is Lane.CPU else str(span.lane),
            str(span.name),
            span.start_ns - origin,
            span.end_ns - origin,
            dict(span.args or {}),
        )
        for span in spans
    ]
    by_text = repr
    assert sorted(_spans(_data(timeline_page(trace))), key=by_text) == sorted(expected, key=by_text)


def test_requests_counters_plans_and_experts_are_on_the_page():
    """Beside spans: asynchronous spans, counters without repeated values, instants, expert counts."""
    events = (
        AsyncSpanEvent(Name.REQUEST, 2**70, 5, 90, {"tokens": 3}),
        CounterEvent(Name.KV_FREE, 4, 10),
        CounterEvent(Name.KV_FREE, 4, 20),
        CounterEvent(Name.KV_FREE, 1, 30),
        InstantEvent(Lane.SCHEDULER, Name.PLAN, 15, {"chunk": 0, "kind": "prompt"}),
    )
    use = SyntheticRun(1, num_layers=2).trace().expert_use
    data = _data(timeline_page(Trace(events, {"model": "m"}, use)))
    assert data["requests"] == [["request", str(2**70), 0, 85, {"tokens": 3}]]
    assert data["counters"] == [
        {"name": "kv blocks free", "times": [5, 25], "values": [4, 1], "max": 4}
    ]
    requests, scheduler = data["tracks"]
    assert (requests["label"], requests["instants"]) == ("requests", [])
    ((at, name, more),) = scheduler["instants"]
    assert (at, data["names"][name], data["extras"][more]) == (
        10,
        "plan",
        {"chunk": 0, "kind": "prompt"},
    )
    assert use is not None
    assert data["experts"]["counts"] == [list(row) for row in use.counts]
    assert data["report"]["metadata"] == {"model": "m"}
    assert data["length"] == 85


def test_an_empty_trace_has_a_page():
    """No events: a page with no lanes, not an error."""
    data = _data(timeline_page(Trace((), {})))
    assert (data["tracks"], data["length"], data["experts"]) == ([], 0, None)


def test_the_page_stands_alone():
    """No address, no import, no source file: and a policy that forbids what might slip in."""
    page = timeline_page(SyntheticRun(1, num_layers=1).trace())
    assert not re.search(r"https?:|\bsrc=|<link|@import|url\(|\bimport\b|\bfetch\(|XMLHttp", page)
    assert "default-src 'none'" in page
    assert not re.search(r"/\*(STYLE|SCRIPT|DATA)\*/", page)
    assert "innerHTML" not in page


@pytest.mark.parametrize("text", ["</script><script>alert(1)</script>", "/*DATA*/", "\u2028<!--"])
def test_text_of_a_trace_can_not_become_part_of_the_page(text):
    """Names and arguments travel packed, so that none can close a tag or stand for a mark."""
    events = (SpanEvent(Lane.CPU, Name.COLD, 0, 5, {text: text}), CounterEvent(text, 1, 0))
    page = timeline_page(Trace(events, {"model": text}))
    assert text not in page
    assert _data(page)["extras"][1] == {text: text}
    assert page.count("</script>") == 2
