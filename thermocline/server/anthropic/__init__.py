"""Anthropic's Messages interface in front of the engine."""

from __future__ import annotations
