"""The official OpenAI client against chat completions, completions and models."""

from __future__ import annotations

from contextlib import asynccontextmanager

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion

from tests.server.live import CARD, live
from thermocline.demo import DEMO_MODEL_PATH

MODEL = CARD.id
ASKED = [{"role": "user", "content": "What is thermocline?"}]


@asynccontextmanager
async def client_of(path, **settings):
    """Serve the model at `path`; the client raises at once, and checks nothing by itself."""
    async with (
        live(path, **settings) as server,
        openai.AsyncOpenAI(
            base_url=f"{server.server.url}/v1", api_key="x", max_retries=0
        ) as client,
    ):
        yield client


@pytest.mark.slow
async def test_chats_whole_and_streamed():
    """Both bring one text; every body passes the client's own types, strictly."""
    async with client_of(DEMO_MODEL_PATH) as client:
        create = client.chat.completions.create
        whole = await create(model=MODEL, messages=ASKED, temperature=0, max_tokens=60)
        ChatCompletion.model_validate(whole.to_dict(), strict=True)
        stream = await create(
            model=MODEL,
            messages=ASKED,
            temperature=0,
            max_tokens=60,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk.to_dict(), strict=True)
        async with client.chat.completions.stream(model=MODEL, messages=ASKED) as helper:
            final = await helper.get_final_completion()
    text = whole.choices[0].message.content
    assert "mixture-of-experts" in text
    deltas = [choice.delta.content for chunk in chunks for choice in chunk.choices]
    assert "".join(delta or "" for delta in deltas) == text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].message.content.startswith(text)


@pytest.mark.slow
async def test_several_seeded_answers(toy):
    """n answers differ, come again with the seed, and the i-th is the one of seed + i."""
    async with client_of(toy) as client:

        async def texts(n, seed):
            answer = await client.chat.completions.create(
                model=MODEL, messages=ASKED, n=n, seed=seed, temperature=1.5, max_tokens=8
            )
            assert [choice.index for choice in answer.choices] == list(range(n))
            assert answer.usage.completion_tokens == 8 * n
            return [choice.message.content for choice in answer.choices]

        three = await texts(3, 5)
        assert len(set(three)) == 3
        assert await texts(3, 5) == three
        assert [(await texts(1, 5 + i))[0] for i in range(3)] == three


@pytest.mark.slow
async def test_stops_and_log_probabilities():
    """A stop string ends the text before it; log-probabilities are one entry for each token."""
    async with client_of(DEMO_MODEL_PATH) as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=ASKED,
            temperature=0,
            max_tokens=40,
            stop=["experts"],
            logprobs=True,
            top_logprobs=2,
        )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.message.content
    assert "experts" not in choice.message.content
    entries = choice.logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


@pytest.mark.slow
async def test_completions_and_their_scores():
    """Prompts of both kinds, echoed and scored, whole and streamed alike."""
    async with client_of(DEMO_MODEL_PATH) as client:
        create = client.completions.create
        scored = await create(
            model=MODEL, prompt=["The router", [5, 6, 7]], echo=True, logprobs=2, max_tokens=0
        )
        plain = await create(model=MODEL, prompt="The router", logprobs=2, max_tokens=3)
        Completion.model_validate(plain.to_dict(), strict=True)
        assert scored.choices[0].text == "The router"
        for choice in scored.choices:
            assert choice.logprobs.token_logprobs[0] is None
            assert max(choice.logprobs.token_logprobs[1:]) <= 0
        stream = await create(
            model=MODEL, prompt="The router", echo=True, logprobs=2, max_tokens=3, stream=True
        )
        parts = [part.choices[0] async for part in stream if part.choices]
        whole = await create(model=MODEL, prompt="The router", echo=True, logprobs=2, max_tokens=3)
    assert "".join(part.text for part in parts) == whole.choices[0].text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [
            value for part in parts if part.logprobs for value in getattr(part.logprobs, name)
        ]
        assert streamed == getattr(whole.choices[0].logprobs, name)


@pytest.mark.slow
async def test_models_and_typed_errors(toy):
    """Each failure is the client's own exception for it, with the field at fault."""
    async with client_of(toy) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=ASKED)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model=MODEL, messages=ASKED, temperature=3)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.InternalServerError) as missing_part:
            await client.embeddings.create(model=MODEL, input="x")
        assert missing_part.value.status_code == 501
