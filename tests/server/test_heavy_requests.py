"""Whatever a client sends: others' streams go on, the loop does not stall, and the memory comes back.

THERMOCLINE_RELIABILITY=full tries every field of every route at its exact limits, alone and 16 at a time, and large
answers beside a stream.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import pytest

from benchmarks.served import served
from tests.server.bystander import bystander, forget_peak, resident_mib, waited_s
from tests.server.greatest_values import URLS, Bodies
from tests.server.live import HELLO
from tests.support.reranker import write_reranker
from thermocline.demo import DEMO_MODEL_PATH
from thermocline.server.core.settings import ServerConfig
from thermocline.server.openai.tokens import MAX_TOKENIZED_CHARS

MAX_BODY = ServerConfig().max_body_bytes
FULL = os.environ.get("THERMOCLINE_RELIABILITY") == "full"
MAX_MIB = 256
MAX_KEPT_MIB = 96
MAX_STALL_S = 0.1
MAX_GAP_S = 0.25
NUM_TRIES = 3
WORDS = "the cat saw a dog and went to the big house by the river " * 60
# The ordinary suite tries each sixth kind of place: all of them take minutes on a machine with other work.
QUICK_SHARE = 6


@dataclass
class Window:
    """What a bystander and the server's process noticed of some requests, or of one."""

    what: object
    gap_s: float = 0.0
    waited_s: float = 0.0
    num_stalls: float = 0.0
    num_busy: float = 0.0
    grown_mib: float = 0.0

    def faults(self) -> list[str]:
        """Return which limits were broken. Nothing that the server does makes others use the processors."""
        broken = {
            "silence": self.gap_s > MAX_GAP_S + self.waited_s,
            # Who holds the interpreter may wait for a processor; what the loop's own thread computes is certain.
            "stall": self.num_busy > 0 or (self.num_stalls > 0 and self.waited_s < MAX_STALL_S / 2),
            "memory": self.grown_mib > MAX_MIB,
        }
        return [name for name, is_broken in broken.items() if is_broken]


class Watch:
    """Looks at a server while requests are sent to it, beside a stream."""

    def __init__(self, server, reader):
        self._server = server
        self._reader = reader
        self._pid = server.process.pid
        self.faults: list[Window] = []
        self.seen: list[Window] = []

    @asynccontextmanager
    async def window(self, what):
        """Yield the window, which is filled when it closes."""
        # Making a large body held this process's loop up, and so the reader.
        await self._reader.until_read(2)
        window = Window(what)
        before_mib, before_stalls = resident_mib(self._pid), await stalls(self._server)
        forget_peak(self._pid)
        before_s = waited_s(self._pid)
        self._reader.take_gap_s()
        yield window
        window.gap_s = self._reader.take_gap_s()
        after_s = waited_s(self._pid)
        window.waited_s = max(after_s[task] - before_s.get(task, 0) for task in after_s)
        window.grown_mib = resident_mib(self._pid, peak=True) - before_mib
        after_stalls = await stalls(self._server)
        window.num_stalls = after_stalls["stall"] - before_stalls["stall"]
        window.num_busy = after_stalls["busy"] - before_stalls["busy"]
        self.seen.append(window)

    async def judge(self, what, send):
        """Call `send` in a window. What it breaks, it has to break three times: others use this machine, too."""
        for _ in range(NUM_TRIES):
            async with self.window(what) as window:
                answer = await send()
            if not window.faults():
                return answer
        self.faults.append(window)
        return answer

    def worst(self):
        """Return the windows with the longest gap and the highest peak, for people."""
        gaps = sorted(self.seen, key=lambda one: one.gap_s - one.waited_s)[-3:]
        return gaps, sorted(self.seen, key=lambda one: one.grown_mib)[-3:]


async def post(server, path, body):
    """Return the status of a POST whose answer is read to its end, and the beginning of an answer that is an error."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    try:
        async with server.client.post(path, data=io.BytesIO(raw), headers=headers) as response:
            begin = b""
            async for piece in response.content.iter_chunked(1 << 20):
                begin = begin or piece[:4096]
            return response.status, "" if response.status == 200 else begin.decode()
    except (ConnectionError, OSError):
        return 413, ""  # refused while it was being sent


async def status_of(server, path, body):
    """Return the status of a POST."""
    status, _ = await post(server, path, body)
    return status


async def stalls(server):
    """Return how many looks at the server's loop found it stalled, and busy, for longer than MAX_STALL_S."""
    async with server.client.get("/metrics") as response:
        text = await response.text()
    found = {}
    for kind in ("stall", "busy"):
        buckets = dict(re.findall(rf'event_loop_{kind}_seconds_bucket{{le="([^"]+)"}} (\S+)', text))
        found[kind] = float(buckets["+Inf"]) - float(buckets[str(MAX_STALL_S)])
    return found


@asynccontextmanager
async def watched(*flags, model=DEMO_MODEL_PATH, first=(), max_kept_mib=MAX_KEPT_MIB):
    """A production server with a bystander; afterwards its memory must come back, but for max_kept_mib.

    first: (path, body) of what is asked before the memory is measured, beside a chat.
    """
    chat = {"model": "demo-moe", "messages": HELLO, "max_tokens": 2}
    async with served(model, "--max-queue", "128", *flags) as server:
        for path, body in (*first, ("/v1/chat/completions", chat)):
            assert await status_of(server, path, body) == 200, path
        if FULL:
            await fill_cache(server)
        async with bystander(server) as reader:
            await reader.until_read(200)
            before = resident_mib(server.process.pid)
            watch = Watch(server, reader)
            yield server, watch
            assert not watch.faults, (watch.faults, watch.worst())
            deadline_s = time.monotonic() + 10
            while (kept := resident_mib(server.process.pid) - before) > max_kept_mib:
                assert time.monotonic() < deadline_s, kept
                await asyncio.sleep(0.1)


async def fill_cache(server):
    """Have every block of the KV cache written once: its pages stay, by plan, and are no request's memory."""
    body = {"model": "demo-moe", "max_tokens": 1}
    for turn in range(20):
        prompts = [f"{turn} {number} {WORDS}" for number in range(16)]
        await post(server, "/v1/completions", body | {"prompt": prompts})
        # A server of several models has the model's name in each figure.
        blocks = {
            state: value
            for (name, *labels), value in (await server.figures()).items()
            for state in {"free", "cached"} & {*labels}
            if name == "kv_cache_blocks" and {*labels} <= {"demo-moe", state}
        }
        if blocks["free"] < blocks["cached"] / 100:
            return
    raise AssertionError("the cache is larger than all prompts")


class Climb:
    """Finds the greatest value of one place that is accepted, and sends it and the next one.

    accepted: the greatest that was accepted, refused: the least that was refused; None if there was none.
    """

    def __init__(self, send, hole, small):
        self._send = send
        self._hole = hole
        self._small = small
        self.accepted: int | None = None
        self.refused: int | None = None

    async def run(self, *, is_exact, has_large):
        """Send the largest values that a body can hold, then what a refusal names as the limit, until one is accepted.

        is_exact: find the limit by halving where no refusal names it. has_large: begin with the largest body, not with
        one of an eighth.
        """
        if self._hole.kind == "flag":
            sizes = (0, 1)
        elif self._hole.kind == "number":
            sizes = (-(1 << 63), -1, 0, 1, (1 << 63) - 1, 1 << 63)
        else:
            most = self._hole.most(MAX_BODY - 4096)
            sizes = (most >> 3, most) if has_large else (most >> 3,)
        for size in sizes:
            said = await self._try(size)
            if said and size > 0:
                await self._descend(size, said)
                break
        if self.accepted is None or self.refused is None:
            return
        if self.refused > self.accepted + 1:
            await self._try(self.accepted + 1)
        while is_exact and self.refused > self.accepted + 1:
            await self._try((self.refused + self.accepted) // 2)

    async def _descend(self, size, said):
        """Send what the refusal of `size` names, and then ever less, until a value is accepted."""
        hints = sorted({int(number) for number in re.findall(r"\b[0-9]{1,18}\b", said)})
        for less in [*reversed(hints), *(size >> shift for shift in range(3, 64, 4))]:
            if (self.accepted or 0) < less < size and not await self._try(less):
                return

    async def _try(self, size):
        """Send a value; return what its refusal says, "" if it is accepted."""
        body = self._hole.body(self._small, size)
        status, said = await self._send(json.dumps(body).encode())
        assert status < 500 or status == 501, (self._hole, size, status, said)
        if status == 200:
            self.accepted = max(size, self.accepted or size)
            return ""
        if size > (self.accepted or 0):
            self.refused = min(size, self.refused or size)
        return said or "refused"


# Models are not to be changed here. Each other route has to accept its short body, a new one as well.
REFUSED = {"/api/pull": 403}


def ranks(path):
    """Whether the path needs a model that ranks."""
    return "rerank" in path


async def api_of(server):
    """Return the bodies that the server takes."""
    async with server.client.get("/openapi.json") as response:
        return Bodies(await response.json())


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_no_field_of_any_route_holds_others_up(tmp_path, record_property):
    """Each field of each route at its greatest accepted value and at the next one, without being named here."""
    # The latest grammars and prompts stay in their caches.
    async with watched("--slot-save-path", str(tmp_path), max_kept_mib=192) as (server, watch):
        bodies = await api_of(server)
        assert {"/tokenize", "/v1/chat/completions", "/api/embed", "/v1/messages"} <= {
            *bodies.paths
        }
        paths = [path for path in bodies.paths if not ranks(path)]
        sweep = Sweep(server, watch, bodies, {})
        for path in paths:
            await sweep.path(path, REFUSED.get(path, 200))
        assert sweep.num_limits > (100 if FULL else 20), "few fields were accepted at all"
        if FULL:
            record_property("places where every value was refused", len(sweep.only_refused))


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_no_field_of_reranking_holds_others_up(tmp_path, record_property):
    """The same of the routes that the demo model refuses: another model ranks beside the stream."""
    (tmp_path / "demo-moe.gguf").symlink_to(DEMO_MODEL_PATH)
    write_reranker(tmp_path / "ranker.gguf")
    one = {"model": "ranker", "query": "a", "documents": ["b"]}
    flags = ("--models", str(tmp_path), "--keep-alive", "-1")
    async with watched(*flags, model=None, first=[("/v1/rerank", one)], max_kept_mib=192) as (
        server,
        watch,
    ):
        bodies = await api_of(server)
        paths = [path for path in bodies.paths if ranks(path)]
        assert paths
        sweep = Sweep(server, watch, bodies, {"model": "ranker"})
        for path in paths:
            await sweep.path(path, 200)
        assert sweep.num_limits >= 1
        if FULL:
            record_property("places where every value was refused", len(sweep.only_refused))


class Sweep:
    """Climbs the places of paths. fields: what each body has beside its own.

    num_limits: places where a value was accepted; only_refused: the others.
    """

    def __init__(self, server, watch, bodies, fields):
        self._server = server
        self._watch = watch
        self._bodies = bodies
        self._fields = fields
        self._done = set()
        self._kinds = set()
        self.num_limits = 0
        self.only_refused = []

    async def path(self, path, status):
        """Climb the places of a path whose short body gets this status: what is refused must cost as little."""
        small = self._bodies.small(path) | self._fields
        found = await post(self._server, URLS.get(path, path), small)
        assert found[0] == status, (path, small, found)
        for hole in self._bodies.holes(path):
            if not FULL:
                if hole.likeness in self._done:
                    continue
                self._done.add(hole.likeness)
                if len(self._done) % QUICK_SHARE:
                    continue
            # The largest bodies take long to make and to send: one of each kind for each path.
            has_large = FULL or (path, hole.kind) not in self._kinds
            self._kinds.add((path, hole.kind))
            if await swept(self._server, self._watch, hole, small, has_large=has_large):
                self.num_limits += 1
            else:
                self.only_refused.append(hole)


async def swept(server, watch, hole, small, *, has_large):
    """Climb one place, all its values in one window, and those of a window with faults alone; return whether a value was accepted."""
    sent = []

    async def send(raw):
        sent.append(raw)
        return await post(server, hole.url, raw)

    climb = Climb(send, hole, small)
    async with watch.window(hole) as window:
        await climb.run(is_exact=FULL, has_large=has_large)
    if window.faults():
        for number, raw in enumerate(sent):
            await watch.judge((hole, number, len(raw)), partial(post, server, hole.url, raw))
    if FULL and climb.accepted is not None:
        await watch.judge((hole, climb.accepted, 16), partial(crowded, server, hole.url, sent[-1]))
    return climb.accepted is not None


async def crowded(server, path, raw):
    """Send the same 16 times."""
    await asyncio.gather(*(post(server, path, raw) for _ in range(16)))


HEAVY = {
    "tokens": (
        "/tokenize",
        {"content": "7" * MAX_TOKENIZED_CHARS, "with_pieces": True},
    ),
    "pieces of a chat": ("/tokenize", {"messages": [{"role": "user", "content": WORDS}]}),
    "prompts with log-probabilities": (
        "/v1/completions",
        {
            "prompt": [WORDS[k:] for k in range(40)],
            "echo": True,
            "logprobs": 20,
            "max_tokens": 0,
        },
    ),
    "answers with log-probabilities": (
        "/v1/chat/completions",
        {"messages": HELLO, "n": 8, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
        | {"max_tokens": 1500},
    ),
    "embeddings": ("/v1/embeddings", {"input": ["a cat"] * 512}),
    "ids": ("/detokenize", {"tokens": [7] * 400_000}),
}


# Made in one go, each would hold the loop for more than MAX_STALL_S.
WHOLE = {
    "a prompt with log-probabilities": (
        "/v1/completions",
        {"prompt": [WORDS[k:] for k in range(8)], "echo": True, "logprobs": 20, "max_tokens": 0},
    ),
    "answers with log-probabilities": (
        "/v1/chat/completions",
        {"messages": HELLO, "n": 8, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
        | {"max_tokens": 400},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WHOLE)
async def test_an_answer_that_is_sent_whole_is_made_piece_by_piece(kind):
    """Thousands of log-probabilities are encoded as they come, so that nobody else notices."""
    path, body = WHOLE[kind]
    async with watched() as (server, watch):
        sent = partial(status_of, server, path, json.dumps(body).encode())
        assert await watch.judge(kind, sent) == 200


@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason="takes minutes: set THERMOCLINE_RELIABILITY=full")
@pytest.mark.timeout(600)
async def test_heavy_answers_leave_others_alone():
    """What is large although each of its fields is allowed is made, sent and forgotten without anybody's notice.

    Sixteen long texts at a time hold nobody up either, and when their clients leave, the work ends.
    """
    async with watched() as (server, watch):
        for kind, (path, body) in HEAVY.items():
            raw = json.dumps(body).encode()
            assert await watch.judge(kind, partial(status_of, server, path, raw)) == 200, kind
        path, raw = "/tokenize", json.dumps({"content": "7" * MAX_TOKENIZED_CHARS}).encode()
        long = {"content": "the cat " * 5000}

        async def beside_a_crowd():
            crowd = await gathered(server, [(path, raw)] * 16)
            assert await status_of(server, path, {"content": "hello"}) == 200
            await dispersed(crowd)

        await watch.judge("a crowd", beside_a_crowd)
        async with asyncio.timeout(20):
            assert await status_of(server, path, long) == 200


LONG = (
    ("/tokenize", {"content": "7" * MAX_TOKENIZED_CHARS}),
    ("/v1/chat/completions", {"messages": HELLO, "structured_outputs": {"regex": "7" * 65_000}}),
    ("/v1/chat/completions", {"messages": HELLO, "user": "7" * (MAX_BODY - 4096)}),
    ("/v1/completions", {"prompt": "a", "ignore_eos": True, "n": 16}),
)


@pytest.mark.slow
async def test_long_work_does_not_keep_the_process_alive():
    """With sixteen requests in work, each of which takes long, SIGTERM is obeyed within 20 s, although nobody has left."""
    async with served(DEMO_MODEL_PATH, "--shutdown-timeout", "1") as server:
        crowd = await gathered(
            server, [(path, json.dumps(body).encode()) for path, body in LONG] * 4
        )
        began_s = time.monotonic()
        server.process.terminate()
        await server.process.wait()
        assert time.monotonic() - began_s < 20
        assert set(await asyncio.gather(*crowd)) <= {200, 413, 429, 503}


async def gathered(server, requests):
    """Return the tasks of requests, (path, body) each, that the server has received, or of which some are answered."""
    crowd = [asyncio.create_task(status_of(server, path, raw)) for path, raw in requests]
    while not any(task.done() for task in crowd):
        if (await server.figures())["tasks",] >= len(crowd):
            break
        await asyncio.sleep(0.05)
    return crowd


async def dispersed(crowd):
    """Make the clients leave."""
    for task in crowd:
        task.cancel()
    await asyncio.wait(crowd)
