"""Fixtures of whole engines: what opening one takes less of than a user's would."""

from __future__ import annotations

from time import perf_counter

import pytest

from thermocline.experts.backends import gpu_trial


@pytest.fixture(autouse=True, scope="module")
def _brief_trials():
    """A device is measured by few experts, once: on the stand-in that took a third of a test of it.

    `tests/unit/experts/test_gpu_device.py` measures as an engine does.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_trial, "_FEW", 2)
        patch.setattr(gpu_trial, "_MANY", 6)
        patch.setattr(gpu_trial, "_COPIES", 8)
        patch.setattr(gpu_trial, "least_seconds", _seconds)
        yield


def _seconds(job):
    start_s = perf_counter()
    job()
    return perf_counter() - start_s
