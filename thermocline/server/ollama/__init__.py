"""Ollama's interface in front of the models."""

from __future__ import annotations
