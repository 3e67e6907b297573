"""instructor: answers as objects of a type, by tool and by format."""

from __future__ import annotations

import pytest

pytest.importorskip("instructor")

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

pytestmark = pytest.mark.clients

QUESTION = "What is thermocline?"


class Reply(BaseModel):
    """A form for answers."""

    # Otherwise the schema lets a small model go on inventing fields.
    model_config = ConfigDict(extra="forbid")
    rank: int = Field(ge=0, le=9)
    is_known: bool


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
