"""The devices that tests of device code run on: the CPU always, a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

DEVICES = (
    "torch-cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(
                not torch.cuda.is_available(), reason="no CUDA device can be used here"
            ),
        ],
    ),
)
