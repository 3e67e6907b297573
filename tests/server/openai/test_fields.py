"""What single fields of OpenAI's requests do, beyond sampling: shapes, echoes, counts and refusals."""

from __future__ import annotations

import asyncio
import base64
import io
import json

import numpy as np
import pytest

from tests.server.live import CHAT, HELLO, TEXT, content, live
from thermocline import SamplingParams

SHORT = {"max_tokens": 6, "ignore_eos": True}


def routing_of(choice):
    """Return the array in a choice's routed_experts."""
    return np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)


@pytest.mark.slow
async def test_scores_are_the_engine_s(toy):
    """Echoed log-probabilities are those of the raw logits after each token before."""
    async with live(toy) as server:
        ids = await server.engine.encode("hello there")
        rows = [row async for part in server.engine.score(ids) for row in part.logits]
        status, body = await server.post(
            TEXT, prompt="hello there", echo=True, logprobs=1, max_tokens=0
        )
    assert status == 200, body
    (choice,) = body["choices"]
    assert (choice["text"], body["usage"]["completion_tokens"]) == ("hello there", 0)
    scores = choice["logprobs"]["token_logprobs"]
    expected = [
        float(row[after] - np.log(np.exp(row.astype(np.float64)).sum()))
        for row, after in zip(rows, ids[1:], strict=False)
    ]
    assert scores[0] is None
    assert scores[1:] == pytest.approx(expected, abs=1e-5)
    lengths = [len(token) for token in choice["logprobs"]["tokens"]]
    assert choice["logprobs"]["text_offset"] == [sum(lengths[:i]) for i in range(len(lengths))]


@pytest.mark.slow
async def test_an_echo_precedes_the_answer_in_every_choice(toy):
    """With and without scores, whole and streamed, for text and token ids, n times."""
    async with live(toy) as server:
        for prompt in ("hello", [104, 101, 108, 108, 111]):
            for logprobs in ({}, {"logprobs": 1}):
                fields = {"prompt": prompt, "echo": True, "n": 2, "seed": 1, **logprobs, **SHORT}
                status, body = await server.post(TEXT, temperature=1.0, **fields)
                assert status == 200, body
                chunks = await server.stream(TEXT, temperature=1.0, **fields)
                for index, choice in enumerate(body["choices"]):
                    parts = [
                        part
                        for chunk in chunks
                        for part in chunk["choices"]
                        if part["index"] == index
                    ]
                    assert choice["text"].startswith("hello")
                    assert "".join(part["text"] for part in parts) == choice["text"]
                    if logprobs:
                        assert len(choice["logprobs"]["tokens"]) == 5 + 6


@pytest.mark.slow
async def test_routing_is_sent_to_those_who_ask(toy):
    """One row for each token but the last, whole prompts included, equal streamed and whole, in any batch."""
    fields = {"prompt": "hello, what is this", "return_routed_experts": True, **SHORT}
    async with live(toy) as server:
        status, body = await server.post(TEXT, **fields)
        assert status == 200, body
        chunks = await server.stream(TEXT, **fields)
        _, plain = await server.post(TEXT, prompt="hello", **SHORT)
        ids = await server.engine.encode("hello, what is this")
        output = [
            token_id
            async for event in server.engine.generate(
                ids, SamplingParams(max_tokens=6, ignore_eos=True)
            )
            for token_id in event.token_ids
        ]
        before = server.engine.statistics().heat
        _, again = await server.post(TEXT, **fields | {"prompt": ids + output, "max_tokens": 1})
        counted = server.engine.statistics().heat - before
    whole = routing_of(body["choices"][0])
    assert whole.shape == (len(ids) + 5, 2, 2)
    assert (whole == routing_of(chunks[-1]["choices"][0])).all()
    assert "routed_experts" not in plain["choices"][0]
    rows = routing_of(again["choices"][0])
    for layer in range(2):
        chosen = np.bincount(rows[:, layer].reshape(-1), minlength=8)
        assert (chosen == counted[layer]).all()


@pytest.mark.slow
async def test_cached_tokens_are_counted_unless_refused(toy):
    """The second request finds the prompt's full blocks; a salt of its own, or no cache, finds none."""
    prompt = list(range(65, 105))
    async with live(toy) as server:

        async def cached(**fields):
            _, body = await server.post(TEXT, prompt=prompt, **SHORT, **fields)
            usage = body["usage"]["prompt_tokens_details"]["cached_tokens"]
            timings = body["timings"]
            assert timings["cache_n"] == usage
            assert timings["cache_n"] + timings["prompt_n"] == len(prompt)
            return usage

        assert [await cached(), await cached()] == [0, 32]
        chunks = await server.stream(
            TEXT, prompt=prompt, stream_options={"continuous_usage_stats": True}, **SHORT
        )
        counted = [c["usage"]["prompt_tokens_details"] for c in chunks if c.get("usage")]
        assert counted == [{"cached_tokens": 32}] * len(counted)
        assert counted
        assert await cached(cache_prompt=False) == 0
        assert [await cached(cache_salt="x"), await cached(cache_salt="x")] == [0, 32]


@pytest.mark.slow
async def test_progress_and_counts_come_while_the_answer_does(toy):
    """The prompt's progress ends at its length; counts and times grow with each token."""
    async with live(toy) as server:
        chunks = await server.stream(
            CHAT,
            messages=HELLO,
            return_progress=True,
            timings_per_token=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            **SHORT,
        )
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert progress[-1]["processed"] == progress[-1]["total"] == 22
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    timed = [c["timings"]["predicted_n"] for c in chunks if "timings" in c and c["choices"]]
    assert timed == sorted(timed)


@pytest.mark.slow
async def test_an_assistant_s_last_message_is_gone_on_with(toy):
    """It is the end of the prompt, and with echo the beginning of the answer, unless another is asked for."""
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    async with live(toy) as server:
        opened = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        _, body = await server.post("/apply-template", messages=messages)
        assert body["prompt"] == opened + "Well, "
        _, body = await server.post("/apply-template", messages=HELLO, add_generation_prompt=False)
        assert body["prompt"] == opened.removesuffix("<|im_start|>assistant\n")
        _, body = await server.post(
            "/apply-template", messages=messages, continue_final_message=False
        )
        assert body["prompt"] == f"{opened}Well, <|im_end|>\n<|im_start|>assistant\n"
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        called = [*HELLO, {"role": "assistant", "content": "Well, ", "tool_calls": [call]}]
        _, body = await server.post("/apply-template", messages=called)
        assert body["prompt"].endswith("<|im_end|>\n<|im_start|>assistant\n")
        for path, fields in (("/apply-template", {}), ("/v1/messages", {"max_tokens": 2})):
            status, body = await server.post(path, messages=messages[1:], **fields)
            assert (status, "before it" in body["error"]["message"]) == (400, True)
        body = await server.chat(messages=messages, echo=True, **SHORT)
        assert body["choices"][0]["message"]["content"].startswith("Well, ")
        chunks = await server.stream(CHAT, messages=messages, echo=True, **SHORT)
        assert content(chunks) == body["choices"][0]["message"]["content"]


@pytest.mark.slow
async def test_words_that_the_answer_may_not_hold(speller):
    """A bad word never comes; a stop string is kept if asked for; control tokens show if asked for."""
    async with live(speller) as server:
        fields = {"prompt": [0x80], "max_tokens": 9}
        _, body = await server.post(TEXT, **fields)
        assert "é" in body["choices"][0]["text"]
        _, body = await server.post(TEXT, bad_words=["é"], **fields)
        assert "é" not in body["choices"][0]["text"]
        stop = {"stop": "€", "include_stop_str_in_output": True}
        _, body = await server.post(TEXT, **stop, **fields)
        assert body["choices"][0]["text"] == "é€"
        control = {"logit_bias": {"262": 100}, "max_tokens": 1, "prompt": [0x80]}
        for skip, text in ((None, ""), (False, "<|im_start|>")):
            _, body = await server.post(TEXT, skip_special_tokens=skip, **control)
            assert body["choices"][0]["text"] == text


@pytest.mark.slow
async def test_what_was_ignored_is_told(toy):
    """Unknown fields and those without effect are listed; strict servers refuse the unknown."""
    extra = {"nobody_knows": 1, "user": "me", "store": None}
    async with live(toy) as server:
        body = await server.chat(**extra, **SHORT)
        chunks = await server.stream(CHAT, messages=HELLO, **extra, **SHORT)
        plain = await server.chat(**SHORT)
    for found in (body, chunks[-1]):
        assert found["thermocline"] == {"ignored_params": ["nobody_knows", "user"]}
    assert "thermocline" not in plain
    async with live(toy, strict_params=True) as server:
        await server.chat(user="me", **SHORT)
        status, body = await server.post(CHAT, messages=HELLO, **extra)
        assert (status, body["error"]["param"]) == (400, "nobody_knows")


@pytest.mark.slow
async def test_what_a_server_must_be_told_to_do(toy):
    """Other names of the model and templates of the client's are for servers that were started so."""
    template = {"chat_template": "{{ messages[0].content }}!", "messages": HELLO}
    async with live(toy) as server:
        status, body = await server.post(CHAT, model="other", messages=HELLO)
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        status, body = await server.post(CHAT, **template)
        assert (status, body["error"]["param"]) == (400, "chat_template")
    async with live(toy, any_model=True, trust_request_chat_template=True) as server:
        await server.chat(model="other", **SHORT)
        _, body = await server.post("/apply-template", **template)
        assert body["prompt"] == "hello!"


@pytest.mark.slow
async def test_a_trace_id_finds_the_requests_in_the_last_trace(toy):
    """While a timeline is recorded it is the number of each request's span; else trace is ignored."""
    async with live(toy) as server:
        body = await server.chat(trace=True, **SHORT)
        assert body["thermocline"] == {"ignored_params": ["trace"]}
        await server.post("/trace/start")
        await server.chat(**SHORT)
        body = await server.chat(trace=True, n=2, **SHORT)
        *_, last = await server.stream(CHAT, messages=HELLO, trace=True, **SHORT)
        await server.post("/trace/stop")
        async with server.client.get("/trace/last") as response:
            events = (await response.json())["traceEvents"]
    spans = {
        event["args"]["request"]
        for event in events
        if event["name"] == "request" and event["ph"] == "b"
    }
    asked = f"{body['thermocline']['trace_id']} {last['thermocline']['trace_id']}"
    asked_ids = {int(number) for number in asked.split()}
    assert len(asked_ids) == 3
    assert len(spans) == 4
    assert asked_ids < spans


@pytest.mark.slow
async def test_token_ids_are_sent_to_those_who_ask(toy):
    """Those of the answer, whole and piece by piece."""
    fields = {"return_token_ids": True, **SHORT}
    async with live(toy) as server:
        body = await server.chat(**fields)
        chunks = await server.stream(CHAT, messages=HELLO, **fields)
    ids = body["choices"][0]["token_ids"]
    assert len(ids) == 6
    streamed = [t for c in chunks for choice in c["choices"] for t in choice.get("token_ids", [])]
    assert streamed == ids


@pytest.mark.slow
async def test_texts_become_tokens_and_come_back(toy):
    """Both peers' names of the fields, pieces that are no text, and chats."""
    async with live(toy) as server:
        for start in ("", "/v1"):
            _, body = await server.post(f"{start}/tokenize", content="é!", with_pieces=True)
            assert [token["piece"] for token in body["tokens"]] == [[195], [169], "!"]
            _, body = await server.post(f"{start}/tokenize", prompt="é!")
            assert (body["tokens"], body["count"]) == ([195, 169, 33], 3)
            _, body = await server.post(f"{start}/detokenize", tokens=[195, 169, 33])
            assert body == {"content": "é!", "prompt": "é!"}
        _, body = await server.post("/tokenize", messages=HELLO)
        assert body["tokens"] == await server.engine.encode_chat(HELLO)
        for path, param, fields in (
            ("/tokenize", "content", {}),
            ("/detokenize", "tokens", {"tokens": [10**6]}),
            ("/apply-template", "messages", {"messages": []}),
        ):
            status, body = await server.post(path, **fields)
            assert (status, body["error"]["type"]) == (400, "invalid_request_error"), path
            assert body["error"]["param"] == param


@pytest.mark.slow
async def test_long_texts_do_not_hold_the_loop(toy):
    """While a quarter of a megabyte becomes tokens, pieces and text again, the server still answers others."""
    loop = asyncio.get_running_loop()
    async with live(toy) as server:
        ids = [104, 101, 32] * 20_000
        for path, fields in (
            ("/tokenize", {"content": "hello, world. " * 20_000, "with_pieces": True}),
            ("/detokenize", {"tokens": ids}),
            (CHAT, {"messages": [{"role": "user", "content": "hello, world. " * 20_000}]}),
        ):
            begun_s = last_s = loop.time()
            longest_s = 0.0
            task = asyncio.create_task(server.post(path, **fields))
            while not task.done():
                async with server.client.get("/health"):
                    longest_s = max(longest_s, loop.time() - last_s)
                    last_s = loop.time()
            await task
            assert longest_s < (loop.time() - begun_s) / 2, path


async def test_the_server_tells_of_itself(toy):
    """Version, properties and places, as llama-server's clients read them."""
    async with live(toy) as server:
        found = {}
        for path in ("/version", "/props", "/slots", "/tokenizer_info"):
            async with server.client.get(path) as response:
                assert response.status == 200
                found[path] = json.loads(await response.read())
        assert found["/props"]["total_slots"] == len(found["/slots"])
        assert "<|im_start|>" in found["/props"]["chat_template"]
        assert not any(slot["is_processing"] for slot in found["/slots"])
