"""The devices that tests of device code run on: the CPU always, a GPU where there is one.

To be imported before device code: where there is no GPU, Triton's interpreter stands in.
"""

from __future__ import annotations

import os

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
# Triton decides when it is imported, once for a process.
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device can be used here"),
]
DEVICES = ("torch-cpu", pytest.param("cuda", marks=NEEDS_CUDA))
