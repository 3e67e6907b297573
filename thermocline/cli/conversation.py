"""A conversation with a model: what is said again to it each turn, and what is dropped when the context is full.

Knows no keyboard and no command.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thermocline.cli.console import AnswerWriter, MarkdownWriter, hint, note
from thermocline.cli.prompt import with_system
from thermocline.cli.session import CollectedAnswer, hint_speed, stream_answer
from thermocline.cli.spoken import spoken
from thermocline.errors import PromptTooLongError, RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thermocline.cli.spoken import Spoken
    from thermocline.engine.api import Engine
    from thermocline.messages import Timings
    from thermocline.sampling.params import SamplingParams


@dataclass(slots=True)
class ChatSession:
    """The turns so far, and how to take the next one.

    thinks: whether the model is to reason; None leaves it to the model. variables: of the template, which say so.
    is_styled: whether answers are shown as Markdown.
    """

    engine: Engine
    params: SamplingParams
    system: str | None
    thinks: bool | None = None
    is_styled: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)
    timings: Timings | None = None

    @property
    def variables(self) -> Mapping[str, object]:
        """The template's variables that switch reasoning. Raises ConfigError for a template without a switch."""
        from thermocline.cli.prompt import thinking_variables

        return thinking_variables(self.engine, self.thinks)

    def reset(self) -> None:
        """Forget all turns."""
        self.messages.clear()
        self.timings = None

    async def take_turn(self, text: str) -> None:
        """Answer `text`, streaming to stdout. A turn that fails is forgotten; a stopped one is kept.

        Raises RequestError for a message that can not be answered at all.
        """
        await self._answer([*self.messages, {"role": "user", "content": text}])

    async def retry(self) -> None:
        """Answer the last message again. Raises RequestError where there is none."""
        number = len(self.messages)
        while number and self.messages[number - 1]["role"] != "user":
            number -= 1
        if not number:
            raise RequestError("there is nothing to retry: say something first")
        if self.params.is_greedy or self.params.seed is not None:
            fix = "/set temperature 0.8" if self.params.is_greedy else "/set seed default"
            hint(f"[with these settings the answer comes out the same: {fix}]")
        await self._answer(self.messages[:number])

    async def count_tokens(self) -> int:
        """Return how many tokens the conversation has, as the next prompt begins with them."""
        return len(await self._encode(self.messages)) if self.messages or self.system else 0

    async def _answer(self, messages: list[dict[str, str]]) -> None:
        """Answer the last of `messages`, which become the conversation's."""
        import asyncio

        messages = list(messages)
        prompt_ids = await self._fitting_prompt(messages)
        answer = CollectedAnswer()
        writer = MarkdownWriter() if self.is_styled else AnswerWriter()
        reader = spoken(
            self.engine,
            prompt_ids,
            writer.think if isinstance(writer, MarkdownWriter) else None,
            tells_apart=self.engine.template_facts.thinks,
        )
        try:
            with writer:
                await stream_answer(
                    self.engine, prompt_ids, self.params, writer.write, answer, reader=reader
                )
        except asyncio.CancelledError:
            self._keep(messages, answer, reader)
            raise
        self._keep(messages, answer, reader)
        num_tokens = len(prompt_ids) + len(answer.token_ids)
        if answer.finish_reason == "length" and num_tokens >= self.engine.max_context_tokens:
            note("[the context is full: the answer was cut; the next turn drops the oldest turns]")
        hint_speed(answer.timings)

    def _keep(
        self, messages: list[dict[str, str]], answer: CollectedAnswer, reader: Spoken | None
    ) -> None:
        said = {"role": "assistant", "content": answer.text}
        self.messages = [*messages, said if reader is None else reader.message()]
        self.timings = answer.timings

    async def _fitting_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the prompt with room for an answer; drops the oldest turns where there is none."""
        limit = self.engine.max_context_tokens
        most = limit - _room_for_answer(self.params.max_tokens, limit)
        ids = await self._encode(messages)
        num_dropped = 0
        while len(ids) > most and len(messages) > 1:
            del messages[0]
            while len(messages) > 1 and messages[0]["role"] != "user":
                del messages[0]
            num_dropped += 1
            ids = await self._encode(messages)
        if len(ids) >= limit:
            raise PromptTooLongError(len(ids), limit)
        if num_dropped:
            turns = "turn was" if num_dropped == 1 else f"{num_dropped} turns were"
            note(f"[the context is full: the oldest {turns} dropped]")
        return ids

    async def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        told = with_system(self.system, messages)
        return await self.engine.encode_chat(told, variables=self.variables or None)


def _room_for_answer(max_tokens: int | None, max_context_tokens: int) -> int:
    """Return how many tokens to keep free: what was asked for, but at most half of the context."""
    wanted = max_context_tokens // 4 if max_tokens is None else max_tokens
    return max(1, min(wanted, max_context_tokens // 2))
