"""Fixtures for all tests: fixed seeds, and a check that no thread or task outlives its test."""

from __future__ import annotations

import os
import random
import threading

import numpy as np
import pytest

from thermocline.experts import heat_file

_OUR_THREADS = ("lane ", "thermocline ")


@pytest.fixture(autouse=True)
def _seeded():
    """Every test starts from the same random state."""
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Nothing is written to the cache of the user who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THERMOCLINE_CACHE", os.fspath(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _no_heat(request, monkeypatch):
    """No test knows what experts others used, except one that asks for `kept_heat`."""
    if "kept_heat" not in request.fixturenames:
        monkeypatch.setattr(heat_file, "heat_places", lambda file, identity: ())


@pytest.fixture
def kept_heat(monkeypatch, tmp_path):
    """Heat is kept as it is for users; the folder in place of the user's cache is returned."""
    monkeypatch.setenv("THERMOCLINE_CACHE", os.fspath(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _no_thread_left():
    """A lane or engine thread that outlives its test is a leak."""
    before = set(threading.enumerate())
    yield
    left = [
        thread.name
        for thread in threading.enumerate()
        if thread not in before and thread.name.startswith(_OUR_THREADS) and thread.is_alive()
    ]
    assert not left, f"threads left behind: {left}"
