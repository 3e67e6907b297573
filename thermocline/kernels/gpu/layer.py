"""The non-expert weights of a layer on a device: attention or another mixer, the shared expert, the router.

The twin of `models.layers`, on tensors. Never waits for the device, so that it can be captured.
Knows no architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from thermocline.kernels.compressed_weights import CompressedWeights
from thermocline.kernels.dense_contract import Activation
from thermocline.kernels.gpu.activations import activate
from thermocline.kernels.gpu.attention import LOG2_E, attention, rule_of
from thermocline.kernels.gpu.cache import DeviceLayerCache, DeviceStates
from thermocline.kernels.gpu.delta import DeltaTokens, DeviceDeltaRule, delta_rule, key_heads
from thermocline.kernels.gpu.dense import (
    DeviceNorm,
    DevicePostNorm,
    DeviceRope,
    DeviceRouting,
    gate,
    rms_norm,
    rotate,
    route,
)
from thermocline.kernels.gpu.latent import DeviceLatent
from thermocline.kernels.gpu.recurrent import DeviceRecurrent
from thermocline.kernels.whole_layer import (
    AttentionWeights,
    DeltaWeights,
    HandedOn,
    LatentWeights,
    RecurrentWeights,
)

if TYPE_CHECKING:
    from thermocline.kernels.dense_contract import Centering, PostNorm
    from thermocline.kernels.gpu.step import StepInputs
    from thermocline.kernels.gpu.weights import DeviceMatrix, MatrixLoader
    from thermocline.kernels.weight import FloatArray, Weight
    from thermocline.kernels.whole_layer import LayerParts, MoeWeights, OutputGate, SharedExpert


class LayerOutput(NamedTuple):
    """residual, x: float32 [T, D], as in `Routed`; ids int64 and weights float32 [T, chosen], None in a dense
    layer. kept: the residual stream and the shared expert's output [T, D], of a layer that norms its experts' sum.
    """

    residual: torch.Tensor
    x: torch.Tensor
    ids: torch.Tensor | None
    weights: torch.Tensor | None
    kept: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Gate:
    activation: Activation
    weight: DeviceMatrix | None

    @classmethod
    def load(cls, load: MatrixLoader, given: OutputGate) -> _Gate:
        weight = None if given.weight is None else load.matrix(given.weight)
        return cls(given.activation, weight)


class DeviceAttention:
    """`AttentionWeights` on a device."""

    def __init__(
        self, load: MatrixLoader, given: AttentionWeights, rope: DeviceRope | None, head_dim: int
    ) -> None:
        """rope: None for heads that do not turn."""
        self._norm = load_norm(load, given.norm, given.head_norm.epsilon, given.centering)
        assert given.k is not None, (
            "no device reads another layer's keys, which `ModelSpec.cpu_only` says"
        )
        assert given.v is not None, "keys and values come together"
        own = (given.q, given.k) if given.v is given.k else (given.q, given.k, given.v)
        self._products = tuple(load.matrix(weight) for weight in own)
        self._output = load.matrix(given.output)
        norm = given.head_norm
        self._head_gains = tuple(optional_vector(load, gain) for gain in (norm.q_gain, norm.k_gain))
        self._value_gain = optional_vector(load, norm.v_gain)
        self._epsilon, self._norm_last = given.head_norm.epsilon, given.head_norm.last
        self._biases = given.biases and tuple(load.vector(bias) for bias in given.biases)
        self._clip = given.clip
        self._wide_gains = given.wide_norm and tuple(load.vector(gain) for gain in given.wide_norm)
        self._gate = None if given.gate is None else _Gate.load(load, given.gate)
        self._rope, self._head_dim = rope, head_dim
        sinks = None if given.sinks is None else load.vector(given.sinks * np.float32(LOG2_E))
        self._rule = rule_of(
            given.scale,
            given.window,
            sinks,
            chunked=given.chunked,
            temperature=given.temperature,
        )
        self._output_bias = optional_vector(load, given.output_bias)
        self._post_norm = None if given.post_norm is None else _post_norm(load, given.post_norm)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """Return what attention takes of x."""
        return self._norm(x)

    def __call__(
        self,
        x: torch.Tensor,
        inputs: StepInputs,
        cache: DeviceLayerCache,
        normed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x plus attention over it; appends the chunk's keys and values to the cache.

        normed: what `normed` gives of x, where that is known.
        """
        normed = self.normed(x) if normed is None else normed
        q, k, *values = (
            weight.multiply(normed, prompt=inputs.is_prompt) for weight in self._products
        )
        v = values[0] if values else k
        gates = None
        if self._gate is not None:
            q, gates = self._split_gates(self._gate, q, normed, prompt=inputs.is_prompt)
        q, k, v = self._heads(q, k, v)
        rope = None if self._rope is None else self._rope.at(inputs.positions)
        slots, spans, copies = inputs.attention[self._rule.window]
        q, k = (self._turn(x, gain, rope) for x, gain in zip((q, k), self._head_gains, strict=True))
        cache.append(slots, k, v)
        cache.copy(copies)
        attended = attention(q, spans, cache, self._rule)
        if self._gate is not None and gates is not None:
            rows = attended.reshape(gates.shape[0], -1)
            attended = gate(rows, gates, self._gate.activation)
        attended = attended.reshape(len(x), -1)
        out = self._output.multiply(attended, prompt=inputs.is_prompt)
        if self._output_bias is not None:
            out = out + self._output_bias
        return x + out if self._post_norm is None else self._post_norm.add(x, out)

    def _split_gates(
        self, given: _Gate, q: torch.Tensor, normed: torch.Tensor, *, prompt: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q without the gate's rows, and the gate [T * heads, 1 or value_dim]."""
        if given.weight is None:
            pairs = q.view(-1, 2, self._head_dim)
            return pairs[:, 0].reshape(len(q), -1), pairs[:, 1]
        num_heads = q.shape[1] // self._head_dim
        return q, given.weight.multiply(normed, prompt=prompt).view(len(q) * num_heads, -1)

    def _heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q and k [T, heads, head_dim] and v [T, heads, value_dim], with the biases, limits and norms over all heads there are."""
        if self._biases is not None:
            q, k, v = (part + bias for part, bias in zip((q, k, v), self._biases, strict=True))
        if self._clip:
            q, k, v = (part.clamp(-self._clip, self._clip) for part in (q, k, v))
        if self._wide_gains is not None:
            q, k = (
                rms_norm(part, gain, self._epsilon)
                for part, gain in zip((q, k), self._wide_gains, strict=True)
            )
        q, k = (part.reshape(len(part), -1, self._head_dim) for part in (q, k))
        v = v.reshape(len(v), k.shape[1], -1)
        if self._value_gain is not None:
            v = rms_norm(v, self._value_gain, self._epsilon)
        return q, k, v

    def _turn(
        self, x: torch.Tensor, gain: torch.Tensor | None, rope: DeviceRope | None
    ) -> torch.Tensor:
        """Return x [T, heads, head_dim] turned, with the norm of each head before or after that."""
        if gain is not None and not self._norm_last:
            x = rms_norm(x, gain, self._epsilon)
        if rope is not None:
            x = rotate(x, rope)
        return rms_norm(x, gain, self._epsilon) if gain is not None and self._norm_last else x


def load_norm(
    load: MatrixLoader, gain: FloatArray, epsilon: float, centering: Centering | None
) -> DeviceNorm:
    """Return a norm of the residual stream on the device."""
    bias = None if centering is None else optional_vector(load, centering.bias)
    return DeviceNorm(load.vector(gain), epsilon, centering is not None, bias)


def optional_vector(load: MatrixLoader, values: FloatArray | None) -> torch.Tensor | None:
    """Return a vector on the device, None for none."""
    return None if values is None else load.vector(values)


def _post_norm(load: MatrixLoader, given: PostNorm) -> DevicePostNorm:
    parts = None
    if given.parts is not None:
        parts = load.vector(given.parts[0]), load.vector(given.parts[1])
    return DevicePostNorm(load.vector(given.gain), given.epsilon, given.scale, parts)


class DeviceDelta:
    """`DeltaWeights` on a device."""

    def __init__(self, load: MatrixLoader, given: DeltaWeights) -> None:
        rule = given.rule
        self._norm = load.vector(given.norm)
        self._mixed = tuple(load.matrix(part) for part in given.mixed)
        self._z, self._alpha = (
            _in_turn(load, *pair)
            for pair in ((given.z_low, given.z), (given.alpha_low, given.alpha))
        )
        self._beta, self._output = (load.matrix(part) for part in (given.beta, given.output))
        self._rule = DeviceDeltaRule(
            rule.shape,
            conv=load.vector(rule.conv),
            step_bias=load.vector(rule.step_bias),
            decay=load.vector(rule.decay),
            gain=load.vector(rule.gain),
            heads=torch.tensor(key_heads(rule.shape), device=self._norm.device),
            epsilon=rule.epsilon,
            sigmoid_gate=rule.sigmoid_gate,
        )

    def __call__(self, x: torch.Tensor, inputs: StepInputs, states: DeviceStates) -> torch.Tensor:
        """Return x plus the delta rule over it; updates the sequences' states."""
        normed = rms_norm(x, self._norm, self._rule.epsilon)
        prompt = inputs.is_prompt
        mixed = [weight.multiply(normed, prompt=prompt) for weight in self._mixed]
        z, alpha = (_product(part, normed, prompt=prompt) for part in (self._z, self._alpha))
        beta = self._beta.multiply(normed, prompt=prompt)
        given = DeltaTokens(mixed[0] if len(mixed) == 1 else torch.cat(mixed, 1), z, alpha, beta)
        out = delta_rule(given, self._rule, inputs.delta, states)
        return x + self._output.multiply(out, prompt=prompt)


def _in_turn(load: MatrixLoader, *weights: Weight | None) -> tuple[DeviceMatrix, ...]:
    """Return the matrices of a product, or of two where there is one before it."""
    return tuple(load.matrix(weight) for weight in weights if weight is not None)


def _product(weights: tuple[DeviceMatrix, ...], x: torch.Tensor, *, prompt: bool) -> torch.Tensor:
    for weight in weights:
        x = weight.multiply(x, prompt=prompt)
    return x


def _shared_biases(load: MatrixLoader, given: SharedExpert) -> tuple[torch.Tensor, ...] | None:
    """Return the biases of gate, up and down on the device, as far as there are; None without any."""
    parts = given.stack.bias_parts
    return tuple(load.vector(part.raw[0, 0].view(np.float32)) for part in parts) or None


class _Shared:
    """`SharedExpert` on a device."""

    def __init__(self, load: MatrixLoader, given: SharedExpert) -> None:
        expert, self._activation = given.stack[0], given.stack.activation
        self._limits = given.stack.limits
        self._gate = None if expert.gate is None else load.matrix(expert.gate)
        self._up, self._down = load.matrix(expert.up), load.matrix(expert.down)
        self._biases = _shared_biases(load, given)
        self._weight = None if given.gate is None else load.matrix(given.gate, exact=True)

    def __call__(self, x: torch.Tensor, *, prompt: bool) -> torch.Tensor:
        gate_values = None if self._gate is None else self._gate.multiply(x, prompt=prompt)
        up = self._up.multiply(x, prompt=prompt)
        if self._biases is not None:
            *gate_bias, up_bias, _ = self._biases
            gate_values = None if gate_values is None else gate_values + gate_bias[0]
            up = up + up_bias
        inner = activate(self._activation, gate_values, up, self._limits)
        out = self._down.multiply(inner, prompt=prompt)
        if self._biases is not None:
            out = out + self._biases[-1]
        if self._weight is None:
            return out
        return gate(out, self._weight.multiply(x, prompt=prompt), Activation.SIGMOID)


class _Router:
    """`MoeWeights` without the experts, on a device."""

    def __init__(self, load: MatrixLoader, given: MoeWeights) -> None:
        self._matrix = load.matrix(given.router, exact=True)
        bias, logit_bias = (
            None if each is None else load.vector(each)
            for each in (given.rule.bias, given.rule.logit_bias)
        )
        self.rule, self._weighs_input = given.rule, given.weighs_input
        self._routing = DeviceRouting(given.rule, bias, logit_bias)
        self._own = None
        if given.own is not None:
            self._own = load.vector(given.own.router), load.vector(given.own.experts)

    def choose(
        self, x: torch.Tensor, experts_input: torch.Tensor, *, prompt: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what the experts take, and their ids and weights; the twin of `models.layers._weighed`."""
        ids, weights = route(self._matrix.multiply(x, prompt=prompt), self._routing)
        if self._weighs_input:
            return experts_input * weights, ids, torch.ones_like(weights)
        return experts_input, ids, weights

    def inputs(
        self, x: torch.Tensor, normed: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the router takes, and what its experts take."""
        if self._own is None:
            return normed, normed
        router, experts = self._own
        return rms_norm(x, router, epsilon), rms_norm(x, experts, epsilon)


class DeviceLayer:
    """The non-expert weights of one layer."""

    def __init__(
        self, load: MatrixLoader, parts: LayerParts, rope: DeviceRope | None, head_dim: int
    ) -> None:
        """rope: None without rotary embedding."""
        self._mixer: DeviceAttention | DeviceLatent | DeviceDelta | DeviceRecurrent | None = None
        match parts.mixer:
            case DeltaWeights():
                self._mixer = DeviceDelta(load, parts.mixer)
            case RecurrentWeights():
                self._mixer = DeviceRecurrent(load, parts.mixer)
            case AttentionWeights():
                self._mixer = DeviceAttention(load, parts.mixer, rope, head_dim)
            case LatentWeights():
                assert rope is not None, "latent rows have numbers that turn"
                self._mixer = DeviceLatent(load, parts.mixer, rope)
            case None | CompressedWeights():  # no device computes these
                pass
        self._norm = None
        if parts.norm is not None:
            self._norm = load_norm(load, parts.norm, parts.epsilon, parts.centering)
        self._epsilon, self._handed_on = parts.epsilon, parts.handed_on
        self._shared = None if parts.shared is None else _Shared(load, parts.shared)
        self._router = None if parts.routed is None else _Router(load, parts.routed)
        self._end = None if parts.end is None else _post_norm(load, parts.end)

    @property
    def num_chosen(self) -> int:
        """Experts of each token; 0 in a dense layer."""
        return 0 if self._router is None else self._router.rule.chosen

    def __call__(
        self, memory: DeviceLayerCache | DeviceStates | None, x: torch.Tensor, inputs: StepInputs
    ) -> LayerOutput:
        """Return the routing of x [T, D] after the mixer, and x with the shared expert added.

        memory: the layer's cache, or its states; None for a layer without a mixer.
        """
        handed, given = None, x
        match self._mixer:
            case DeviceAttention() if self._handed_on:
                assert isinstance(memory, DeviceLayerCache), "a layer that attends has a cache"
                handed = self._mixer.normed(x)
                x = self._mixer(x, inputs, memory, handed)
            case DeviceDelta() | DeviceRecurrent():
                assert isinstance(memory, DeviceStates), "a recurrent layer has states"
                x = self._mixer(x, inputs, memory)
            case DeviceAttention() | DeviceLatent():
                assert isinstance(memory, DeviceLayerCache), "a layer that attends has a cache"
                x = self._mixer(x, inputs, memory)
            case None:
                assert memory is None, "a feed-forward alone remembers nothing"
        if self._norm is None:  # a mixer alone
            return LayerOutput(x, x, None, None)
        if handed is None or self._handed_on is not HandedOn.NORMED:
            normed = self._norm(x)
        else:
            normed = handed
        prompt = inputs.is_prompt
        if self._end is not None:
            return self._branches(self._end, x, normed, prompt=prompt)
        residual = x if self._shared is None else x + self._shared(normed, prompt=prompt)
        if self._router is None:
            return LayerOutput(residual, normed, None, None)
        router_input = given if self._handed_on is HandedOn.INPUT else normed
        return LayerOutput(residual, *self._router.choose(router_input, normed, prompt=prompt))

    def finish(self, given: LayerOutput, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output from x, to which its routed experts were added."""
        if self._end is None or not given.kept:
            return x
        stream, shared = given.kept
        return self._end.add(stream, shared, x)

    def _branches(
        self, end: DevicePostNorm, x: torch.Tensor, normed: torch.Tensor, *, prompt: bool
    ) -> LayerOutput:
        """The twin of `models.layers._route_branches`."""
        shared = (
            torch.zeros_like(x) if self._shared is None else self._shared(normed, prompt=prompt)
        )
        if self._router is None:
            return LayerOutput(end.add(x, shared), normed, None, None)
        router_input, experts_input = self._router.inputs(x, normed, self._epsilon)
        chosen = self._router.choose(router_input, experts_input, prompt=prompt)
        return LayerOutput(torch.zeros_like(x), *chosen, (x, shared))
