"""Owns a model's chat template from the first chat prompt on. Knows no messages."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from thermocline.errors import ChatTemplateError, ConfigError, EngineClosedError
from thermocline.text.chat_template import ChatTemplate
from thermocline.text.templates.template_facts import read_template

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thermocline.text.tokenizer import Tokenizer
    from thermocline.text.tool_calls.tool_formats import TemplateFacts


class TemplateHolder:
    """Starts the chat template's child processes when a chat prompt first asks for one.

    There is one for long conversations and one for others: a render waits for those before it.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self.facts = read_template(source, vocabulary=tokenizer)
        self.source = source
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._templates: dict[bool, ChatTemplate] = {}
        """By whether it is for long conversations, which nobody else waits for."""
        self._closed = False

    def get(self, *, for_bulk: bool = False) -> ChatTemplate:
        """Return the template, from any thread. for_bulk: the one that renders long conversations.

        Raises ConfigError when the file has none, ChatTemplateError if it is bad, EngineClosedError
        after `close`.
        """
        self.require()
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed: open a new one")
            if for_bulk not in self._templates:
                self._templates[for_bulk] = self._start(self.source)
            return self._templates[for_bulk]

    def require(self) -> None:
        """Raise ConfigError if the file has no template."""
        if not self.source:
            raise ConfigError(
                "this model file has no chat template: give a plain prompt, or use an instruct model"
            )

    def check(self, name: str) -> None:
        """Start the template now. Raises ConfigError that says what is wrong with `name`."""
        try:
            self.get()
        except ChatTemplateError as error:
            raise ConfigError(f"{name}: {error}; correct the file") from error

    def facts_of(self, source: str | None) -> TemplateFacts:
        """Return what the template of another text tells; None: as `facts`."""
        return self.facts if source is None else read_template(source, vocabulary=self._tokenizer)

    @contextmanager
    def borrow(self, source: str | None, *, for_bulk: bool = False) -> Iterator[ChatTemplate]:
        """Use the template of another text meanwhile, in a process of its own; None: as `get`."""
        if source is None:
            yield self.get(for_bulk=for_bulk)
        else:
            with self._start(source) as template:
                yield template

    def _start(self, source: str) -> ChatTemplate:
        tokenizer = self._tokenizer
        return ChatTemplate(
            source,
            bos_token=_token_text(tokenizer, tokenizer.bos_id),
            eos_token=_token_text(tokenizer, tokenizer.eos_id),
            control_tokens=tokenizer.control_texts,
            tool_format=read_template(source).tool_format,
        )

    def close(self) -> None:
        """End the child processes, and start no other."""
        with self._lock:
            self._closed = True
            for template in self._templates.values():
                template.close()


def _token_text(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_text(token_id)
