"""Markdown in the page: the structure that markdown-it finds, and nothing that runs, loads or leads astray."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from importlib.resources import files

import pytest
from markdown_it import MarkdownIt

from tests.support.chromium import find_chromium, open_page

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt install chromium"),
]

DOCUMENTS = (
    "# One\n\ntext **bold *both*** and *it*, `code *x*` \\*no\\* snake_case_name 2 * 3 * 4\n\n---\n\nlast",
    "- a\n- b\n  - c **d**\n  - e\n- f\n\n1. one\n2. two\n   more of two\n\n   ```js\n   let x = 1;\n   ```\n3. three",
    "5. five\n6. six\n\ntext\n* star\n+ plus",
    "> quote **q**\n> more\n>\n> - item\n\nafter",
    "| a | b |\n|---|:-:|\n| **x** | y \\| z |\n| only one |\n\nend | of it",
    "[link](https://example.org/a_b_c?x=1&y=2) and [no](javascript:alert(1)) [mail](mailto:a@b.c) <b>html</b>",
    "**open and `never closed\n\n***both*** __under__ _it_ un_der_score ~~gone~~ ** not **",
    "line one\nline two  \nline three\n\n    indented code\n    more\n\n###### six\n####### seven",
    "* * *\n- - -\n1) paren\n2) other\n\n10. ten",
    "```python\ndef f(**k):\n    return '<b>'\n```\nafter\n\n~~~\n```\n~~~\n\n```\nnever closed *x*",
)
EVIL = (
    "<script>window.hit = 1</script><img src=x onerror='window.hit=1'><svg onload=window.hit=1>",
    "[a](javascript:window.hit=1) [b](JaVaScRiPt:window.hit=1) [c](data:text/html,<script>1</script>) [d](vbscript:x)",
    "[e](//example.org) [f](/trace/start) [g](java\tscript:window.hit=1) ![h](https://example.org/pixel.png)",
    '[i](https://example.org/" onmouseover="window.hit=1) `</code><script>window.hit=1</script>`',
    '```"><script>window.hit=1</script>\n</pre><script>window.hit=1</script>\n```',
    "| <img src=x onerror=window.hit=1> | b |\n|---|---|\n| </td><script>window.hit=1</script> | [x](javascript:window.hit=1) |",
    "# <iframe src=javascript:window.hit=1>\n> <object data=x>\n1. <style>*{display:none}</style>",
    "&lt;script&gt; &#x6a;avascript: \u2028 \u202e \x00 \ufeff",
)
# Ours has a frame around code and tables, and other headings, as the page has its own above them.
SAME = {"h4": "h1", "h5": "h2", "h6": "h3", "s": "del"}
LEFT_OUT = {"div", "span", "button", "thead", "tbody", "p", "br", "a"}


class Structure(HTMLParser):
    """The tags and words of a page, without what has no meaning."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag == "a":
            self.links.append(dict(attrs)["href"])
        if tag not in LEFT_OUT:
            start = dict(attrs).get("start")
            self.found.append(SAME.get(tag, tag) + (f" from {start}" if start else ""))

    def handle_endtag(self, tag):
        if tag not in LEFT_OUT and tag != "hr":
            self.found.append("/" + SAME.get(tag, tag))

    def handle_data(self, data):
        self.found.extend(data.split())


def structure(html: str) -> tuple[list[str], list[str]]:
    """Return tags and words, and where links lead."""
    parser = Structure()
    parser.feed(html)
    words = " ".join(parser.found)
    for level in range(1, 7):  # headings of ours end at the sixth level
        words = words.replace(f"h{level}", "h")
    return words.split(), parser.links


@pytest.fixture
def page_file(tmp_path):
    """A page with the scripts alone."""
    scripts = (
        (files("thermocline.traces") / "page" / "model.js").read_text(),
        (files("thermocline.server.dashboard") / "page" / "markdown.js").read_text(),
    )
    path = tmp_path / "markdown.html"
    code = "\n".join(scripts).replace('"use strict";', "")
    path.write_text(
        f"<!doctype html><meta charset=utf-8><div id=place></div><script>{code}</script>"
    )
    return path


SHOW = """(() => {
  const place = document.querySelector("#place");
  place.replaceChildren(...markdownNodes(%s));
  for (const head of place.querySelectorAll(".code-head")) head.remove();
  return place.innerHTML;
})()"""


async def test_the_structure_is_that_of_markdown_it(page_file, tmp_path):
    """Each document has the same elements around the same words, and the same links."""
    judge = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    async with open_page(CHROMIUM, tmp_path) as page:
        await page.open(page_file.as_uri())
        await page.until("typeof markdownNodes === 'function'")
        for document in DOCUMENTS:
            ours = structure(await page.evaluate(SHOW % json.dumps(document)))
            assert ours == structure(judge.render(document)), document
        assert page.errors == []


async def test_what_grows_is_in_the_end_what_is_whole(page_file, tmp_path):
    """An answer that comes in pieces ends as the same elements; meanwhile it shows every word."""
    text = "\n\n".join(DOCUMENTS)
    script = """(async () => {
      const place = document.createElement("div");
      const view = new MarkdownView(place);
      const text = %s;
      for (let at = 0; at < text.length; at += 7) {
        view.push(text.slice(at, at + 7));
        if (at %% 70 === 0) await new Promise((done) => requestAnimationFrame(done));
      }
      view.draw();
      const seen = place.textContent.includes("never closed");
      view.finish();
      const whole = document.createElement("div");
      whole.append(...markdownNodes(text));
      return [seen, place.innerHTML === whole.innerHTML, place.querySelectorAll("table").length];
    })()"""
    async with open_page(CHROMIUM, tmp_path) as page:
        await page.open(page_file.as_uri())
        await page.until("typeof MarkdownView === 'function'")
        assert await page.evaluate(script % json.dumps(text)) == [True, True, 1]
        assert page.errors == []


async def test_no_text_of_a_model_runs_or_loads_anything(page_file, tmp_path):
    """No element but those of Markdown, no attribute but ours, links to the web and to mail alone, no request."""
    script = """(() => {
      const place = document.querySelector("#place");
      place.replaceChildren(...markdownNodes(%s));
      for (const node of place.querySelectorAll("*")) node.dispatchEvent(new Event("mouseover", { bubbles: true }));
      const all = [...place.querySelectorAll("*")];
      return {
        tags: [...new Set(all.map((node) => node.tagName.toLowerCase()))],
        names: [...new Set(all.flatMap((node) => node.getAttributeNames()))],
        links: all.filter((node) => node.href).map((node) => node.href),
        text: place.textContent,
      };
    })()"""
    tags = {"p", "a", "code", "pre", "div", "span", "button", "table", "thead", "tbody", "tr", "th"}
    tags |= {"td", "h4", "blockquote", "ol", "ul", "li", "em", "strong", "del", "hr"}
    async with open_page(CHROMIUM, tmp_path) as page:
        await page.open(page_file.as_uri())
        await page.until("typeof markdownNodes === 'function'")
        before = len(page.requests)
        for text in (
            *EVIL,
            "\n\n".join(EVIL),
            "> " * 500 + "deep",
            "- " * 500 + "deep",
            "[" * 5000,
        ):
            found = await page.evaluate(script % json.dumps(text))
            assert set(found["tags"]) <= tags, text
            assert set(found["names"]) <= {"class", "href", "target", "rel", "type", "start"}, text
            assert all(link.startswith(("https://", "mailto:")) for link in found["links"]), text
        # As much as an answer may have, of what looks most like the beginning of something.
        for part in ("*a ", "**a", "`a", "[a](", "_a ", "| a ", "![", "~~a", "\\*", "http://"):
            slow = "(() => { const at = performance.now(); markdownNodes(%s.repeat(20000)); return performance.now() - at; })()"
            assert await page.evaluate(slow % json.dumps(part)) < 5000, part
        assert await page.evaluate("window.hit === undefined")
        assert len(page.requests) == before
        assert page.errors == []
