"""The official Python clients against a live server: what they send, and that their types take every answer."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path

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
            embedded = await client.embed(MODEL, [QUESTION, "x"])
            assert embedded.prompt_eval_count == sum(
                [len(await server.engine.encode(text)) for text in (QUESTION, "x")]
            )
            assert math.hypot(*embedded.embeddings[0]) == pytest.approx(1)
            old = await client.embeddings(MODEL, QUESTION)
            assert old.embedding == embedded.embeddings[0]
            short = (await client.embed(MODEL, QUESTION, dimensions=8)).embeddings[0]
            assert (len(short), math.hypot(*short)) == (8, pytest.approx(1))
            assert (await client.embed(MODEL, "")).embeddings == []
            for call, status in (
                (client.embed("other", "x"), 404),
                (client.embed(MODEL, "x" * 99999, truncate=False), 400),
                (client.chat("other", ASKED), 404),
                (client.generate(MODEL, "x", template="y"), 400),
            ):
                with pytest.raises(ollama.ResponseError) as caught:
                    await call
                assert caught.value.status_code == status
                assert not caught.value.error.startswith("{")


SCHEMA = {
    "type": "object",
    "properties": {
        "rank": {"type": "integer", "minimum": 0, "maximum": 9},
        "kind": {"enum": ["hot", "cold"]},
    },
    "required": ["rank", "kind"],
    "additionalProperties": False,
}


def check_reply(reply):
    """The object has the schema's form."""
    assert set(reply) == {"rank", "kind"}
    assert reply["rank"] in range(10)
    assert reply["kind"] in ("hot", "cold")


@pytest.mark.slow
async def test_openai_responses_hold_to_tools_and_schemas(thinker):
    """On random weights: a required tool and a schema give valid objects; reasoning has its own item."""
    tool = {"type": "function", "name": "place", "parameters": SCHEMA, "strict": True}
    form = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
    asked = {"model": MODEL, "input": QUESTION, "max_output_tokens": 200}
    quiet = {"reasoning": {"effort": "none"}}
    async with (
        live(thinker) as server,
        openai.AsyncOpenAI(
            base_url=f"{server.server.url}/v1", api_key="x", max_retries=0
        ) as client,
    ):
        for choice in ("required", {"type": "function", "name": "place"}):
            called = await client.responses.create(
                tools=[tool], tool_choice=choice, parallel_tool_calls=False, **asked, **quiet
            )
            (call,) = called.output
            assert (call.type, call.name) == ("function_call", "place")
            check_reply(json.loads(call.arguments))
        async with client.responses.stream(
            tools=[tool], tool_choice="required", **asked, **quiet
        ) as stream:
            final = await stream.get_final_response()
        check_reply(json.loads(final.output[0].arguments))
        formed = await client.responses.create(text={"format": form}, **asked, **quiet)
        check_reply(json.loads(formed.output_text))
        thought = await client.responses.create(
            reasoning={"effort": "low"}, **asked | {"max_output_tokens": 8}
        )
        (item,) = thought.output
        assert (item.type, item.status, thought.status) == ("reasoning", "incomplete", "incomplete")
        assert thought.usage.output_tokens_details.reasoning_tokens == 8
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(tool_choice="required", **asked)


@pytest.mark.slow
async def test_anthropic_messages_think_and_call(thinker):
    """On random weights: thinking within its budget, then the tool, whole and streamed; or a schema."""
    asked = {"model": MODEL, "messages": ASKED, "max_tokens": 300}
    tools = [{"name": "place", "input_schema": SCHEMA}]
    one = {"type": "any", "disable_parallel_tool_use": True}
    thinking = {"type": "enabled", "budget_tokens": 6}
    async with (
        live(thinker) as server,
        anthropic.AsyncAnthropic(base_url=server.server.url, api_key="x", max_retries=0) as client,
    ):
        fields = {"tools": tools, "tool_choice": one, "thinking": thinking}
        whole = await client.messages.create(**asked, **fields)
        async with client.messages.stream(**asked, **fields) as stream:
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            assert message.stop_reason == "tool_use"
            assert [block.type for block in message.content] == ["thinking", "tool_use"]
            check_reply(message.content[1].input)
        assert whole.content[0].signature == streamed.content[0].signature
        result = {"type": "tool_result", "tool_use_id": whole.content[1].id, "content": "done"}
        turns = [*ASKED, {"role": "assistant", "content": whole.content}]
        turns.append({"role": "user", "content": [result]})
        named = {"tools": tools, "tool_choice": {"type": "tool", "name": "place"}}
        again = await client.messages.create(**asked | {"messages": turns}, **named)
        assert again.content[0].type == "tool_use"
        form = {"format": {"type": "json_schema", "schema": SCHEMA}}
        formed = await client.messages.create(output_config=form, **asked)
        check_reply(json.loads(formed.content[0].text))


@pytest.mark.slow
async def test_ollama_holds_to_formats(thinker):
    """On random weights: a schema gives a valid object, and thinking is apart from the answer."""
    async with live(thinker) as server, ollama.AsyncClient(host=server.server.url) as client:
        formed = await client.chat(MODEL, ASKED, format=SCHEMA, think=False)
        check_reply(json.loads(formed.message.content))
        made = await client.generate(MODEL, QUESTION, format=SCHEMA, think=False)
        check_reply(json.loads(made.response))
        thought = await client.chat(MODEL, ASKED, think=True, options={"num_predict": 8})
        assert thought.message.thinking
        assert not thought.message.content
        assert {"tools", "thinking"} <= set((await client.show(MODEL)).capabilities)
        tool = {"type": "function", "function": {"name": "place", "parameters": SCHEMA}}
        offered = await client.chat(
            MODEL, ASKED, tools=[tool], think=False, options={"num_predict": 8}
        )
        assert offered.done_reason in ("stop", "length")


@pytest.mark.slow
async def test_the_example_of_the_readme(capsys):
    """As it stands there, but for the address and the model's name."""
    page = (Path(__file__).parents[2] / "README.md").read_text()
    (source,) = re.findall(r"```python\n(from openai.*?)```", page, re.DOTALL)
    async with live(DEMO_MODEL_PATH) as server:
        source = source.replace("http://127.0.0.1:7717", server.server.url)
        source = source.replace("demo-moe", MODEL)
        await asyncio.to_thread(exec, source, {})
    assert "expert" in capsys.readouterr().out
