"""`thermocline top`: what it shows, what it makes of servers that are away or no servers at all."""

from __future__ import annotations

import io
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tests.cli.test_terminal import Terminal
from thermocline.cli.live_events import LiveEvent, ServerAwayError, read_events
from thermocline.cli.live_view import LiveScreen, plain_line, sparkline
from thermocline.errors import ConfigError

MEMORY = {"process_bytes": 3 << 30, "available_bytes": 9 << 30, "total_bytes": 16 << 30}
READY: dict[str, Any] = {
    "state": "ready",
    "model": "big",
    "memory": MEMORY,
    "tokens": {
        "prompt_total": 9,
        "output_total": 7,
        "prompt_per_second": 3.0,
        "output_per_second": 12.5,
    },
    "lanes": [
        {"lane": "loop", "work": False, "busy": 0.1},
        {"lane": "cpu 0", "work": True, "busy": 0.5},
    ],
    "queue": {"running": 2, "waiting": 1, "decoding": 1, "preemptions": 0},
    "requests": [
        {
            "id": 4,
            "state": "prefill",
            "prompt_tokens": 10,
            "prompt_computed": 5,
            "output_tokens": 0,
        },
        {"id": 5, "state": "decode", "prompt_tokens": 3, "prompt_computed": 3, "output_tokens": 8},
    ],
    "drafts": {"drafted": 8, "accepted": 6, "why_off": None},
    "kv": {"blocks": 64, "free": 50, "cached": 4, "held": 10, "prefix_hit_share": 0.25},
    "experts": {
        "hot": 4,
        "cold": 4,
        "choices": 9,
        "hot_share": 0.75,
        "memory": {
            "hits": 9,
            "late": 0,
            "misses": 1,
            "hints": 9,
            "needless": 0,
            "hit_share": 0.9,
            "read_bytes": 1 << 20,
        },
    },
    "tracing": False,
}
FIRST = READY | {"tokens": READY["tokens"] | {"output_per_second": None}}
LOADING = {
    "state": "loading",
    "model": "big",
    "memory": MEMORY,
    "load": {"step": "tokenizer", "done": 2, "total": 4, "seconds": 1.5},
}


def as_stream(*events: dict[str, Any]) -> bytes:
    """Return events as a server frames them, with a sign of life between."""
    return b"".join(b": ping\n\ndata: %b\n\n" % json.dumps(event).encode() for event in events)


@contextmanager
def answering(body: bytes, *, status: int = 200, media_type: str = "text/event-stream"):
    """Serve `body` to everybody; yields the address and the headers of the requests."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, dict(self.headers)))
            self.send_response(status)
            self.send_header("Content-Type", media_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


def event(fields: dict[str, Any]) -> LiveEvent:
    """Return the typed event of these fields."""
    return msgspec.convert(fields, LiveEvent)


def shown(screen: LiveScreen, width: int = 80) -> str:
    """Return what a screen looks like at a width."""
    console = Console(width=width, file=io.StringIO())
    with console.capture() as page:
        console.print(screen)
    return page.get()


def test_a_ready_server_is_shown_with_everything():
    """Speed, curve, lanes, queue, cache, experts, memory, and each request's progress."""
    screen = LiveScreen("http://here")
    screen.take(event(READY))
    text = shown(screen)
    for part in ("big", "12.5", "█", "cpu 0", "50%", "2 running", "1 waiting", "10 of 64"):
        assert part in text
    for part in ("90.0% in memory", "hot ones got 75%", "3.00 GiB", "5 of 10 prompt", "and 1 more"):
        assert part in text


def test_a_file_that_is_in_memory_is_said_to_be():
    """Whatever was missing at the beginning: the share would keep that for ever."""
    reads = READY["experts"]["memory"] | {"resident": True}
    screen = LiveScreen("http://here")
    screen.take(event(READY | {"experts": READY["experts"] | {"memory": reads}}))
    assert "all in memory" in shown(screen)
    assert "90.0%" not in shown(screen)


def test_workers_are_shown_with_their_links():
    """Each with its state and, once it is known, the speed of its link; without workers there is no line."""
    workers = [
        {"state": "ready", "link_bytes_per_second": 3 << 30},
        {"state": "late", "link_bytes_per_second": 0},
    ]
    screen = LiveScreen("http://here")
    screen.take(event(READY))
    assert "workers" not in shown(screen)
    screen.take(event(READY | {"experts": READY["experts"] | {"workers": workers}}))
    assert "ready, link 3.00 GiB/s; late" in shown(screen)


@pytest.mark.parametrize("width", [20, 40, 60, 200])
def test_no_line_is_wider_than_the_screen(width):
    """Bars and curves shrink, long facts fold."""
    screen, ready = LiveScreen("http://here"), event(READY)
    for _ in range(300):
        screen.take(ready)
    assert max(map(len, shown(screen, width).splitlines())) <= width


def test_other_states_are_said():
    """Loading with its step, failures with their text, an absent server with what was seen last."""
    screen = LiveScreen("http://here")
    assert "asking http://here" in shown(screen)
    screen.take(event(LOADING))
    assert "loading: tokenizer (3 of 4), 1.5 s" in shown(screen)
    screen.take(event({"state": "failed", "model": "big", "memory": MEMORY, "error": "no file"}))
    assert "no file" in shown(screen)
    screen.take(event(READY))
    screen.say_away("refused")
    assert "no answer" in shown(screen)
    assert "cpu 0" in shown(screen)


def test_a_server_s_text_can_not_move_the_cursor():
    """Names and errors are printed without control characters."""
    screen = LiveScreen("http://here")
    screen.take(event(READY | {"model": "a\x1b[2Jb"}))
    assert "\x1b" not in shown(screen)
    assert "\x1b" not in plain_line(event(READY | {"model": "a\x1b[2Jb"}))


def test_a_curve_has_one_character_per_value():
    """The highest stands for the largest, the lowest for nothing; without values there is none."""
    assert sparkline([0, 4, 8]) == "▁▅█"
    assert sparkline([0, 0], is_ascii=True) == "__"
    assert sparkline([]) == ""


def test_once_prints_the_first_complete_event(invoke):
    """The first event has no speeds yet, so the second is printed; the key goes along."""
    with answering(as_stream(FIRST, READY)) as (url, asked):
        result = invoke("top", "--url", f"{url}/", "--api-key", "sk-1", "--once")
    assert result.exit_code == 0
    assert "12.5" in result.stdout
    (path, headers) = asked[0]
    assert path == "/events"
    assert headers["Authorization"] == "Bearer sk-1"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"status": 401}, "--api-key"),
        ({"status": 404}, "no thermocline server"),
        ({"media_type": "text/html"}, "no thermocline server"),
        ({"body": b"data: {\n\n"}, "no thermocline server"),
        ({"body": b'data: {"state": "ready"}\n\n'}, "no thermocline server"),
        ({"status": 503}, "no server answers"),
        ({"body": b""}, "ended before"),
    ],
)
def test_what_can_not_be_shown_is_one_error_line(invoke, answer, says):
    """Keys, other servers, other versions, servers that are away: exit code 1, and what to do."""
    with answering(**{"body": as_stream(READY)} | answer) as (url, _):
        result = invoke("top", "--url", url, "--once")
    assert result.exit_code == 1
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("url", ["here", "ftp://here", "http://", "http://here:x"])
def test_a_wrong_address_is_refused_with_an_example(url):
    """Before anything is asked."""
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        next(read_events(url, None))


def test_a_server_that_is_not_there_is_away():
    """Which is no fault of the address: it is asked again."""
    with answering(b"") as (url, _):
        pass
    with pytest.raises(ServerAwayError):
        next(read_events(url, None))


@pytest.mark.slow
def test_the_screen_comes_and_goes_with_the_command():
    """In a terminal: an alternate screen, events on it, a server that ends is said, Ctrl-C leaves with 0."""
    with answering(as_stream(READY)) as (url, _):
        terminal = Terminal("top", "--url", url)
        try:
            terminal.wait_for("\x1b[?1049h")
            terminal.wait_for("cpu 0")
            terminal.wait_for("trying again")
            terminal.wait_for("cpu 0")
            terminal.type("\x03")
            terminal.wait_for("\x1b[?1049l")
            assert terminal.exit_code() == 0
        finally:
            terminal.close()
