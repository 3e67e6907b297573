"""The timeline page in a real browser: what it says of a request."""

from __future__ import annotations

import pytest

from tests.support.chromium import find_chromium, open_page
from tests.support.synthetic_trace import SyntheticRun
from thermocline.traces.events import AsyncSpanEvent, Trace
from thermocline.traces.lanes import Name
from thermocline.traces.report import make_report
from thermocline.traces.timeline_page import timeline_page

CHROMIUM = find_chromium()
RECORD = """
window.said = [];
CanvasRenderingContext2D.prototype.fillText = (text) => window.said.push(text);
window.dispatchEvent(new Event("resize"));
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt install chromium")
async def test_a_request_is_named_once_with_its_counts(tmp_path):
    """Its id is in its title alone, and one token is no tokens."""
    args = {"request": 7, "prompt_tokens": 1000, "output_tokens": 1}
    events = (AsyncSpanEvent(Name.REQUEST, 7, 0, 90_000_000, args),)
    (tmp_path / "run.html").write_text(timeline_page(Trace(events, {"model": "m"})))
    async with open_page(CHROMIUM, tmp_path) as page:
        await page.look(1280, 900, dark=False)
        await page.open((tmp_path / "run.html").as_uri())
        await page.until("document.querySelector('#title').textContent === 'm'")
        await page.evaluate(RECORD)
        await page.until("window.said.includes('request 7, 1000 prompt tokens, 1 output token')")
        assert page.errors == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt install chromium")
async def test_the_page_opens_with_a_verdict_and_fits_a_narrow_window(tmp_path):
    """Sentence and figures come first, counters are folded, and no table is wider than its place at 400 pixels."""
    trace = SyntheticRun(1, num_threads=3, num_layers=8, num_requests=3, prompt_chunks=4).trace()
    (tmp_path / "run.html").write_text(timeline_page(trace))
    async with open_page(CHROMIUM, tmp_path) as page:
        await page.look(400, 900, dark=True)
        await page.open((tmp_path / "run.html").as_uri())
        await page.until("document.querySelectorAll('main article').length > 5")
        said = await page.evaluate("document.querySelector('#verdict').textContent")
        assert said == make_report(trace).verdict
        assert await page.evaluate("document.documentElement.scrollWidth") == 400
        clipped = (
            "[...document.querySelectorAll('article, #figures, nav, #controls, #legend')]"
            ".filter((node) => node.scrollWidth > node.clientWidth).map((node) => node.textContent)"
        )
        assert await page.evaluate(clipped) == []
        tall = "document.querySelector('#canvas').clientHeight"
        folded = await page.evaluate(tall)
        await page.evaluate("document.querySelector('#counters').click()")
        assert await page.evaluate(tall) > folded
        assert await page.evaluate("document.querySelector('#counters').ariaPressed") == "true"
        await page.evaluate("document.querySelector('#counters').click()")
        assert await page.evaluate(tall) == folded
        assert page.errors == []
