"""Fixtures of whole engines: what opening one takes less of than a user's would."""

from __future__ import annotations

from time import perf_counter

import pytest

from thermocline.experts.backends import gpu_trial
from thermocline.kernels.gpu.requirements import why_no_gpu


@pytest.fixture(autouse=True, scope="module")
def _brief_trials():
    """A stand-in for a device is measured by few experts, once: that took a third of a test of it. A GPU is as for users.

    `tests/unit/experts/test_gpu_device.py` measures as an engine does.
    """
    if why_no_gpu() is None:
        yield
        return
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
