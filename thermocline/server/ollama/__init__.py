"""Ollama's interface in front of the engine: one model that is always loaded."""

from __future__ import annotations
