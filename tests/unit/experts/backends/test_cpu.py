"""The CPU's expert backend: a token alone, in a batch, and in a part of a layer gives equal bits."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.chunks import make_chunk
from tests.support.toy_model import ToyShape, write_toy_model
from thermocline.experts.backends.cpu import CpuExpertBackend
from thermocline.experts.catalog import ExpertCatalog
from thermocline.experts.dispatch.grouping import dispatch, owners_of
from thermocline.kernels.cpu import NativeKernels
from thermocline.kernels.dense_contract import Contributions
from thermocline.kernels.reference import ReferenceKernels
from thermocline.messages import (
    BackendRole,
    LayerIndex,
    LayerSum,
    LayerWork,
    PartialSum,
    Routing,
)
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import open_model
from thermocline.traces.lanes import Lane
from thermocline.traces.recorder import NullRecorder
from thermocline.workers.lane import LaneThread

SHAPE = ToyShape(hidden=256, intermediate=256, used=3, formats={"gate_up": "Q4_K", "down": "Q6_K"})
LAYER = LayerIndex(1)


@pytest.fixture(params=[NativeKernels, ReferenceKernels], ids=["native", "reference"])
def backend(request, tmp_path):
    """A CPU backend over a toy file, for each kernel implementation."""
    kernels = request.param()
    with open_model_file(write_toy_model(tmp_path / "toy.gguf", SHAPE)) as file:
        catalog = ExpertCatalog(open_model(file, kernels).expert_layers)
        with LaneThread(Lane.CPU, NullRecorder()) as lane:
            yield CpuExpertBackend(BackendRole.COLD, catalog, kernels, lane)


def make_work(num_tokens: int) -> LayerWork:
    rng = np.random.default_rng(num_tokens)
    x = rng.standard_normal((num_tokens, 256)).astype(np.float32)
    ids = np.stack([rng.permutation(8)[:3] for _ in range(num_tokens)]).astype(np.int32)
    routing = Routing(ids, rng.random((num_tokens, 3)).astype(np.float32))
    dispatches = dispatch(routing, owners_of(np.zeros(8, bool)))
    return LayerWork(make_chunk(num_tokens=num_tokens), LAYER, x, x, routing, dispatches)


def one_token_of(work: LayerWork, token: int) -> LayerWork:
    rows = slice(token, token + 1)
    routing = Routing(work.routing.expert_ids[rows], work.routing.weights[rows])
    dispatches = dispatch(routing, owners_of(np.zeros(8, bool)))
    chunk = make_chunk(num_tokens=1)
    return LayerWork(chunk, LAYER, work.residual[rows], work.x[rows], routing, dispatches)


async def test_a_token_alone_and_in_a_batch_give_the_same_bits(backend):
    """A token computed alone equals the token in a batch of 9, slot by slot, and their sum."""
    work = make_work(9)
    total = await backend.compute(work, work.dispatches[BackendRole.COLD])
    assert isinstance(total, LayerSum)
    for token in range(9):
        alone = one_token_of(work, token)
        single = await backend.compute(alone, alone.dispatches[BackendRole.COLD])
        assert isinstance(single, LayerSum)
        np.testing.assert_array_equal(total.x[token], single.x[0])


async def test_parts_of_the_layer_add_up_to_the_whole(backend):
    """Splitting the layer between two calls changes no bit: any placement may do so."""
    work = make_work(7)
    whole = await backend.compute(work, work.dispatches[BackendRole.COLD])
    dispatches = dispatch(work.routing, owners_of(np.arange(8) < 3)).values()
    parts = [await backend.compute(work, part) for part in dispatches]
    assert all(isinstance(part, PartialSum) for part in parts)
    contributions = [Contributions(part.rows, part.slots, part.values) for part in parts]
    joined = ReferenceKernels().dense.combine(work.residual, contributions, 3)
    np.testing.assert_array_equal(joined, whole.x)


async def test_kernels_hear_whether_experts_may_be_missing(tmp_path):
    """Asked before each job: reading ahead begins and ends while the backend runs."""
    kernels, found = ReferenceKernels(), []

    class Noting(ReferenceKernels):
        def expert_sum(self, work, pair_of, residual, *, prompt=False):
            found.append(work.may_be_missing)
            return kernels.expert_sum(work, pair_of, residual, prompt=prompt)

        def expert_outputs(self, work, *, prompt=False):
            found.append(work.may_be_missing)
            return kernels.expert_outputs(work, prompt=prompt)

    reads = iter([True, False, True, False])
    with open_model_file(write_toy_model(tmp_path / "toy.gguf", SHAPE)) as file:
        catalog = ExpertCatalog(open_model(file, kernels).expert_layers)
        with LaneThread(Lane.CPU, NullRecorder()) as lane:
            backend = CpuExpertBackend(
                BackendRole.COLD, catalog, Noting(), lane, reads_ahead=lambda: next(reads)
            )
            work = make_work(3)
            half = dispatch(work.routing, owners_of(np.arange(8) < 3))[BackendRole.COLD]
            for share in (work.dispatches[BackendRole.COLD], half):
                await backend.compute(work, share)
                await backend.compute(work, share)
    assert found == [True, False, True, False]
