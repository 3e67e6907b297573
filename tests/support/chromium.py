"""A headless Chromium, driven by its DevTools protocol: what a browser test needs, and nothing else."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_START_S = 45.0
_STARTS = 3


def find_chromium() -> str | None:
    """Return the browser's path, None where there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Page:
    """One page. Keeps what was asked of the network, and what went wrong in the page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._socket = socket
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0

    async def listen(self) -> None:
        """Take messages until the browser ends."""
        async for message in self._socket:
            body = json.loads(message.data)
            if "id" in body:
                self._answers.pop(body["id"]).set_result(body)
            else:
                self._note(body["method"], body["params"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of one command."""
        body = await self._ask(method, params)
        assert "error" not in body, body
        return body["result"]

    async def _ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Return what the browser says to one command, an error as well."""
        self._number += 1
        answer = asyncio.get_running_loop().create_future()
        self._answers[self._number] = answer
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        return await asyncio.wait_for(answer, 20)

    async def open(self, url: str) -> None:
        """Open an address, and wait until its page is shown."""
        await self._leave("Page.navigate", url=url)

    async def reload(self) -> None:
        """Load the page again, and wait until it is shown."""
        await self._leave("Page.reload")

    async def _leave(self, method: str, **params: Any) -> None:
        """Wait until another document is in the place of this one, whole and drawn.

        Before that, what is asked is asked of the old one, and the browser may drop keys.
        """
        await self.evaluate("window.isLeft = true")
        await self.call(method, **params)
        is_whole = "!window.isLeft && document.readyState === 'complete'"
        look = f"new Promise((done) => {{ const isWhole = {is_whole}; const frame = requestAnimationFrame; "
        look += "frame(() => frame(() => done(isWhole))); })"
        params = {"expression": look, "awaitPromise": True, "returnByValue": True}
        async with asyncio.timeout(20):
            while True:
                # An error where the document went away meanwhile.
                answer = await self._ask("Runtime.evaluate", params)
                if answer.get("result", {}).get("result", {}).get("value") is True:
                    return

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page; promises are awaited."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str, seconds: float = 10.0) -> None:
        """Wait until an expression is true, looked at once per frame."""
        loop = f"new Promise((done) => {{ const look = () => {{ let is = false; try {{ is = ({expression}); }} catch {{}} "
        loop += "if (is) done(true); else requestAnimationFrame(look); }; look(); })"
        try:
            await asyncio.wait_for(self.evaluate(loop), seconds)
        except TimeoutError as error:
            raise AssertionError(f"never true: {expression}") from error

    async def key(self, key: str, *, text: str = "", modifiers: int = 0) -> None:
        """Press and release one key."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
        common = {"key": key, "modifiers": modifiers, "windowsVirtualKeyCode": codes.get(key, 0)}
        if key == "Enter":
            text = "\r"
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def type(self, text: str) -> None:
        """Put text where the focus is."""
        await self.call("Input.insertText", text=text)

    async def look(self, width: int, height: int, *, dark: bool) -> None:
        """Set the size of the window, and whether the user likes it dark."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        value = "dark" if dark else "light"
        features = [{"name": "prefers-color-scheme", "value": value}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def shoot(self) -> bytes:
        """Return a picture of the window, as PNG."""
        shot = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(params["entry"]))


@asynccontextmanager
async def open_page(chromium: str, folder: Path):
    """Start the browser with a profile in `folder`, and end it."""
    process, origin = await _start(chromium, folder)
    assert process.stderr is not None
    draining = asyncio.create_task(process.stderr.read())
    try:
        async with aiohttp.ClientSession(origin) as client:
            async with client.get("/json") as response:
                targets = await response.json()
            url = next(each for each in targets if each["type"] == "page")["webSocketDebuggerUrl"]
            async with client.ws_connect(url, max_msg_size=0) as socket:
                page = Page(socket)
                listener = asyncio.create_task(page.listen())
                for domain in ("Runtime", "Log", "Page", "Network"):
                    await page.call(f"{domain}.enable")
                yield page
                listener.cancel()
                await asyncio.wait({listener})
    finally:
        await _end(process)
        await draining


async def _start(chromium: str, folder: Path) -> tuple[asyncio.subprocess.Process, str]:
    """Return a browser and where it listens; one that stands still while it starts is started again."""
    for attempt in range(_STARTS):
        process = await asyncio.create_subprocess_exec(
            *(chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--disable-background-networking", "--no-first-run", "--disable-extensions"),
            *("--disable-dev-shm-usage", f"--user-data-dir={folder / f'profile-{attempt}'}"),
            *("--remote-debugging-port=0", "about:blank"),
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        said: list[bytes] = []
        try:
            return process, await asyncio.wait_for(_origin(process.stderr, said), _START_S)
        except (TimeoutError, EOFError):
            await _end(process)
        except BaseException:
            await _end(process)
            raise
    raise AssertionError(
        f"the browser did not listen after {_STARTS} starts, and said {b''.join(said)!r}"
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


async def _origin(log: asyncio.StreamReader, said: list[bytes]) -> str:
    """Return where the browser listens, as it says itself; what it says before that is added to `said`."""
    while line := await log.readline():
        said.append(line)
        found = re.search(rb"listening on ws://([^/]+)/", line)
        if found is not None:
            return f"http://{found[1].decode()}"
    raise EOFError("the browser ended before it listened")
