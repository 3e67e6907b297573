"""litellm: the same question through OpenAI's, Anthropic's and Ollama's interfaces."""

from __future__ import annotations

import pytest

pytest.importorskip("litellm")

import litellm

pytestmark = pytest.mark.clients

ASKED = [{"role": "user", "content": "What is thermocline?"}]


def fields(provider, url, model):
    base = f"{url}/v1" if provider == "openai" else url
    return {"model": f"{provider}/{model}", "api_base": base, "api_key": "none", "max_tokens": 100}


@pytest.mark.parametrize("provider", ["openai", "anthropic", "ollama_chat"])
def test_completion_and_stream(provider, url, model):
    """The streamed text is the whole one, whatever the interface."""
    asked = fields(provider, url, model)
    whole = litellm.completion(messages=ASKED, num_retries=0, **asked)
    text = whole.choices[0].message.content
    assert "mixture-of-experts" in text
    assert whole.choices[0].finish_reason == "stop"
    pieces = litellm.completion(messages=ASKED, stream=True, num_retries=0, **asked)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_a_tool_is_called(provider, url, model):
    """A required tool is called with arguments of its schema."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    asked = fields(provider, url, model)
    whole = litellm.completion(messages=ASKED, tools=[tool], tool_choice="required", **asked)
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.name == "add"
    assert whole.choices[0].finish_reason == "tool_calls"


def test_responses(url, model):
    """litellm's own types take a response."""
    asked = fields("openai", url, model)
    del asked["max_tokens"]
    answer = litellm.responses(input=ASKED, **asked)
    assert "mixture-of-experts" in answer.output[0].content[0].text


def test_errors_are_typed(url):
    """A model that is not there is NotFoundError."""
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=ASKED, num_retries=0, **fields("openai", url, "other"))
