"""Ollama's error body, and how its streams of lines look."""

from __future__ import annotations

from typing import Any, Final

from thermocline.server.core.errors import message_of
from thermocline.server.core.sse import Framing
from thermocline.server.ollama.encoder import line


def error_body(error: BaseException) -> dict[str, Any]:
    """Return Ollama's error object."""
    return {"error": message_of(error)}


LINES: Final = Framing(
    error=lambda error: line(error_body(error)), ping=b"", content_type="application/x-ndjson"
)
