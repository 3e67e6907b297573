"""Chooses how the device's kernels run: as torch twins, in Triton's interpreter, or on a device where there is one."""

from __future__ import annotations

import os

import pytest
import torch

HAS_DEVICE = torch.cuda.is_available()
# Triton decides when it is imported, once for a process.
if not HAS_DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

IMPLEMENTATIONS = (
    pytest.param("twin", id="twin"),
    pytest.param(
        "interpreter",
        id="interpreter",
        marks=pytest.mark.skipif(not IS_INTERPRETED, reason="set TRITON_INTERPRET=1 for this"),
    ),
    pytest.param(
        "cuda",
        id="cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(
                IS_INTERPRETED, reason="needs a CUDA device, and no TRITON_INTERPRET"
            ),
        ],
    ),
)


@pytest.fixture(params=IMPLEMENTATIONS)
def kernels(request, monkeypatch):
    """Every implementation, with outputs that start as NaN between rows that nobody may write to."""
    from tests.support.device_cases import DeviceKernels, GuardedDeviceMemory

    memory = GuardedDeviceMemory()
    kernels = DeviceKernels(request.param)
    if request.param == "interpreter":
        kernels.widen_programs(monkeypatch)
    monkeypatch.setattr(torch, "empty", memory.empty)
    monkeypatch.setattr(torch, "empty_like", memory.empty_like)
    yield kernels
    memory.check()
