"""Kernel speeds: every part of a model is timed, several rounds, and its costs are what the times say."""

from __future__ import annotations

import itertools
from contextlib import contextmanager

import pytest

from tests.support.dots3_cases import DOTS3_OPTIONS
from tests.support.glm5_cases import GLM5_OPTIONS
from tests.support.latent_cases import GLM_DSA_OPTIONS
from tests.support.toy_archs import ToyArch, write_toy_arch
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline.calibration.kernel_speeds import measure_kernels, timed_layers
from thermocline.costmodel.cost_model import Phase, Workload, estimate, non_expert_kind
from thermocline.costmodel.machine_speeds import MachineSpeeds
from thermocline.kernels.cache_format import CacheType
from thermocline.kernels.cpu import NativeKernels
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model
from thermocline.models.sizes import LayerSizes, ModelSizes, measure_sizes


@contextmanager
def opened(path):
    """Yield a model with its kernels and sizes."""
    with open_model_file(path) as file:
        kernels = NativeKernels(threads=1)
        model = open_model(file, kernels)
        yield model, kernels, measure_sizes(file.tensors.values(), model.spec, CacheType.F16)


def measured(path, times):
    """Return sizes and speeds where the calls take `times` in turn."""
    ticks = itertools.chain.from_iterable((0.0, each) for each in times)
    with opened(path) as (model, kernels, sizes):
        found = measure_kernels(model, kernels, sizes, CacheType.F16, 1, lambda: next(ticks))
    return sizes, found


@pytest.mark.slow
def test_costs_are_the_times_of_calls(tmp_path):
    """Where every call takes 10 s, an expert takes its share of them, and a trunk what experts leave."""
    path = write_toy_model(tmp_path / "toy.gguf", ToyShape(experts=8, used=2))
    sizes, found = measured(path, itertools.repeat(10.0))
    layer = sizes.layers[0]
    experts = found.experts[layer.layout]
    assert experts.seconds(layer.expert, 1) == pytest.approx(5.0)  # two experts in ten seconds
    assert experts.seconds(layer.expert, 256) == pytest.approx(5.0)  # no cheaper with more rows
    assert found.head.seconds(sizes.output, 4) == pytest.approx(10.0)
    assert found.attention.decode_pair_s == pytest.approx(10.0 / 2048)
    trunk = found.trunk[non_expert_kind(layer)]
    assert trunk.seconds(layer.non_expert, 4) == pytest.approx(10.0, rel=0.01)
    assert trunk.seconds(layer.non_expert, 1) < 1e-6  # a layer is no longer than its experts


@pytest.mark.slow
def test_the_first_round_does_not_count(tmp_path):
    """It finds nothing in memory."""
    path = write_toy_model(tmp_path / "toy.gguf", ToyShape())
    _, once = measured(path, itertools.repeat(1.0))
    num_probes = 1 + 4 + 5 + 3 + 2  # a layer, trunk, experts, head, attention
    _, found = measured(path, itertools.chain([99.0] * num_probes, itertools.repeat(1.0)))
    assert found == once


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "own"),
    [
        *((arch, {}) for arch in ("olmoe", "qwen35moe", "laguna", "qwen2moe")),
        ("deepseek32", {"head_dim": 24, "rotary": 8, "query_rank": 48}),
        ("glm-dsa", GLM_DSA_OPTIONS["shared"]),
        ("glm5-next", GLM5_OPTIONS["shared"]),
        ("dots3note", DOTS3_OPTIONS["odd"]),
        ("qwen4exp", {"rotary": 8}),
        ("nemotron_h_moe", {"narrow": 32}),
        ("jamba", {"interval": 2}),
    ],
)
def test_every_architecture_can_be_measured_and_priced(tmp_path, arch, own):
    """Recurrent, dense and windowed layers included, and experts narrower than the stream: nothing is missing."""
    path = write_toy_arch(tmp_path / "toy.gguf", ToyArch(arch, **{"layers": 5} | own))
    with opened(path) as (model, kernels, sizes):
        found = measure_kernels(model, kernels, sizes, CacheType.F16, rounds=1)
    parts = (found.experts, found.trunk, found.head, found.attention)
    speeds = MachineSpeeds(1, 1e9, 1e9, *parts, step_s=0.0)
    for work in (Workload(Phase.DECODE, 1, 100), Workload(Phase.PREFILL, 40, chunk_tokens=16)):
        assert estimate(sizes, speeds, None, work).tokens_per_s > 0


def test_a_few_layers_of_each_kind_and_layout_are_timed():
    """Two of each, so that a large model takes no longer than a small one."""
    kinds = [("q4", 0), ("q6", 0), ("q4", 0), ("q4", 0), ("q4", 64)]
    layers = tuple(LayerSizes(10, 0 if state else 4, 5, layout, state) for layout, state in kinds)
    assert timed_layers(ModelSizes(layers, 1, 1, 8, 2, 64)) == (0, 2, 1, 4)
