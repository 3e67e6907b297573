"""Owns a model's chat template from the first chat prompt on. Knows no messages."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from thermocline.errors import ConfigError, EngineClosedError
from thermocline.text.chat_template import ChatTemplate

if TYPE_CHECKING:
    from thermocline.text.tokenizer import Tokenizer


class TemplateHolder:
    """Starts the chat template's child process when the first chat prompt asks for it."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._template: ChatTemplate | None = None
        self._closed = False

    def get(self) -> ChatTemplate:
        """Return the template, from any thread.

        Raises ConfigError when the file has none, ChatTemplateError if it is bad, EngineClosedError
        after `close`.
        """
        if not self._source:
            raise ConfigError(
                "this model file has no chat template: give a plain prompt, or use an instruct model"
            )
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed: open a new one")
            if self._template is None:
                tokenizer = self._tokenizer
                self._template = ChatTemplate(
                    self._source,
                    bos_token=_token_text(tokenizer, tokenizer.bos_id),
                    eos_token=_token_text(tokenizer, tokenizer.eos_id),
                    control_tokens=tokenizer.control_texts,
                )
            return self._template

    def close(self) -> None:
        """End the child process, if there is one, and start no other."""
        with self._lock:
            self._closed = True
            if self._template is not None:
                self._template.close()


def _token_text(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_text(token_id)
