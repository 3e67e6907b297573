"""Whole answers and streams: OpenAI's shapes, and the engine's own text and numbers in them."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.conftest import SPELLED
from tests.server.live import CARD, CHAT, HELLO, TEXT, content, live
from thermocline import SamplingParams, __version__

SHORT = {"max_tokens": 12, "ignore_eos": True}
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
TIMINGS = {
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_second",
    "queue_ms",
    "ttft_ms",
    "draft_n",
    "draft_n_accepted",
    "experts",
}


async def engine_text(engine, prompt, params=PARAMS):
    return "".join([event.text async for event in engine.generate(prompt, params)])


@pytest.mark.slow
async def test_a_chat_answer_has_openai_s_shape(toy):
    """Every field that clients read is there, with the engine's text and counts."""
    async with live(toy) as server:
        body = await server.chat(**SHORT)
        prompt = await server.engine.encode_chat(HELLO)
        text = await engine_text(server.engine, prompt)
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", CARD.id)
    assert body["system_fingerprint"].startswith(f"thermocline-{__version__}-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 12,
        "total_tokens": len(prompt) + 12,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert set(body["timings"]) - {"draft_off"} == TIMINGS
    assert (body["timings"]["prompt_n"], body["timings"]["predicted_n"]) == (len(prompt), 12)
    # Two experts of each of two layers for every token but the last, on the CPU.
    experts = body["timings"]["experts"]
    assert (experts["hits"], experts["misses"], experts["bytes_h2d"]) == (0, 0, 0)
    assert experts["cpu"] == (len(prompt) + 11) * 2 * 2


@pytest.mark.slow
@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_chat_stream_has_its_chunks_in_order(toy, include_usage):
    """Role, contents, finish reason, usage only if asked for, and the same head everywhere."""
    async with live(toy) as server:
        chunks = await server.stream(
            CHAT,
            messages=HELLO,
            stream_options={"include_usage": include_usage},
            **SHORT,
        )
        whole = await server.chat(**SHORT)
    heads = {(c["id"], c["created"], c["model"], c["system_fingerprint"]) for c in chunks}
    assert len(heads) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert set(chunks[-1]["timings"]) - {"draft_off"} == TIMINGS
    assert all("timings" not in chunk for chunk in chunks[:-1])
    if include_usage:
        usage = chunks.pop()
        assert usage["choices"] == []
        # The second time the prompt's full block is found in the cache.
        cached = {"prompt_tokens_details": {"cached_tokens": 16}}
        assert usage["usage"] | cached == whole["usage"]
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(choice["delta"]) == {"content"} for choice in choices[1:-1])
    assert all(choice["delta"]["content"] for choice in choices[1:-1])
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "length")
    assert content(chunks) == whole["choices"][0]["message"]["content"]


@pytest.mark.slow
async def test_a_completion_takes_text_or_token_ids(toy):
    """All four forms of one prompt give the engine's text, whole and streamed."""
    async with live(toy) as server:
        ids = await server.engine.encode("hello")
        text = await engine_text(server.engine, "hello")
        for prompt in ("hello", ["hello"], ids, [ids]):
            status, body = await server.post(TEXT, prompt=prompt, **SHORT)
            assert status == 200, body
            assert body["id"].startswith("cmpl-")
            assert body["object"] == "text_completion"
            assert body["choices"] == [
                {"index": 0, "logprobs": None, "finish_reason": "length", "text": text}
            ]
        chunks = await server.stream(TEXT, prompt=ids, **SHORT)
    assert content(chunks) == text
    assert chunks[-1]["choices"][0] == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "length",
    }


async def test_an_answer_of_no_tokens_is_an_answer(toy):
    """A completion may ask for none; streamed, it is a finish chunk alone."""
    async with live(toy) as server:
        status, body = await server.post(TEXT, prompt="hello", max_tokens=0)
        chunks = await server.stream(TEXT, prompt="hello", max_tokens=0)
    assert (status, body["choices"][0]["text"]) == (200, "")
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == ["length"]


async def test_the_sampling_of_a_request_is_the_engine_s(toy):
    """A seeded answer with filters is the one that the engine gives for the same SamplingParams."""
    fields = {"temperature": 1.5, "seed": 3, "top_k": 20, "min_p": 0.01}
    async with live(toy) as server:
        params = SamplingParams(max_tokens=12, ignore_eos=True, **fields)
        expected = await engine_text(server.engine, "hello", params)
        assert expected != await engine_text(server.engine, "hello")
        status, body = await server.post(TEXT, prompt="hello", **SHORT, **fields)
    assert (status, body["choices"][0]["text"]) == (200, expected)


@pytest.mark.slow
async def test_stop_strings_and_limits(toy):
    """A stop string or a list of them ends the text before it; max_completion_tokens goes first."""
    async with live(toy) as server:
        text = await engine_text(server.engine, "hello")
        stop = text[5:7]
        for given in (stop, ["never there", stop]):
            status, body = await server.post(TEXT, prompt="hello", stop=given, **SHORT)
            assert status == 200, body
            assert body["choices"][0]["text"] == text[: text.index(stop)]
            assert body["choices"][0]["finish_reason"] == "stop"
        body = await server.chat(max_completion_tokens=3, max_tokens=9, ignore_eos=True)
        assert body["usage"]["completion_tokens"] == 3


@pytest.mark.slow
async def test_null_and_unknown_fields_are_ignored(toy):
    """Clients send null for what they do not set, and fields that only OpenAI knows."""
    async with live(toy) as server:
        names = ("n", "stop", "seed", "temperature", "logit_bias", "stream", "tools", "audio")
        body = await server.chat(
            **dict.fromkeys(names), store=False, metadata={"a": 1}, user="me", **SHORT
        )
        assert body["choices"][0]["message"]["content"]


@pytest.mark.slow
async def test_chat_logprobs_are_one_entry_per_token(toy):
    """Token text, bytes, log-probability and the best others, streamed and whole alike."""
    fields = {"logprobs": True, "top_logprobs": 2, **SHORT}
    async with live(toy) as server:
        body = await server.chat(**fields)
        chunks = await server.stream(CHAT, messages=HELLO, **fields)
    whole = body["choices"][0]["logprobs"]["content"]
    streamed = [
        entry
        for chunk in chunks
        if (logprobs := chunk["choices"][0]["logprobs"]) is not None
        for entry in logprobs["content"]
    ]
    assert streamed == whole
    assert len(whole) == body["usage"]["completion_tokens"]
    text = b"".join(bytes(entry["bytes"]) for entry in whole).decode("utf-8", "replace")
    assert text == body["choices"][0]["message"]["content"] == content(chunks)
    for entry in whole:
        # Greedy: the chosen token is the best one.
        best, second = entry["top_logprobs"]
        assert {key: entry[key] for key in best} == best
        assert 0 >= best["logprob"] >= second["logprob"]


async def test_completion_logprobs_know_where_tokens_begin(speller):
    """Offsets count characters of the text, also where a character is cut over tokens."""
    fields = {"prompt": [0x80], "max_tokens": 9, "logprobs": 1}
    async with live(speller) as server:
        status, body = await server.post(TEXT, **fields)
        chunks = await server.stream(TEXT, **fields)
    assert status == 200, body
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 9
    assert all(len(top) == 1 for top in logprobs["top_logprobs"])
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    for name, values in logprobs.items():
        assert [value for part in parts for value in part[name]] == values


async def test_a_character_over_several_tokens_is_never_broken(speller):
    """Every delta is a whole character, of a reader that may be behind whole ones; a cut one at the end is one U+FFFD."""
    async with live(speller) as server:
        # Fewer tokens than a reader may be behind before they are joined.
        chunks = await server.stream(TEXT, prompt=[0x80], max_tokens=9)
        assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == list(SPELLED)
        chunks = await server.stream(TEXT, prompt=[0x80], max_tokens=9 * 5)
        deltas = [chunk["choices"][0]["text"] for chunk in chunks[:-1]]
        assert "".join(deltas) == SPELLED * 5
        assert all(deltas), "a token that ends no character has a delta"
        chunks = await server.stream(TEXT, prompt=[0x80], max_tokens=7)
        assert content(chunks) == SPELLED[:2] + "\N{REPLACEMENT CHARACTER}"


@pytest.mark.slow
async def test_concurrent_streams_equal_serial_ones(toy):
    """Eight seeded streams at a time bring what each brings alone."""
    asks = [
        {"prompt": f"prompt number {i}", "temperature": 1.0, "seed": i, **SHORT} for i in range(8)
    ]
    async with live(toy) as server:
        alone = [content(await server.stream(TEXT, **ask)) for ask in asks]
        together = await asyncio.gather(*(server.stream(TEXT, **ask) for ask in asks))
    assert [content(chunks) for chunks in together] == alone
    assert len(set(alone)) == 8


async def test_models_are_listed_and_shown(toy):
    """The list, the one by its id with a slash, and 404 for another."""
    async with live(toy) as server:
        async with server.client.get("/v1/models") as response:
            listed = await response.json()
        async with server.client.get(f"/v1/models/{CARD.id}") as response:
            shown = await response.json()
        async with server.client.get("/v1/models/other") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "model_not_found"
    assert listed == {"object": "list", "data": [shown]}
    assert (shown["id"], shown["object"], shown["owned_by"]) == (CARD.id, "model", "thermocline")
    assert shown["meta"] == {
        "n_ctx": 1 << 15,
        "n_ctx_train": 1 << 15,
        "n_params": 123,
        "size": 456,
        "n_vocab": 264,
        "n_layer": 2,
        "n_expert": 8,
        "n_expert_used": 2,
        "quant": "F32",
    }


async def test_every_response_carries_its_headers(toy):
    """A request id of its own, our name, and what keeps proxies from holding a stream back."""
    async with live(toy) as server:
        async with server.client.head("/health") as first, server.client.get("/nothing") as second:
            ids = {first.headers["X-Request-Id"], second.headers["X-Request-Id"]}
            assert len(ids) == 2
            assert first.headers["Server"] == f"thermocline/{__version__}"
        fields = {"messages": HELLO, "stream": True, **SHORT}
        async with server.client.post(CHAT, json=fields) as response:
            await response.read()
            assert response.headers["Cache-Control"] == "no-cache"
            assert response.headers["X-Accel-Buffering"] == "no"
            assert response.headers["X-Request-Id"]
            assert not any(name.startswith("Access-Control") for name in response.headers)
