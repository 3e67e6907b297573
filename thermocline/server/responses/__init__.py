"""OpenAI's Responses interface in front of the engine; nothing is stored between requests."""

from __future__ import annotations
