"""The page in a real browser: what it loads, what it says, and that a keyboard is enough."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from tests.server.live import live
from tests.support.chromium import find_chromium, open_page

CHROMIUM = find_chromium()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt install chromium"),
]
SHIFT = 8
MARKUP = "<img src=x onerror=alert(1)> <b>bold</b>"


@asynccontextmanager
async def browsing(path, folder, **settings):
    """A server, and a page of it in a browser."""
    async with live(path, **settings) as server, open_page(CHROMIUM, folder) as page:
        await page.look(1280, 900, dark=False)
        await page.open(server.server.url)
        yield server, page


async def test_a_keyboard_is_enough_for_everything(toy, tmp_path):
    """GenerationJob, watch, stop, look at experts and at the timeline; nothing from elsewhere, nothing wrong."""
    async with browsing(toy, tmp_path) as (server, page):
        await page.until("document.querySelector('#state').dataset.state === 'ready'")
        await page.until("!document.querySelector('#send').disabled")
        assert await page.evaluate("document.activeElement.id") == "prompt"
        await page.type(MARKUP)
        await page.key("Enter", modifiers=SHIFT)
        await page.type("second line")
        await page.key("Enter")
        shown = "document.querySelector('.message.assistant .text').textContent"
        await page.until(f"{shown}.length > 20")
        length = await page.evaluate(f"{shown}.length")
        await page.until(f"{shown}.length > {length}")
        assert await page.evaluate("document.querySelector('#log').ariaBusy") == "true"
        await page.until("Number(document.querySelector('#speed').textContent) > 0")
        await page.until("document.querySelectorAll('#lanes [role=meter]').length >= 2")
        await page.until("document.querySelectorAll('#requests li').length === 1")
        await page.key("Escape")
        await page.until(
            "document.querySelector('.message.assistant .about').textContent === 'stopped'"
        )
        assert await page.evaluate("document.querySelector('#announce').textContent") == "Stopped."
        await server.settle()
        asked = await page.evaluate("document.querySelector('.message.user .text').textContent")
        assert asked == f"{MARKUP}\nsecond line"
        assert await page.evaluate("document.querySelectorAll('#log img, #log b').length") == 0
        await page.until("document.querySelector('#trace-place canvas') !== null")
        await page.until("!document.querySelector('#trace-fit').disabled")
        await page.until("document.querySelector('#heat-note').textContent.includes('8 experts')")
        await page.evaluate("document.querySelector('#heat').focus()")
        await page.key("ArrowDown")
        await page.key("ArrowRight")
        cell = await page.evaluate("document.querySelector('#heat-cell').textContent")
        assert cell.startswith("layer 1, expert 1: ")
        await page.key("Tab")
        assert await page.evaluate("document.activeElement.id") == "trace-fit"
        await page.key("Enter")
        assert page.errors == []
        assert {url.startswith(server.server.url) for url in page.requests} == {True}


async def test_the_page_asks_for_the_key_and_forgets_it_with_the_tab(toy, tmp_path):
    """A wrong key is asked for again; the right one is kept for the session only."""
    async with browsing(toy, tmp_path, api_keys=("right",)) as (_, page):
        for key, says in (("wrong", "refused"), ("right", None)):
            await page.until("document.querySelector('#key-dialog').open")
            await page.until("document.activeElement.id === 'key'")
            await page.type(key)
            await page.key("Enter")
            if says is not None:
                await page.until(
                    f"document.querySelector('#key-error').textContent.includes('{says}')"
                )
        await page.until("document.querySelector('#state').dataset.state === 'ready'")
        assert not await page.evaluate("document.querySelector('#key-dialog').open")
        kept = await page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]")
        assert kept == [0, 1, ""]
        assert all("401" in error for error in page.errors)


async def test_a_narrow_window_needs_no_sideways_scrolling(toy, tmp_path):
    """At 360 and at 1600 pixels, in the dark and in the light, the page is as wide as the window."""
    async with browsing(toy, tmp_path) as (_, page):
        await page.until("document.querySelectorAll('#facts dd').length > 0")
        for width in (360, 1600):
            for dark in (True, False):
                await page.look(width, 800, dark=dark)
                assert await page.evaluate("document.documentElement.scrollWidth") == width
                colour = await page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (sum(map(int, colour[4:-1].split(","))) < 384) == dark


# A page that has not begun yet has a button that is not disabled.
READY = (
    "document.querySelector('#state').dataset.state === 'ready' "
    "&& !document.querySelector('#send').disabled"
)
ANSWER = "document.querySelector('.message.assistant:last-child .text')"


async def test_a_conversation_survives_a_reload(toy, tmp_path):
    """Also one that was cut by it; another one can be begun, and the first opened again or deleted."""
    async with browsing(toy, tmp_path) as (server, page):
        await page.until(READY)
        await page.evaluate("document.querySelector('#max-tokens').value = 12")
        await page.type("first question")
        await page.key("Enter")
        await page.until("document.querySelector('#last').textContent.includes('tokens at')")
        said = await page.evaluate(f"{ANSWER}.textContent")
        last = await page.evaluate("document.querySelector('#last').textContent")
        await page.evaluate("document.querySelector('#max-tokens').value = ''")
        await page.type("second question")
        await page.key("Enter")
        await page.until("document.querySelectorAll('.message.assistant').length === 2")
        await page.until(f"{ANSWER}.textContent.length > 20")
        await page.reload()
        await page.until(READY)
        await server.settle()
        asked = (
            "[...document.querySelectorAll('.message.user .text')].map((node) => node.textContent)"
        )
        assert await page.evaluate(asked) == ["first question", "second question"]
        first = "document.querySelector('.message.assistant .text').textContent"
        assert await page.evaluate(first) == said
        assert len(await page.evaluate(f"{ANSWER}.textContent")) > 20
        assert await page.evaluate("document.querySelector('#last').textContent") == last
        await page.evaluate("document.querySelector('#clear').click()")
        assert await page.evaluate(asked) == []
        await page.evaluate(
            "(() => { const list = document.querySelector('#chats'); list.selectedIndex = 1; "
            "list.dispatchEvent(new Event('change')); })()"
        )
        assert await page.evaluate(asked) == ["first question", "second question"]
        await page.evaluate("document.querySelector('#remove').click()")
        assert await page.evaluate(asked) == []
        assert await page.evaluate("localStorage.length") == 0
        assert page.errors == []


async def test_chats_are_not_kept_if_they_are_not_to_be(toy, tmp_path):
    """The box takes away what is kept, and keeps nothing until it is checked again."""
    async with browsing(toy, tmp_path) as (_, page):
        await page.until(READY)
        await page.evaluate("document.querySelector('#max-tokens').value = 5")
        await page.type("first question")
        await page.key("Enter")
        kept = "Object.keys(localStorage).filter((name) => name.startsWith('thermocline-chat:')).length"
        await page.until(f"{kept} === 1")
        await page.evaluate("document.querySelector('#keep').click()")
        assert await page.evaluate(kept) == 0
        await page.evaluate("document.querySelector('#prompt').focus()")
        await page.type("second question")
        await page.key("Enter")
        await page.until("document.querySelectorAll('.message.assistant .copy').length === 2")
        await page.reload()
        await page.until(READY)
        assert await page.evaluate(kept) == 0
        assert await page.evaluate("document.querySelectorAll('.message').length") == 0
        assert await page.evaluate("document.querySelector('#keep').checked") is False


async def test_an_answer_can_be_copied(toy, tmp_path):
    """The button gives the text as the model wrote it."""
    async with browsing(toy, tmp_path) as (server, page):
        await page.until(READY)
        permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
        await page.call("Browser.grantPermissions", permissions=permissions)
        await page.evaluate("document.querySelector('#max-tokens').value = 12")
        await page.type("question")
        await page.key("Enter")
        await page.until("document.querySelector('.message.assistant .copy') !== null")
        await page.call("Page.bringToFront")
        await page.evaluate("document.querySelector('.message.assistant .copy').click()")
        await page.until("document.querySelector('.copy').textContent === 'Copied'")
        chat = await server.chat(
            messages=[{"role": "user", "content": "question"}], max_completion_tokens=12
        )
        copied = await page.evaluate("navigator.clipboard.readText()")
        assert copied == chat["choices"][0]["message"]["content"]


async def test_a_failed_request_draws_no_timeline(small_toy, tmp_path):
    """It says what went wrong; the timeline of the last answer stays."""
    async with browsing(small_toy, tmp_path) as (_, page):
        await page.until(READY)
        note = "document.querySelector('#trace-note').textContent"
        too_long = "(() => { document.querySelector('#prompt').value = 'x'.repeat(400); document.querySelector('#send').click(); })()"
        await page.evaluate(too_long)
        await page.until(f"{note} === 'The request failed and left no timeline.'")
        assert await page.evaluate("document.querySelector('#trace-place canvas')") is None
        wrong = "document.querySelector('.about.wrong').textContent"
        assert "context" in await page.evaluate(wrong)
        await page.evaluate(
            "document.querySelector('#max-tokens').value = 5; document.querySelector('#prompt').value = ''"
        )
        await page.evaluate("document.querySelector('#prompt').focus()")
        await page.type("question")
        await page.key("Enter")
        await page.until("document.querySelector('#trace-place canvas') !== null")
        verdict = "document.querySelector('#trace-verdict').textContent"
        assert "bounded this run" in await page.evaluate(verdict)
        assert "tokens/s" in await page.evaluate(note)
        await page.evaluate("window.canvas = document.querySelector('#trace-place canvas')")
        await page.evaluate(too_long)
        await page.until(f"{note}.endsWith('The last request failed and left no timeline.')")
        assert await page.evaluate(
            "window.canvas === document.querySelector('#trace-place canvas') && window.canvas.height > 100"
        )


async def test_the_interface_is_described(toy, tmp_path):
    """Every operation is there with its fields, types open by their links, and nothing is from elsewhere."""
    async with live(toy) as server, open_page(CHROMIUM, tmp_path) as page:
        async with server.client.get("/openapi.json") as response:
            described = await response.json()
        for width in (400, 1280):
            await page.look(width, 800, dark=width == 400)
            await page.open(server.server.url + "/docs")
            await page.until("document.querySelectorAll('.operation').length > 0")
            shown = await page.evaluate(
                "[...document.querySelectorAll('.operation')].map((node) => node.id)"
            )
            known = [
                operation["operationId"]
                for path, operations in described["paths"].items()
                if not path.startswith("/page/")
                for operation in operations.values()
            ]
            assert sorted(shown) == sorted(known)
            await page.evaluate(
                "for (const node of document.querySelectorAll('details')) node.open = true"
            )
            assert await page.evaluate("document.documentElement.scrollWidth") == width
        assert "undefined" not in await page.evaluate("document.body.textContent")
        chat = "document.querySelector('#post_v1_chat_completions').textContent"
        for word in ("messages", "required", "ChatBody", '--json \'{"messages"'):
            assert word in await page.evaluate(chat)
        await page.evaluate("document.querySelector('#find').focus()")
        await page.type("encoding_format")
        await page.until("document.querySelector('#docs-note').textContent.startsWith('1 of ')")
        assert page.errors == []
        assert {url.startswith(server.server.url) for url in page.requests} == {True}


async def test_the_description_asks_for_the_key(toy, tmp_path):
    """The page is open, what it shows is not."""
    async with live(toy, api_keys=("right",)) as server, open_page(CHROMIUM, tmp_path) as page:
        async with server.client.get("/openapi.json") as response:
            assert response.status == 401
        await page.open(server.server.url + "/docs")
        await page.until("document.querySelector('#key-dialog').open")
        await page.until("document.activeElement.id === 'key'")
        await page.type("right")
        await page.key("Enter")
        await page.until("document.querySelectorAll('.operation').length > 0")
