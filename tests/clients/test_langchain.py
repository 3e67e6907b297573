"""langchain-openai: chats, streams, tools, structured output, over chats and over responses."""

from __future__ import annotations

import pytest

pytest.importorskip("langchain_openai")

from langchain_openai import ChatOpenAI

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
