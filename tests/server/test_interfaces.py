"""Responses, Anthropic's and Ollama's routes over HTTP: errors in each one's own shape, streams that end,
clients that leave, and whatever bodies.
"""

from __future__ import annotations

import asyncio
import copy
import json
from contextlib import AsyncExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.core.test_refusals import json_values
from tests.server.live import CARD, HELLO, live
from tests.server.steps import read_events
from thermocline import EngineConfig, PrefetchConfig, SchedulerConfig
from thermocline.kernels.whole_step import NativeStep

JSON = {"Content-Type": "application/json"}
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
API_CHAT, API_GENERATE = "/api/chat", "/api/generate"

GOOD = {
    RESPONSES: {"model": CARD.id, "input": [HELLO[0]], "max_output_tokens": 2},
    MESSAGES: {"model": CARD.id, "messages": HELLO, "max_tokens": 2},
    COUNT: {"model": CARD.id, "messages": HELLO},
    API_CHAT: {"model": CARD.id, "messages": HELLO, "options": {"num_predict": 2}, "stream": False},
    API_GENERATE: {
        "model": CARD.id,
        "prompt": "hi",
        "options": {"num_predict": 2},
        "stream": False,
    },
    "/api/show": {"model": CARD.id},
    "/api/embed": {"model": CARD.id, "input": "hi"},
    "/v1/embeddings": {"model": CARD.id, "input": "hi"},
}
ANSWERING = (RESPONSES, MESSAGES, API_CHAT, API_GENERATE)
ENDLESS = {path: {k: v for k, v in GOOD[path].items() if k != "options"} for path in ANSWERING}
ENDLESS[RESPONSES] = ENDLESS[RESPONSES] | {"max_output_tokens": 9999}
ENDLESS[MESSAGES] = ENDLESS[MESSAGES] | {"max_tokens": 9999}


def told_error(path, body):
    """Return type and text of the error in `body`, which must have the shape of the path's interface."""
    if path.startswith("/api/"):
        assert set(body) == {"error"}, body
        return None, body["error"]
    error = body["error"]
    if path.startswith(MESSAGES):
        assert (set(body), body["type"]) == ({"type", "error"}, "error"), body
        assert set(error) == {"type", "message"}, body
    else:
        assert {"message", "type", "param", "code"} <= set(error), body
    return error["type"], error["message"]


async def post(server, path, body, **headers):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with server.client.post(path, data=raw, headers=JSON | headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("path", GOOD)
async def test_errors_have_the_shape_of_their_interface(small_toy, path):
    """Wrong JSON, model, type, host, method, length: the status is the same as everywhere."""
    too_long = {"input": "x" * 99, "messages": [{"role": "user", "content": "x" * 99}]}
    too_long |= {"prompt": "x" * 99}
    cases = [
        (b"{", 400, "invalid_request_error"),
        ({}, 200 if path == "/api/show" else 400, "invalid_request_error"),
        (GOOD[path] | {"model": "other"}, 404, "not_found_error"),
        (GOOD[path] | too_long, 400, "invalid_request_error"),
    ]
    async with live(small_toy) as server:
        for body, status, kind in cases[: 4 if path in ANSWERING else 3]:
            found, answer = await post(server, path, body)
            if path == "/api/embed" and not body:
                status = 400
            assert found == status, answer
            if status != 200:
                assert told_error(path, answer)[0] in (None, kind)
        for headers, status in (
            ({"Content-Type": "text/plain"}, 415),
            ({"Host": "example.org"}, 403),
        ):
            found, answer = await post(server, path, GOOD[path], **headers)
            if path.startswith("/api/") and status == 415:
                continue
            assert found == status, answer
            assert told_error(path, answer)[1]
        async with server.client.get(path) as response:
            assert response.status == 405
            assert told_error(path, await response.json())[1]


async def test_ollama_s_clients_need_not_declare_json(small_toy):
    """Some send no type, as its documentation does; a page of another origin is refused all the same."""
    raw = json.dumps(GOOD[API_CHAT]).encode()
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    async with live(small_toy) as server:
        for more, expected in (({}, 200), ({"Origin": "http://example.org"}, 403)):
            request = server.client.post(API_CHAT, data=raw, headers=headers | more)
            async with request as response:
                assert response.status == expected


async def test_a_strict_server_refuses_unknown_fields_in_each_interface(small_toy):
    """400 that names the field; without the setting it is passed over."""
    for is_strict, expected in ((True, 400), (False, 200)):
        async with live(small_toy, strict_params=is_strict) as server:
            for path in (*ANSWERING, "/v1/messages/count_tokens", "/api/show"):
                status, body = await post(server, path, GOOD[path] | {"nobody_knows": 1})
                assert status == expected, path
                if is_strict:
                    assert "nobody_knows" in told_error(path, body)[1]


async def test_a_full_queue_is_told_in_each_interface(speller, gate):
    """429 with Retry-After, and Anthropic's own name for it."""
    config = EngineConfig(scheduler=SchedulerConfig(max_requests=1))
    async with live(speller, config) as server:
        _, writer = await server.connect(API_CHAT, **ENDLESS[API_CHAT] | {"stream": True})
        await server.until_requests(1)  # and it stays: its prompt is computed when the gate opens
        for path in ANSWERING:
            async with server.client.post(path, json=GOOD[path]) as response:
                assert response.status == 429
                assert int(response.headers["Retry-After"]) > 0
                kind, _ = told_error(path, await response.json())
                assert kind in (None, "rate_limit_error")
        writer.close()
        gate.open()


@pytest.mark.slow
@pytest.mark.parametrize("path", ANSWERING)
async def test_leaving_ends_the_work(toy, path):
    """Streamed or not, a connection that closes leaves nothing in the engine."""
    async with live(toy) as server:
        for stream in (False, True):
            reader, writer = await server.connect(path, **ENDLESS[path] | {"stream": stream})
            if stream:
                await reader.readuntil(b"\r\n\r\n")
            await server.until_requests(1)
            writer.close()
            await server.until_in_flight(0)
            await server.settle()


@pytest.mark.parametrize("path", ANSWERING)
async def test_a_failure_in_a_stream_is_its_last_event(speller, path, monkeypatch):
    """Each interface has its own form of it, and nothing comes after it."""
    num_calls = 0
    real = NativeStep.__call__

    def failing(self, *args, **kwargs):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 10:
            raise MemoryError("no room, as told")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(NativeStep, "__call__", failing)
    # Whole steps are computed where nothing is read ahead.
    config = EngineConfig(prefetch=PrefetchConfig(mode="off"))
    async with live(speller, config) as server:
        body = ENDLESS[path] | {"stream": True}
        async with server.client.post(path, json=body) as response:
            assert response.status == 200
            raw = await response.read()
    if path.startswith("/api/"):
        last = json.loads(raw.splitlines()[-1])
        message = told_error(path, last)[1]
    elif path == MESSAGES:
        last = read_events(raw)[-1]
        message = told_error(path, last)[1]
    else:
        last = read_events(raw)[-1]
        assert last["type"] == "response.failed"
        message = last["response"]["error"]["message"]
    assert "no room, as told" in message


@pytest.mark.parametrize("path", ANSWERING)
async def test_signs_of_life_do_not_disturb(toy, gate, path):
    """While a prompt is computed: pings of Anthropic's own, comments, and none between lines."""
    async with live(toy, open_after_s=0.0, ping_after_s=0.005) as server:
        body = GOOD[path] | {"stream": True}
        async with server.client.post(path, json=body) as response:
            assert response.status == 200
            raw = b""
            if not path.startswith("/api/"):
                ping = b"event: ping\n" if path == MESSAGES else b": ping\n\n"
                while raw.count(ping) < 3:
                    raw += await response.content.readany()
            gate.open()
            raw += await response.read()
    if path.startswith("/api/"):
        assert response.headers["Content-Type"] == "application/x-ndjson"
        assert json.loads(raw.splitlines()[-1])["done"] is True
    else:
        kinds = [event["type"] for event in read_events(raw.replace(b": ping\n\n", b""))]
        assert kinds[0] in ("message_start", "response.created")
        assert kinds[-1] in ("message_stop", "response.completed", "response.incomplete")


def streamed_text(path, body):
    """Return the text in one event or line of a stream."""
    match path:
        case "/v1/messages":
            return body.get("delta", {}).get("text", "")
        case "/v1/responses":
            return body["delta"] if body["type"] == "response.output_text.delta" else ""
        case "/api/generate":
            return body["response"]
        case _:
            return body["message"]["content"]


@pytest.mark.parametrize("path", ANSWERING)
async def test_whole_and_streamed_answers_are_the_same(toy, path):
    """The text of the pieces is the text of the whole."""

    async with live(toy) as server:
        fields = {"max_tokens": 12, "max_output_tokens": 12, "options": {"num_predict": 12}}
        status, whole = await post(server, path, GOOD[path] | fields)
        assert status == 200
        async with server.client.post(
            path, json=GOOD[path] | fields | {"stream": True}
        ) as response:
            raw = await response.read()
    if path == RESPONSES:
        expected = whole["output"][0]["content"][0]["text"]
    elif path == MESSAGES:
        expected = whole["content"][0]["text"]
    else:
        expected = whole["response"] if path == API_GENERATE else whole["message"]["content"]
    if path.startswith("/api/"):
        bodies = [json.loads(line) for line in raw.splitlines()]
    else:
        bodies = read_events(raw)
    assert expected
    assert "".join(streamed_text(path, body) for body in bodies) == expected


async def test_counting_counts_the_prompt_that_is_answered(toy):
    """count_tokens and input_tokens agree, with a system message and without."""
    async with live(toy) as server:
        for fields in ({}, {"system": "be kind"}):
            _, counted = await post(server, COUNT, GOOD[COUNT] | fields)
            _, answered = await post(server, MESSAGES, GOOD[MESSAGES] | fields)
            usage = answered["usage"]
            assert counted == {
                "input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]
            }


async def test_a_second_turn_reads_the_cache(toy):
    """What was computed for the first request is reported as read by the second."""
    async with live(toy) as server:
        body = GOOD[MESSAGES] | {"system": "word " * 60}
        await post(server, MESSAGES, body)
        _, second = await post(server, MESSAGES, body)
        assert second["usage"]["cache_read_input_tokens"] > 0
        body = GOOD[RESPONSES] | {"instructions": "other " * 60}
        await post(server, RESPONSES, body)
        _, second = await post(server, RESPONSES, body)
        assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0


async def test_a_request_for_nothing_loads(toy):
    """Ollama's clients load a model by an empty request; it is there already."""
    async with live(toy) as server:
        for path in (API_CHAT, API_GENERATE):
            status, body = await post(server, path, {"model": f"{CARD.id}:latest"})
            assert (status, body["done_reason"]) == (200, "load")


def places(body, path=()):
    """Return the places of all values inside of `body`."""
    found = [path] if path else []
    items = body.items() if isinstance(body, dict) else enumerate(body)
    for key, value in items if isinstance(body, dict | list) else ():
        found += places(value, (*path, key)) if isinstance(value, dict | list) else [(*path, key)]
    return found


FORM = {"type": "object", "properties": {"a": {"type": "integer"}}}
RICH = {
    RESPONSES: GOOD[RESPONSES]
    | {
        "tools": [{"type": "function", "name": "f", "parameters": FORM}],
        "tool_choice": {"type": "function", "name": "f"},
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "x", "text": "b"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "d"},
        ],
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "metadata": {"a": "b"},
        "instructions": "e",
    },
    MESSAGES: GOOD[MESSAGES]
    | {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "b", "signature": "c"},
                    {"type": "tool_use", "id": "d", "name": "f", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "d", "content": "g"}],
            },
        ],
        "system": [{"type": "text", "text": "h"}],
        "tools": [{"name": "f", "input_schema": FORM}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 9},
        "stop_sequences": ["x"],
        "temperature": 0.5,
    },
    API_CHAT: GOOD[API_CHAT]
    | {
        "messages": [
            *HELLO,
            {
                "role": "assistant",
                "thinking": "a",
                "tool_calls": [{"function": {"name": "f", "arguments": {"b": 1}}}],
            },
            {"role": "tool", "tool_name": "f", "content": "c"},
        ],
        "options": {"num_predict": 2, "stop": ["x"], "temperature": 0.5, "seed": 1},
        "think": True,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": FORM}}],
    },
    API_GENERATE: GOOD[API_GENERATE]
    | {"system": "a", "raw": False, "think": False, "format": FORM},
}


VALUES = json_values()


@st.composite
def changed_bodies(draw):
    """A path, and a good body of it in which one value is another, or gone."""
    path = draw(st.sampled_from(ANSWERING))
    body = copy.deepcopy(RICH[path])
    *way, last = draw(st.sampled_from(places(body)))
    holder = body
    for key in way:
        holder = holder[key]
    if draw(st.booleans()):
        holder[last] = draw(VALUES)
    else:
        del holder[last]
    return path, json.dumps(body).encode()


@pytest.mark.slow
def test_no_body_is_a_server_s_failure(small_toy):
    """One changed value is answered or refused, in the shape of the interface; never a 500."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        server = runner.run(stack.enter_async_context(live(small_toy)))

        async def send(path, raw):
            async with server.client.post(path, data=raw, headers=JSON) as response:
                return response.status, await response.read()

        @settings(max_examples=120, deadline=None, database=None, derandomize=True)
        @given(changed_bodies())
        def check(case):
            path, raw = case
            status, answer = runner.run(send(path, raw))
            assert status in (200, 400, 404), answer
            if status != 200:
                assert told_error(path, json.loads(answer))[1]

        try:
            check()
        finally:
            runner.run(stack.aclose())
