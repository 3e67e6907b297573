"""Fixtures for all tests: fixed seeds, and a check that no thread or task outlives its test."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support import known_files
from tests.support.file_seconds import FileSeconds
from thermocline.experts import heat_file
from thermocline.kernels import cpu_topology

if TYPE_CHECKING:
    from pathlib import Path

# Begun last, they would keep one process at work alone. The end of a run names the longest ones.
_LONGEST_FILES = (
    "e2e/test_wheel.py",
    "architecture/test_kernel_sets.py",
    "benchmarks/test_quick_runs.py",
    "unit/kernels/gpu/test_device_compiles.py",
    "e2e/test_device_non_expert.py",
    "unit/kernels/gpu/test_device_experts.py",
    "unit/kernels/gpu/test_device_attention.py",
    "unit/kernels/test_dense.py",
    "unit/kernels/test_products.py",
    "unit/kernels/test_experts.py",
    "e2e/test_shared_step_on_device.py",
    "e2e/test_device_allocation.py",
    "e2e/test_gpu_experts.py",
    "e2e/test_any_schedule.py",
    "e2e/test_published_models.py",
    "e2e/test_workers.py",
    "unit/remote/test_client.py",
    "unit/models/device/test_non_expert.py",
    "reliability/test_streams.py",
    "e2e/test_memory.py",
)
# Of an engine; environments of clients have none.
_COUNT_THREADS = (
    "thermocline.engine.cpu",
    "thermocline.kernels.cpu_topology",
    "thermocline.experts.backends.hot_device",
)
_default_threads = cpu_topology.default_threads
_OUR_THREADS = ("lane ", "thermocline ")
_openings = itertools.count()
_heat_places = heat_file.heat_places
if find_spec("hypothesis"):  # not in environments of clients
    from hypothesis import HealthCheck, settings

    # New examples each time, so that many runs see many; tests to which the number matters say theirs. Nothing is late
    # on a busy machine.
    _busy = [HealthCheck.too_slow]
    settings.register_profile("suite", max_examples=40, deadline=None, suppress_health_check=_busy)
    settings.load_profile("suite")


def pytest_addoption(parser):
    """--slow-files says how many files of tests the end of a run names."""
    parser.addoption("--slow-files", type=int, default=12, metavar="N", help="files named by time")


def pytest_configure(config):
    """The slowest files are told after a run."""
    config.pluginmanager.register(FileSeconds(config.getoption("slow_files")))


def pytest_collection_modifyitems(items):
    """The longest files come first, in the order of the list; all others stay as they are."""

    def place(item):
        path = item.path.as_posix()
        found = (n for n, name in enumerate(_LONGEST_FILES) if path.endswith(f"tests/{name}"))
        return next(found, len(_LONGEST_FILES))

    items.sort(key=place)


def pytest_collection_finish(session):
    """Thousands of collected tests live until the end: garbage collection need not look at them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """The user who runs the tests has an empty cache, no settings, and typed nothing before.

    All processes of a run copy the toy models that one of them has written.
    """
    base = tmp_path_factory.getbasetemp()
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("THERMOCLINE_CACHE", os.fspath(folder))
        patch.setenv("THERMOCLINE_CONFIG", "")
        patch.setenv("XDG_STATE_HOME", os.fspath(tmp_path_factory.mktemp("state")))
        patch.setattr(known_files, "folder", run / "known")
        yield folder


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """An engine computes on one thread where nothing is said.

    The processes of a run share the cores, and a toy's threads take most of their time to wait for each other,
    spinning. Tests of several threads say how many, or ask for `default_threads`.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in _COUNT_THREADS if find_spec("gguf") else ():
            patch.setattr(f"{module}.default_threads", lambda *, beside_gpu=False: 1)
        yield


@pytest.fixture
def default_threads(monkeypatch):
    """An engine computes on as many threads as for users."""
    for module in _COUNT_THREADS:
        monkeypatch.setattr(f"{module}.default_threads", _default_threads)


@pytest.fixture(autouse=True, scope="session")
def _no_heat(_own_cache):
    """No opening knows what experts others used, except in a test that asks for `kept_heat`."""

    def fresh_place(model: Path, identity: object) -> tuple[Path, None]:
        return _own_cache / f"heat-{next(_openings)}" / "heat.json", None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heat_file, "heat_places", fresh_place)
        yield


@pytest.fixture
def kept_heat(monkeypatch, tmp_path):
    """Heat is kept as it is for users; the folder in place of the user's cache is returned."""
    monkeypatch.setattr(heat_file, "heat_places", _heat_places)
    monkeypatch.setenv("THERMOCLINE_CACHE", os.fspath(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _alone():
    """Every test starts from the same random state, and leaves no thread: one of a lane or an engine is a leak.

    One fixture, because each takes a tenth of a millisecond of every test.
    """
    random.seed(0)
    np.random.seed(0)
    before = set(threading.enumerate())
    yield
    left = [
        thread.name
        for thread in threading.enumerate()
        if thread not in before and thread.name.startswith(_OUR_THREADS) and thread.is_alive()
    ]
    assert not left, f"threads left behind: {left}"
