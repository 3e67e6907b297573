"""Weights stay in the page cache: the process holds no copy of them in anonymous memory."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from tests.support.toy_model import ToyShape, toy_weights, write_toy_model
from thermocline import Engine, EngineConfig, SamplingParams
from thermocline.config import PlacementConfig, PrefetchConfig
from thermocline.kernels.cpu import NativeKernels
from thermocline.prefetch.residency import ResidencyProbe

# 96 experts of 3 x 1024 x 1024 F16 weights: about 600 MB of experts in one layer pair's file.
BIG = ToyShape(
    layers=1,
    hidden=1024,
    heads=4,
    kv_heads=1,
    head_dim=64,
    experts=96,
    used=4,
    intermediate=1024,
    formats={"gate_up": "F16", "down": "F16"},
)


def repeated_experts(shape: ToyShape) -> dict[str, np.ndarray]:
    """Return the weights of a toy model whose experts are all alike: quick to draw, as large on disk."""
    weights = toy_weights(replace(shape, experts=shape.used))
    router = np.random.default_rng(1).standard_normal((shape.experts, shape.hidden))
    weights["blk.0.ffn_gate_inp.weight"] = (router / 16).astype(np.float32)
    for name, values in weights.items():
        if "_exps" in name:
            weights[name] = np.broadcast_to(values[:1], (shape.experts, *values.shape[1:]))
    return weights


PROGRAM = """
import asyncio, json, sys
from thermocline import Engine, SamplingParams

def anonymous_bytes():
    with open("/proc/self/smaps_rollup") as rollup:
        fields = dict(line.split(":", 1) for line in rollup if ":" in line)
    return int(fields["Anonymous"].split()[0]) * 1024

async def main():
    async with Engine.open(sys.argv[1]) as engine:
        before = anonymous_bytes()
        peak = before
        async for event in engine.generate(
            list(range(100)), SamplingParams(max_tokens=8, ignore_eos=True)
        ):
            peak = max(peak, anonymous_bytes())
        heat = engine.statistics().heat
    print(json.dumps({"before": before, "peak": peak, "touched": int((heat > 0).sum())}))

asyncio.run(main())
"""


@pytest.mark.slow
def test_anonymous_memory_stays_far_below_the_weights(tmp_path):
    """After most of a 600 MB file was computed from, anonymous memory is under 160 MB in all."""
    path = write_toy_model(tmp_path / "big.gguf", BIG, weights=repeated_experts(BIG))
    file_bytes = path.stat().st_size
    assert file_bytes > 500e6
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    measured = json.loads(result.stdout)
    assert measured["touched"] > 80, "the run must have read most experts to prove anything"
    assert measured["peak"] < 160e6, measured
    assert measured["peak"] - measured["before"] < 64e6, measured


async def test_compute_hears_that_experts_are_read_ahead(tmp_path, monkeypatch):
    """While prefetch reads, experts may be missing; without it nobody reads, and nothing is asked for. The tokens are the same.

    With another lane at work, so that a layer's parts are jobs of their own.
    """
    monkeypatch.setattr(ResidencyProbe, "is_resident", lambda _: False)
    toy, heard = write_toy_model(tmp_path / "toy.gguf", ToyShape()), set()
    placement = PlacementConfig(hot_device="cpu", hot_fraction=0.5)
    compute = NativeKernels.expert_outputs

    def noting(self, work, *args, **kwargs):
        heard.add(work.may_be_missing)
        return compute(self, work, *args, **kwargs)

    monkeypatch.setattr(NativeKernels, "expert_outputs", noting)
    answers = []
    for mode in ("auto", "off"):
        heard.clear()
        config = EngineConfig(placement=placement, prefetch=PrefetchConfig(mode=mode))
        async with Engine.open(toy, config) as engine:
            params = SamplingParams(max_tokens=5, ignore_eos=True)
            answers.append([event.token_ids async for event in engine.generate([1, 2, 3], params)])
        # The hot experts' lane reads the same file, and hears it as well.
        assert heard == {mode == "auto"}
    assert answers[0] == answers[1]
