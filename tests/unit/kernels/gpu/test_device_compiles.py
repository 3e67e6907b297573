"""The device's kernels compile for real GPUs, which an interpreter can not show; no device is needed for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.gpu.formats import DEVICE_FORMATS, WIDE_FORMATS

ROOT = Path(__file__).parents[4]
# Of a program: Turing has the least, Hopper the most. All others are taken for cards for consumers.
MAX_SHARED_BYTES = {"75": 64 << 10, "90": 227 << 10}
CONSUMER_SHARED_BYTES = 99 << 10
# Turing has no TF32, so products with such matrices in prompts take more than it has; so does attention to latent rows,
# which it multiplies in float32 whatever their type. Known limits.
TOO_LARGE = {("down_tiles_kernel", name, "75") for name in WIDE_FORMATS} | {
    (name, f"latent:{kind.name}", "75")
    for name in ("attend_tiles_kernel", "attend_splits_kernel")
    for kind in CacheType
}
TARGETS = {"75", "80", "86", "89", "90", "120"}
IS_LONG = "THERMOCLINE_GPU_TARGETS" in os.environ


@pytest.mark.slow
def test_kernels_compile_and_fit_the_smallest_shared_memory(tmp_path):
    """Every kernel becomes machine code, for one GPU from Turing to Blackwell or for each (`make check-gpu`).

    `make check-gpu` does this with every format, too.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.support.compile_kernels", *["all"] * IS_LONG],
        cwd=ROOT,
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=2800 if IS_LONG else 280,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    compiled = [line.split() for line in ran.stdout.splitlines()]
    names = {
        *("dequantize_kernel", "gather_combine_kernel", "gate_up_rows_kernel"),
        *("gate_up_tiles_kernel", "down_rows_kernel", "down_tiles_kernel", "tile_schedule_kernel"),
        *("attend_tiles_kernel", "attend_splits_kernel", "merge_splits_kernel"),
        *("flag_kernel", "publish_kernel", "wait_kernel", "shared_combine_kernel"),
        *("rms_norm_kernel", "turn_kernel", "choose_kernel", "slots_kernel"),
    }
    assert {name for name, _, _, _ in compiled} == names
    assert {target for _, _, target, _ in compiled} == TARGETS
    if IS_LONG:
        assert len({(name, target) for name, _, target, _ in compiled}) == len(names) * len(TARGETS)
        decoded = {formats for _, formats, _, _ in compiled if "," not in formats}
        caches = {f"{what}:{kind.name}" for kind in CacheType for what in ("cache", "latent")}
        assert decoded >= DEVICE_FORMATS | caches
    for name, formats, target, shared in compiled:
        fits = int(shared) <= MAX_SHARED_BYTES.get(target, CONSUMER_SHARED_BYTES)
        is_known = (name, formats, target) in TOO_LARGE
        assert fits != is_known, f"{name} of {formats} takes {shared} on {target}"
