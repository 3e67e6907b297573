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

# Minutes of one process: begun last, they would keep one process at work alone.
_LONGEST_FILES = (
    "e2e/test_wheel.py",
    "architecture/test_kernel_sets.py",
    "e2e/test_device_non_expert.py",
    "benchmarks/test_quick_runs.py",
    "e2e/test_gpu_experts.py",
    "e2e/test_golden_logits.py",
    "unit/kernels/gpu/test_device_compiles.py",
    "e2e/test_any_schedule.py",
    "unit/remote/test_client.py",
    "e2e/test_published_models.py",
    "unit/pipeline/test_scheduler_random.py",
    "reliability/test_streams.py",
    "e2e/test_memory.py",
)
_OUR_THREADS = ("lane ", "thermocline ")
_openings = itertools.count()


def pytest_collection_modifyitems(items):
    """The longest files come first, in the order of the list; all others stay as they are."""

    def place(item):
        path = item.path.as_posix()
        found = (n for n, name in enumerate(_LONGEST_FILES) if path.endswith(f"tests/{name}"))
        return next(found, len(_LONGEST_FILES))

    items.sort(key=place)


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
