"""A conversation in a file: a JSON object with its messages, as OpenAI's requests have them. Knows no model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from thermocline.errors import RequestError
from thermocline.whole_files import whole_file

if TYPE_CHECKING:
    from pathlib import Path

_TEXTS: Final = ("content", "reasoning_content")
_ROLES: Final = ("user", "assistant")


def save_chat(path: Path, system: str | None, messages: list[dict[str, str]]) -> None:
    """Write a conversation, readable by its owner alone.

    Raises RequestError for a path at which something else than a saved chat lies, OSError for one that can not be
    written.
    """
    if path.exists():
        try:
            load_chat(path)
        except (RequestError, OSError) as error:
            raise RequestError(
                f"{path} is there already, and is no saved chat: choose another name"
            ) from error
    head = [] if system is None else [{"role": "system", "content": system}]
    text = json.dumps({"messages": [*head, *messages]}, indent=1, ensure_ascii=False)
    with whole_file(path, private=True) as file:
        file.write(text.encode("utf-8", "replace") + b"\n")


def load_chat(path: Path) -> tuple[str | None, list[dict[str, str]]]:
    """Return system message and turns of a file: an object with `messages`, or their list alone.

    Raises RequestError for a file that is no conversation, OSError for one that can not be read.
    """
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is no saved chat: it is not JSON ({error})") from error
    messages = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(messages, list):
        raise RequestError(f"{path} is no saved chat: it has no list of messages")
    system = None
    turns = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise RequestError(f"{path}: message {number} has no text as its content")
        if number == 0 and message.get("role") == "system":
            system = message["content"]
            continue
        if message.get("role") not in _ROLES:
            raise RequestError(
                f"{path}: message {number} is of {message.get('role')!r}: a chat has messages of user and assistant"
            )
        texts = {name: message[name] for name in _TEXTS if isinstance(message.get(name), str)}
        turns.append({"role": message["role"], **texts})
    return system, turns
