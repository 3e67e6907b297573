"""pydantic-ai and instructor: answers as objects of a type, over every interface that they speak."""

from __future__ import annotations

import pytest

pytest.importorskip("instructor")
pytest.importorskip("pydantic_ai")

import instructor
import openai
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

pytestmark = pytest.mark.clients

QUESTION = "What is thermocline?"


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


@pytest.mark.parametrize(
    "mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA], ids=lambda mode: mode.value
)
def test_instructor(mode, url, model):
    """By tool or by format."""
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode
    )
    reply = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        response_model=Reply,
        max_tokens=100,
        max_retries=0,
    )
    assert isinstance(reply, Reply)
