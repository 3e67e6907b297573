"""The official Python clients against a live server: what they send, and that their types take every answer."""

from __future__ import annotations

import anthropic
import ollama
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.server.live import CARD, live
from thermocline.demo import DEMO_MODEL_PATH

QUESTION = "What is thermocline?"
MODEL = CARD.id
ASKED = [{"role": "user", "content": QUESTION}]
EVENT = TypeAdapter(ResponseStreamEvent)


class Reply(BaseModel):
    """A form for answers."""

    subject: str
    is_known: bool


@pytest.mark.slow
async def test_openai_responses():
    """create, stream and the typed errors; every event passes the client's own types, strictly."""
    async with (
        live(DEMO_MODEL_PATH) as server,
        openai.AsyncOpenAI(
            base_url=f"{server.server.url}/v1", api_key="x", max_retries=0
        ) as client,
    ):
        whole = await client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=100)
        assert whole.status == "completed"
        assert "mixture-of-experts" in whole.output_text
        async with client.responses.stream(model=MODEL, input=ASKED) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == whole.output_text
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == (
            whole.output_text
        )
        raw = await client.responses.create(
            model=MODEL, input=ASKED, stream=True, max_output_tokens=3
        )
        kinds = []
        async for event in raw:
            EVENT.validate_python(event.to_dict(), strict=True)
            kinds.append(event.type)
        assert kinds[-1] == "response.incomplete"
        follow = [*ASKED, *[item.to_dict() for item in whole.output], *ASKED]
        again = await client.responses.create(model=MODEL, input=follow, max_output_tokens=5)
        Response.model_validate(again.to_dict(), strict=True)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
        assert caught.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="other", input="x")


@pytest.mark.slow
async def test_anthropic_messages():
    """create, the stream helper, count_tokens, stop sequences and the typed errors."""
    async with (
        live(DEMO_MODEL_PATH) as server,
        anthropic.AsyncAnthropic(base_url=server.server.url, api_key="x", max_retries=0) as client,
    ):
        asked = {"model": MODEL, "messages": ASKED}
        whole = await client.messages.create(max_tokens=100, **asked)
        assert (whole.stop_reason, whole.content[0].type) == ("end_turn", "text")
        text = whole.content[0].text
        assert "mixture-of-experts" in text
        async with client.messages.stream(max_tokens=100, **asked) as stream:
            assert "".join([piece async for piece in stream.text_stream]) == text
            final = await stream.get_final_message()
        assert final.stop_reason == "end_turn"
        assert final.usage.output_tokens == whole.usage.output_tokens
        counted = await client.messages.count_tokens(**asked)
        assert counted.input_tokens == (
            final.usage.input_tokens + final.usage.cache_read_input_tokens
        )
        stopped = await client.messages.create(
            max_tokens=100, stop_sequences=["mixture-of-experts"], **asked
        )
        assert (stopped.stop_reason, stopped.stop_sequence) == (
            "stop_sequence",
            "mixture-of-experts",
        )
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(max_tokens=5, extra_body={"temperature": 9}, **asked)
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(max_tokens=5, model="other", messages=ASKED)


@pytest.mark.slow
async def test_ollama_chat_and_generate():
    """chat, generate, list, show, ps, streamed and whole, and the typed errors."""
    async with live(DEMO_MODEL_PATH) as server:
        client = ollama.AsyncClient(host=server.server.url)
        async with client:
            whole = await client.chat(model=MODEL, messages=ASKED)
            assert whole.done_reason == "stop"
            text = whole.message.content
            assert "mixture-of-experts" in text
            lines = [line async for line in await client.chat(MODEL, ASKED, stream=True)]
            assert "".join(line.message.content for line in lines) == text
            assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
            assert lines[-1].eval_count == whole.eval_count
            made = await client.generate(MODEL, QUESTION, options={"num_predict": 3})
            assert (made.done_reason, made.eval_count) == ("length", 3)
            assert text.startswith(made.response)
            lines = [line async for line in await client.generate(MODEL, QUESTION, stream=True)]
            assert "".join(line.response for line in lines) == text
            raw = await client.generate(MODEL, "A hot expert", raw=True, options={"num_predict": 3})
            assert raw.prompt_eval_count == len(await server.engine.encode("A hot expert"))
            (listed,) = (await client.list()).models
            assert listed.model == MODEL
            shown = await client.show(MODEL)
            assert "completion" in shown.capabilities
            architecture = shown.modelinfo["general.architecture"]
            assert shown.modelinfo[f"{architecture}.expert_count"] > 1
            (loaded,) = (await client.ps()).models
            assert loaded.name == MODEL
            for call, status in (
                (client.embed(MODEL, "x"), 501),
                (client.embeddings(MODEL, "x"), 501),
                (client.chat("other", ASKED), 404),
                (client.generate(MODEL, "x", template="y"), 400),
            ):
                with pytest.raises(ollama.ResponseError) as caught:
                    await call
                assert caught.value.status_code == status
                assert not caught.value.error.startswith("{")
