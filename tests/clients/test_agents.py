"""langchain-openai and pydantic-ai: text, streams, tools and typed outputs over every interface that they speak."""

from __future__ import annotations

import pytest

pytest.importorskip("langchain_openai")
pytest.importorskip("pydantic_ai")

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

pytestmark = pytest.mark.clients

QUESTION = "What is thermocline?"
SCHEMA = {
    "title": "reply",
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(params=[False, True], ids=["chats", "responses"])
def chat(request, url, model):
    """A chat model over either of OpenAI's interfaces."""
    return ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        model=model,
        max_tokens=100,
        max_retries=0,
        use_responses_api=request.param,
    )


def test_invoke_and_stream(chat):
    """The streamed text is the whole one, and the counts are there."""
    whole = chat.invoke(QUESTION)
    assert "mixture-of-experts" in whole.text
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(piece.text for piece in chat.stream(QUESTION)) == whole.text


def test_a_tool_is_called(chat):
    """A required tool is called with arguments of its schema."""
    tool = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
    bound = chat.bind_tools([{"type": "function", "function": tool}], tool_choice="required")
    (call,) = bound.invoke(QUESTION).tool_calls
    assert call["name"] == "add"
    assert 0 <= call["args"]["a"] <= 9


def test_output_has_its_schema(chat):
    """with_structured_output gives the object."""
    reply = chat.with_structured_output(SCHEMA, method="json_schema").invoke(QUESTION)
    assert 0 <= reply["a"] <= 9


class Reply(BaseModel):
    """A form for answers."""

    rank: int = Field(ge=0, le=9)
    is_known: bool


@pytest.fixture(params=["chats", "responses", "anthropic"])
def agent_model(request, url, model):
    """pydantic-ai's model over one of the interfaces."""
    if request.param == "anthropic":
        return AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key="none"))
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    kind = OpenAIChatModel if request.param == "chats" else OpenAIResponsesModel
    return kind(model, provider=provider)


async def test_an_agent_answers(agent_model):
    """Text, whole and streamed."""
    agent = Agent(agent_model, model_settings={"max_tokens": 100})
    whole = (await agent.run(QUESTION)).output
    assert "mixture-of-experts" in whole
    async with agent.run_stream(QUESTION) as run:
        assert await run.get_output() == whole


async def test_an_agent_s_output_is_typed(agent_model):
    """By a tool that has to be called."""
    agent = Agent(agent_model, output_type=ToolOutput(Reply), model_settings={"max_tokens": 100})
    assert isinstance((await agent.run(QUESTION)).output, Reply)


async def test_an_agent_s_native_output_is_typed(agent_model):
    """By the format of the answer."""
    if isinstance(agent_model, AnthropicModel):
        pytest.skip("pydantic-ai asks only models that it knows by name for it")
    agent = Agent(agent_model, output_type=NativeOutput(Reply), model_settings={"max_tokens": 100})
    assert isinstance((await agent.run(QUESTION)).output, Reply)
