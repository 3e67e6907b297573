"""Compares decode steps that a device and the CPU share with the same layers one after another, before the first request.

Every size of a batch is computed for nobody first, so that all is compiled. Then it is captured and replayed, in places
that no request has. A part of the assembly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from thermocline.errors import DeviceFaultError
from thermocline.experts.dispatch.grouping import dispatch, owners_of
from thermocline.kernels.contract import ExpertWork
from thermocline.kernels.dense_contract import Contributions
from thermocline.messages import BackendRole, LayerIndex, SegmentKind
from thermocline.models.contract import SharedStep
from thermocline.models.device.spare_chunk import spare_chunk

if TYPE_CHECKING:
    from thermocline.experts.backends.gpu import GpuDevice
    from thermocline.experts.catalog import ExpertCatalog
    from thermocline.kernels.contract import Kernels
    from thermocline.kernels.handoff import Handoff
    from thermocline.messages import Chunk, ExpertDispatch, FloatArray, IntArray
    from thermocline.models.device.non_expert import DeviceNonExpert
    from thermocline.models.device.shared_step import DeviceSharedStep
    from thermocline.models.routing import Routed

_TURNS: Final = 3
# Mean square of the difference over that of the layers one after another. Nothing rounds differently there.
_MAX_ERROR: Final = 1e-6


class LayerByLayer:
    """The same device and the same CPU, a layer's attention first and then its experts. Blocks."""

    def __init__(
        self,
        non_expert: DeviceNonExpert,
        experts: GpuDevice | None,
        catalog: ExpertCatalog,
        kernels: Kernels,
    ) -> None:
        """experts: None where the device has none. kernels: the CPU's."""
        self._non_expert = non_expert
        self._experts = experts
        self._catalog = catalog
        self._kernels = kernels

    def step(self, chunk: Chunk, x: FloatArray, residency: IntArray) -> FloatArray:
        """Return x [T, D] behind the last layer. residency: int32 [layers, E], each one's slot, or below zero."""
        for layer in map(LayerIndex, range(self._catalog.num_layers)):
            routed = self._non_expert.attend_and_route(layer, chunk, x)
            x = routed.residual
            if routed.routing.expert_ids.shape[1]:
                x = self._with_experts(layer, routed, residency[layer])
        return x

    def _with_experts(self, layer: LayerIndex, routed: Routed, slots: IntArray) -> FloatArray:
        parts = []
        for role, work in dispatch(routed.routing, owners_of(slots >= 0)).items():
            compute = self._hot if role is BackendRole.HOT else self._cold
            values = compute(layer, work, routed.x, slots)
            parts.append(Contributions(work.rows, work.slots, values))
        num_slots = routed.routing.expert_ids.shape[1]
        sums = self._kernels.dense.combine(routed.residual, parts, num_slots)
        return sums if routed.ending is None else routed.ending.finish(sums)

    def _hot(
        self, layer: LayerIndex, work: ExpertDispatch, x: FloatArray, slots: IntArray
    ) -> FloatArray:
        assert self._experts is not None, "without experts there all are cold"
        sent = self._experts.sent(x)
        return self._experts.outputs(layer, work, slots[work.experts], sent, prompt=False)

    def _cold(
        self, layer: LayerIndex, work: ExpertDispatch, x: FloatArray, _: IntArray
    ) -> FloatArray:
        stack = self._catalog.stack(layer)
        given = ExpertWork(stack, work.experts, work.counts, x, work.rows, work.weights)
        return self._kernels.expert_outputs(given)


def check_shared_steps(
    device: DeviceSharedStep,
    handoff: Handoff,
    non_expert: DeviceNonExpert,
    layers: LayerByLayer,
    residency: IntArray,
) -> None:
    """Compute steps of every size both ways. The lanes are idle, and the slots of `residency` are held.

    Raises DeviceFaultError where they differ, and StepLostError.
    """
    rng = np.random.default_rng(0)
    for power in range(handoff.max_rows.bit_length()):
        chunk = spare_chunk(
            power,
            SegmentKind.DECODE,
            np.zeros(1, np.int32),
            non_expert.spare,
            non_expert.block_tokens,
            num_sequences=1 << power,
        )
        # Equal rows, since all of them lie in one place.
        row = rng.standard_normal((1, non_expert.spec.hidden_size)).astype(np.float32)
        x = np.repeat(row, 1 << power, axis=0)
        expected = layers.step(chunk, x, residency)
        step = SharedStep(0, chunk, x, residency, _nothing)
        device.prepare(handoff, step)
        for _ in range(_TURNS):
            epoch, lost = handoff.begin(), True
            device.launch(handoff, replace(step, epoch=epoch))
            try:
                handoff.serve(len(x), epoch)
                lost = False
            finally:
                found = device.finish(len(x), lost=lost)
            _compare(found, expected, non_expert)


def _nothing() -> None:
    """Count nothing: no request has this step."""


def _compare(found: FloatArray, expected: FloatArray, device: DeviceNonExpert) -> None:
    error = float(np.square(found - expected).mean() / max(np.square(expected).mean(), 1e-30))
    if not error <= _MAX_ERROR:  # NaN, too
        raise DeviceFaultError(
            f"a decode step of {len(found)} tokens that {device} and the CPU share comes out differently from its "
            f"layers one after another (relative mean square {error:.2g}). Fix: another driver, torch or Triton"
        )
