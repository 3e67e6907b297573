"""Fixtures for all tests: fixed seeds, and a check that no thread or task outlives its test."""

from __future__ import annotations

import itertools
import os
import random
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from thermocline.experts import heat_file

if TYPE_CHECKING:
    from pathlib import Path

_OUR_THREADS = ("lane ", "thermocline ")
_openings = itertools.count()


@pytest.fixture(autouse=True)
def _seeded():
    """Every test starts from the same random state."""
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Nothing is written to the cache of the user who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("THERMOCLINE_CACHE", os.fspath(folder))
        yield folder


@pytest.fixture(autouse=True)
def _no_heat(request, monkeypatch, _own_cache):
    """No opening knows what experts others used, except in a test that asks for `kept_heat`."""

    def fresh_place(model: Path, identity: object) -> tuple[Path, None]:
        return _own_cache / f"heat-{next(_openings)}" / "heat.json", None

    if "kept_heat" not in request.fixturenames:
        monkeypatch.setattr(heat_file, "heat_places", fresh_place)


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
