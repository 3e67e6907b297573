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
    """Starts the chat template's child process when the first chat prompt asks for it."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self.facts = read_template(source, vocabulary=tokenizer)
        self.source = source
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._template: ChatTemplate | None = None
        self._closed = False

    def get(self) -> ChatTemplate:
        """Return the template, from any thread.

        Raises ConfigError when the file has none, ChatTemplateError if it is bad, EngineClosedError
        after `close`.
        """
        self.require()
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed: open a new one")
            if self._template is None:
                self._template = self._start(self.source)
            return self._template

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
    def borrow(self, source: str | None) -> Iterator[ChatTemplate]:
        """Use the template of another text meanwhile, in a process of its own; None: as `get`."""
        if source is None:
            yield self.get()
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
        """End the child process, if there is one, and start no other."""
        with self._lock:
            self._closed = True
            if self._template is not None:
                self._template.close()


def _token_text(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_text(token_id)
