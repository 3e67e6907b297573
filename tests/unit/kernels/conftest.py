"""Fixtures of the kernel tests."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.kernel_cases import GuardedMemory


@pytest.fixture
def guarded(monkeypatch):
    """Outputs start as NaN, so that a hole shows, and lie between rows that nobody may write to."""
    memory = GuardedMemory()
    monkeypatch.setattr(np, "empty", memory.empty)
    monkeypatch.setattr(np, "empty_like", memory.empty_like)
    yield memory
    memory.check()
