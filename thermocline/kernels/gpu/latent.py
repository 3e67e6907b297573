"""Multi-head latent attention on a device: queries go to the rows that all heads share, for prompts and for answers.

The twin of `models.layers.begin_latent_attention`, on tensors. Never waits for the device, so that it can be captured. Knows no
request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from thermocline.kernels.dense_contract import Activation
from thermocline.kernels.gpu.attention import attention, rule_of
from thermocline.kernels.gpu.dense import DeviceRope, gate, rms_norm, rotate

if TYPE_CHECKING:
    from thermocline.kernels.gpu.cache import DeviceLayerCache
    from thermocline.kernels.gpu.step import StepInputs
    from thermocline.kernels.gpu.weights import MatrixLoader
    from thermocline.kernels.whole_layer import LatentWeights


class DeviceLatent:
    """`LatentWeights` on a device."""

    def __init__(self, load: MatrixLoader, given: LatentWeights, rope: DeviceRope) -> None:
        assert not given.is_by_parts, "such a layer stays on the CPU"
        self._norm, self._epsilon = load.vector(given.norm), given.kv_norm.epsilon
        self._low = None
        if given.low is not None:
            self._low = load.matrix(given.low.weight), load.vector(given.low.gain)
        self._q, self._kv = load.matrix(given.q), load.matrix(given.kv)
        self._kv_gain = load.vector(given.kv_norm.gain)
        self._keys, self._values = load.heads(given.up.keys), load.heads(given.up.values)
        self._num_heads, self._plain = len(given.up.keys), given.up.keys.cols
        self._output = load.matrix(given.output)
        self._gate = None if given.gate is None else load.matrix(given.gate)
        self._rope = replace(rope, pairs=True)
        self._rule = rule_of(given.scale, 0, temperature=given.temperature)

    def __call__(
        self, x: torch.Tensor, inputs: StepInputs, cache: DeviceLayerCache
    ) -> torch.Tensor:
        """Return x plus attention over it; appends the chunk's rows to the cache."""
        prompt = inputs.is_prompt
        normed = rms_norm(x, self._norm, self._epsilon)
        rope = self._rope.at(inputs.positions)
        slots, spans, copies = inputs.attention[0]
        cache.append_rows(slots, self._rows(normed, rope, prompt=prompt))
        cache.copy(copies)
        read = attention(self._queries(normed, rope, prompt=prompt), spans, cache, self._rule)
        values = self._values.multiply(read, prompt=prompt)
        if self._gate is not None:
            gates = self._gate.multiply(normed, prompt=prompt).reshape(-1, 1)
            values = gate(values.reshape(len(gates), -1), gates, Activation.SIGMOID)
        return x + self._output.multiply(values.reshape(len(x), -1), prompt=prompt)

    def _rows(self, normed: torch.Tensor, rope: DeviceRope, *, prompt: bool) -> torch.Tensor:
        """Return what is cached of each token, [T, latent + turned numbers]."""
        kv, latent = self._kv.multiply(normed, prompt=prompt), len(self._kv_gain)
        plain = rms_norm(kv[:, :latent], self._kv_gain, self._epsilon)
        return torch.cat((plain, rotate(kv[:, None, latent:], rope)[:, 0]), dim=-1)

    def _queries(self, normed: torch.Tensor, rope: DeviceRope, *, prompt: bool) -> torch.Tensor:
        """Return queries for rows of the cache, [T, heads, latent + turned numbers]."""
        q = normed
        if self._low is not None:
            matrix, gain = self._low
            q = rms_norm(matrix.multiply(normed, prompt=prompt), gain, self._epsilon)
        heads = self._q.multiply(q, prompt=prompt).view(len(q), self._num_heads, -1)
        absorbed = self._keys.multiply(heads[..., : self._plain], prompt=prompt)
        return torch.cat((absorbed, rotate(heads[..., self._plain :], rope)), dim=-1)
