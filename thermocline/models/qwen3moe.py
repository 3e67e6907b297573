"""qwen3moe: grouped-query attention with per-head q/k norm, every layer routed, no shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thermocline.kernels.dense_contract import HeadNorm
from thermocline.kernels.whole_layer import AttentionWeights, LayerInput, LayerParts
from thermocline.messages import Routing
from thermocline.models.layers import RotaryTable, attend
from thermocline.models.metadata import SpecReader
from thermocline.models.routing import RouterWeights, softmax_rule
from thermocline.models.spec import ModelSpec, RouterRule
from thermocline.models.weights import StackedExperts, WeightMap

if TYPE_CHECKING:
    from thermocline.kernels.contract import FloatArray, IntArray, Kernels
    from thermocline.kv.pool import KVPool
    from thermocline.messages import Chunk, LayerIndex
    from thermocline.modelfile.reader import ModelFile


def read_spec(file: ModelFile) -> ModelSpec:
    """Return the dimensions that the file's metadata state. Raises ModelError."""
    read = SpecReader(file)
    read.refuse_scaled_rope()
    read.refuse_expert_scale()
    hidden = read.size("embedding_length")
    heads = read.size("attention.head_count")
    head_dim = read.size("attention.key_length", default=hidden // heads)
    read.require_equal("attention.value_length", head_dim)
    read.require_equal("rope.dimension_count", head_dim)
    experts = read.size("expert_count")
    used = read.size("expert_used_count")
    return read.checked(
        ModelSpec(
            architecture="qwen3moe",
            name=read.model_name(),
            num_layers=read.size("block_count"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=read.size("attention.head_count_kv", default=heads),
            head_dim=head_dim,
            vocab_size=read.vocab_size("token_embd.weight"),
            context_length=read.size("context_length"),
            rope_base=read.positive_float("rope.freq_base", default=10000.0),
            rms_epsilon=read.positive_float("attention.layer_norm_rms_epsilon"),
            expert_intermediate_size=read.expert_intermediate_size(used),
            router=RouterRule(experts, used, normalize_top_k=True),
        )
    )


class Qwen3Moe:
    """`Model` for general.architecture = qwen3moe."""

    def __init__(self, file: ModelFile, kernels: Kernels) -> None:
        self.spec = spec = read_spec(file)
        self._kernels = kernels
        weights = WeightMap(file)
        self._embedding = weights.matrix("token_embd.weight", spec.vocab_size, spec.hidden_size)
        layers = [_read_layer(weights, spec, n) for n in range(spec.num_layers)]
        self._layers = tuple(parts for parts, _ in layers)
        self.expert_layers = tuple(experts for _, experts in layers)
        self._output_norm = weights.vector("output_norm.weight", spec.hidden_size)
        self._output = self._embedding  # tied, unless the file has a head of its own
        if "output.weight" in weights:
            self._output = weights.matrix("output.weight", spec.vocab_size, spec.hidden_size)
        weights.finish()
        self._rotary = RotaryTable(kernels.dense, spec.head_dim, spec.rope_base)

    def embed(self, token_ids: IntArray) -> FloatArray:
        """See `Model.embed`."""
        return self._kernels.decode_rows(self._embedding, token_ids)

    def attend(self, layer: LayerIndex, chunk: Chunk, x: FloatArray, pool: KVPool) -> FloatArray:
        """See `Model.attend`."""
        weights = self._layers[layer].attention
        return attend(self._kernels, weights, self._rotary, layer, chunk, x, pool)

    def route(self, layer: LayerIndex, x: FloatArray) -> tuple[FloatArray, Routing]:
        """See `Model.route`."""
        parts, dense = self._layers[layer], self._kernels.dense
        normed = dense.rms_norm(x, parts.router_norm, self.spec.rms_epsilon)
        logits = self._kernels.matmul(parts.router, normed)
        return normed, Routing(*dense.route_softmax(logits, parts.rule))

    @property
    def has_whole_layers(self) -> bool:
        """See `Model.has_whole_layers`."""
        return self._kernels.whole_layer is not None

    def layer(
        self, layer: LayerIndex, chunk: Chunk, x: FloatArray, pool: KVPool
    ) -> tuple[FloatArray, Routing]:
        """See `Model.layer`."""
        whole_layer = self._kernels.whole_layer
        assert whole_layer is not None, "has_whole_layers says whether this may be called"
        given = LayerInput(
            x,
            chunk.positions,
            chunk.kv_slots,
            self._rotary.at(chunk.positions),
            chunk.segments,
            pool.layer(layer),
            chunk.is_prompt,
        )
        out, expert_ids, weights = whole_layer(self._layers[layer], given)
        return out, Routing(expert_ids, weights)

    def router_weights(self, layer: LayerIndex) -> RouterWeights:
        """See `Model.router_weights`."""
        parts, rule = self._layers[layer], self.spec.router
        rows = np.arange(rule.num_experts, dtype=np.int32)
        matrix = self._kernels.decode_rows(parts.router, rows)
        epsilon = self.spec.rms_epsilon
        return RouterWeights(parts.router_norm, matrix, epsilon, rule.num_experts_used)

    def head(self, x: FloatArray, *, prompt: bool) -> FloatArray:
        """See `Model.head`."""
        normed = self._kernels.dense.rms_norm(x, self._output_norm, self.spec.rms_epsilon)
        return self._kernels.matmul(self._output, normed, prompt=prompt)


def _read_layer(
    weights: WeightMap, spec: ModelSpec, index: int
) -> tuple[LayerParts, StackedExperts]:
    prefix = f"blk.{index}."
    hidden, head_dim = spec.hidden_size, spec.head_dim
    q_size, kv_size = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
    q_norm = weights.vector(prefix + "attn_q_norm.weight", head_dim)
    k_norm = weights.vector(prefix + "attn_k_norm.weight", head_dim)
    attention = AttentionWeights(
        norm=weights.vector(prefix + "attn_norm.weight", hidden),
        q=weights.matrix(prefix + "attn_q.weight", q_size, hidden),
        k=weights.matrix(prefix + "attn_k.weight", kv_size, hidden),
        v=weights.matrix(prefix + "attn_v.weight", kv_size, hidden),
        output=weights.matrix(prefix + "attn_output.weight", hidden, q_size),
        head_norm=HeadNorm(q_norm, k_norm, spec.rms_epsilon),
        scale=spec.attention_scale,
    )
    experts = weights.experts(
        prefix, spec.router.num_experts, spec.expert_intermediate_size, hidden
    )
    parts = LayerParts(
        attention,
        router_norm=weights.vector(prefix + "ffn_norm.weight", hidden),
        router=weights.matrix(prefix + "ffn_gate_inp.weight", spec.router.num_experts, hidden),
        rule=softmax_rule(spec.router),
        experts=experts.stack,
    )
    return parts, experts
