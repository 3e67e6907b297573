"""The form into which every interface translates its chats. Knows no interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thermocline.sampling.params import SamplingParams
    from thermocline.server.core.bodies import JsonObject
    from thermocline.server.core.structured import FormatFields


@dataclass(frozen=True, slots=True)
class NormalizedChat:
    """A chat to answer. messages: as in OpenAI's chats; format: the fields that shape the answer.

    continues_final: the last message is the beginning of the answer. speculate: see `RequestOptions`.
    """

    messages: list[JsonObject]
    params: SamplingParams
    format: FormatFields
    continues_final: bool = False
    speculate: tuple[str, ...] | None = None


def ends_with_answer(messages: list[JsonObject]) -> bool:
    """Whether the last message is text of the assistant, which the model is to continue."""
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and not last.get("tool_calls")
