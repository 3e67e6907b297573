"""Reads a model's dimensions from metadata with checks that every architecture needs.

Knows the keys' meaning, not what an architecture does with them. A missing or impossible value is a
ModelFileError that names the key.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from thermocline.kernels.dense_contract import Gating
from thermocline.messages import Pooling
from thermocline.modelfile.cursor import quoted
from thermocline.modelfile.layout import without_padding
from thermocline.models.key_reader import KeyReader
from thermocline.models.rope import LinearScaling, RopeScaling, Yarn
from thermocline.models.router_rule import NO_EXPERTS, RouterRule
from thermocline.models.spec import ModelSpec

if TYPE_CHECKING:
    from thermocline.kernels.delta_contract import DeltaShape
    from thermocline.modelfile.reader import ModelFile

RERANKING_HEAD: Final = "cls.output.weight"
"""The matrix of a reranker's outputs, of which the softmax's first is the score."""
_RERANKERS: Final = ("qwen3",)
_WITH_MULTIPLIER: Final = ("mistral3",)
_PAIRS: Final = "tokenizer.chat_template.rerank"
# Experts are sorted as 16-bit numbers.
_MAX_EXPERTS: Final = 1 << 16
_GATING_OF_FILES: Final = tuple(set(Gating) - {Gating.NEAR_BEST})


class SpecReader(KeyReader):
    """Reads a model's dimensions, checked."""

    def __init__(self, file: ModelFile, *, is_latent: bool = False, uneven: bool = False) -> None:
        """is_latent: its attention is, whose keys mean otherwise. uneven: a value may have other than a key's numbers."""
        super().__init__(file)
        self._is_latent = is_latent
        self._uneven = uneven

    def attention_heads(self, key: str, num_layers: int) -> tuple[tuple[int, ...], int]:
        """Return a count for each layer, 0 for those that do not attend, and the count that the others have in common."""
        counts = self.sizes(key, num_layers, least=0)
        found = set(counts) - {0}
        if not found:
            raise self._unsupported(f"{self._prefix}{key} of 0 in every layer: no attention")
        if len(found) > 1:
            raise self._unsupported(f"{self._prefix}{key} that differs by layer: {sorted(found)}")
        return counts, found.pop()

    def gating(self, default: Gating | None = None) -> Gating:
        """Return how router logits become scores; the default, if given, where the key is missing."""
        name = self._prefix + "expert_gating_func"
        if default is None:
            value = self._metadata.get_int(name)
        else:
            value = self._metadata.get_int(name, default=int(default))
        if value not in _GATING_OF_FILES:
            raise self._unsupported(f"{name} = {value}")
        return Gating(value)

    def window_pattern(
        self, num_layers: int, period: int, *, full_last: bool = False
    ) -> tuple[bool, ...]:
        """Return by layer whether it has a sliding window.

        The file may name a period, whose first (or last) layer has none, or say it layer by layer. As in llama.cpp,
        a period of 0 gives every layer a window where the last one of a period would have none.
        """
        key = "attention.sliding_window_pattern"
        if flags := self.layer_flags(key, num_layers):
            return flags
        period = self._metadata.get_int(self._prefix + key, default=period)
        if full_last:
            return tuple(period < 1 or (n + 1) % period != 0 for n in range(num_layers))
        return tuple(period > 0 and index % period != 0 for index in range(num_layers))

    def refuse_rope_scaling(self) -> None:
        """Refuse scaled rotary embedding, for an architecture without it."""
        if self.rope_scaling() is not None:
            raise self._unsupported(f"{self._prefix}rope.scaling.factor, or another scaling")

    def rope_scaling(self) -> RopeScaling | None:
        """Return how rotary embedding is scaled for longer contexts; None where it is not.

        As in llama.cpp, a factor without a type is linear scaling, and 0 and 1 mean none. The original context defaults
        to the model's.
        """
        kind = self._metadata.get_str(self._prefix + "rope.scaling.type", default="linear")
        key = "rope.scaling.factor"
        if self._prefix + key not in self._metadata:
            key = "rope.scale_linear"
        factor = self.positive_float(key, default=1.0, zero=1.0)
        if kind == "linear":
            return None if factor == 1.0 else LinearScaling(factor)
        if kind == "yarn":
            return self._yarn(self.positive_float("rope.scaling.factor"))
        if kind == "none":
            return None
        raise self._unsupported(f"{self._prefix}rope.scaling.type = {quoted(kind)}")

    def _yarn(self, factor: float) -> Yarn:
        name = self._prefix + "rope.scaling.yarn_log_multiplier"
        multiplier = self._metadata.get_float(name, default=0.0)
        if multiplier and not self._is_latent and self._file.architecture not in _WITH_MULTIPLIER:
            raise self._unsupported(f"{name} = {multiplier}")
        usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        # An explicit factor comes on top of the usual one.
        magnitude = self.positive_float("rope.scaling.attn_factor", default=1.0)
        magnitude *= self.positive_float("rope.scaling.yarn_attn_factor", default=usual)
        return Yarn(
            factor=factor,
            original_context=self.size(
                "rope.scaling.original_context_length", default=self.size("context_length")
            ),
            beta_fast=self.positive_float("rope.scaling.yarn_beta_fast", default=32.0),
            beta_slow=self.positive_float("rope.scaling.yarn_beta_slow", default=1.0),
            magnitude=magnitude,
        )

    def decoder_layers(self, num_blocks: int) -> tuple[int, int]:
        """Return how many blocks are layers, and how many at the end predict further tokens.

        A file may name such blocks and lack them. Where its last blocks are plain ones, all are layers.
        """
        num_extra = self.count("nextn_predict_layers", default=0)
        if num_extra >= num_blocks:
            raise self._bad(
                f"{self._prefix}nextn_predict_layers is {num_extra}, of {num_blocks} blocks in all"
            )
        tensors, first = self._file.tensors, f"blk.{num_blocks - num_extra}."
        if num_extra and f"{first}attn_norm.weight" in tensors:
            if "blk.0.attn_norm.weight" not in tensors:
                raise self._unsupported("a file of nothing but blocks that guess further tokens")
            if f"{first}nextn.eh_proj.weight" not in tensors:
                return num_blocks, 0
        return num_blocks - num_extra, num_extra

    def rotary_dims(
        self, head_dim: int, key: str = "rope.dimension_count", default: int | None = None
    ) -> int:
        """Return how many first dimensions of a head turn: an even number of at most head_dim."""
        dims = self.size(key, default=default)
        if dims % 2 or dims > head_dim:
            raise self._bad(
                f"{self._prefix}{key} is {dims}; it must be even, and at most {head_dim}"
            )
        return dims

    def either_epsilon(self) -> float:
        """Return the norms' epsilon; a file without its key has it under the other norm's."""
        key, other = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
        return self.positive_float(key if self._prefix + key in self._metadata else other)

    def check_delta(self, shape: DeltaShape) -> None:
        """Refuse inconsistent sizes of a gated delta rule."""
        width = self.size("ssm.inner_size")
        if shape.value_heads % shape.key_heads:
            raise self._bad(f"{self._prefix}ssm.time_step_rank is no multiple of ssm.group_count")
        if shape.value_width != width:
            raise self._bad(
                f"{self._prefix}ssm.inner_size is {width}, no multiple of ssm.time_step_rank"
            )
        if shape.conv_width < 2:
            raise self._bad(
                f"{self._prefix}ssm.conv_kernel is {shape.conv_width}; it must be at least 2"
            )

    def leading_dense(self, num_layers: int, default: int | None = None) -> int:
        """Return how many first layers have no routed experts: fewer than all."""
        num_dense = self.count("leading_dense_block_count", default)
        if num_dense >= num_layers:
            what = f"is {num_dense}, of {num_layers} layers in all"
            raise self.bad("leading_dense_block_count", what)
        return num_dense

    def require_rotary(self) -> None:
        """Refuse a file whose heads do not turn, which says so by a flag that is usually left out."""
        name = self._prefix + "rope.scaling.finetuned"
        if not self._metadata.get_bool(name, default=True):
            raise self._unsupported(f"{name} = false, which is attention without positions")

    def refuse_other_attention(self) -> None:
        """Refuse attention that sees later tokens, or a window, for an architecture with neither."""
        if not self._metadata.get_bool(self._prefix + "attention.causal", default=True):
            raise self._unsupported(f"{self._prefix}attention.causal = false")
        self.require_equal("attention.sliding_window", 0)

    def expert_intermediate_size(self, num_experts_used: int) -> int:
        """Return the width of one expert; files without the key divide the dense width."""
        if self._prefix + "expert_feed_forward_length" in self._metadata:
            return self.size("expert_feed_forward_length")
        return self.size("feed_forward_length") // num_experts_used

    def refuse_expert_scale(self) -> None:
        """Refuse a factor on routing weights other than 0 and 1, for an architecture without one."""
        value = self._metadata.get_float(self._prefix + "expert_weights_scale", default=1.0)
        if value not in (0.0, 1.0):
            raise self._unsupported(f"{self._prefix}expert_weights_scale = {value}")

    def dense_decoder(
        self,
        *,
        num_kv_heads: int | None = None,
        width: int | None = None,
        epsilon: float | None = None,
        most_experts: int = 0,
    ) -> ModelSpec:
        """Return the same dimensions of a model without routed experts, checked.

        num_kv_heads, epsilon: as for `decoder`; width: the feed-forward's largest, where layers differ. most_experts: how
        many the file may name and not have.
        """
        if self.count("expert_count", default=0) > most_experts:
            raise self._unsupported(f"{self._prefix}expert_count, in this architecture")
        spec = self._decoder(NO_EXPERTS, 0, None, num_kv_heads, epsilon)
        width = width or self.size("feed_forward_length")
        return replace(spec, num_dense_layers=spec.num_layers, dense_intermediate_size=width)

    def decoder(
        self,
        *,
        normalize_top_k: bool,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        epsilon: float | None = None,
        used: int | None = None,
        width: int | None = None,
    ) -> ModelSpec:
        """Return the dimensions by the keys that all architectures share, checked.

        num_heads, num_kv_heads, used, width: the largest, where layers differ. epsilon: where another key may hold it.
        """
        used = used or self.size("expert_used_count")
        router = self._router(used, normalize_top_k)
        width = width or self.expert_intermediate_size(used)
        return self._decoder(router, width, num_heads, num_kv_heads, epsilon)

    def _decoder(
        self,
        router: RouterRule,
        expert_width: int,
        num_heads: int | None,
        num_kv_heads: int | None,
        epsilon: float | None = None,
    ) -> ModelSpec:
        hidden = self.size("embedding_length")
        heads = self.size("attention.head_count") if num_heads is None else num_heads
        num_layers = self.size("block_count")
        head_dim = self.size("attention.key_length", default=hidden // heads)
        pooling = self._pooling()
        if not (self._is_latent or self._uneven):
            self.require_equal("attention.value_length", head_dim)
        return self.checked(
            ModelSpec(
                architecture=self._file.architecture,
                name=self.model_name(),
                num_layers=num_layers,
                hidden_size=hidden,
                num_heads=heads,
                num_kv_heads=num_kv_heads
                or self.same_size("attention.head_count_kv", num_layers, heads),
                head_dim=head_dim,
                vocab_size=self.vocab_size("token_embd.weight"),
                context_length=self.size("context_length"),
                rope_base=self.positive_float("rope.freq_base", default=10000.0),
                rms_epsilon=epsilon or self.positive_float("attention.layer_norm_rms_epsilon"),
                rope_scaling=self.rope_scaling(),
                expert_intermediate_size=expert_width,
                router=router,
                own_pooling=pooling,
                num_scores=self._num_scores(pooling),
            )
        )

    def _router(self, used: int, normalize: bool) -> RouterRule:
        """Return the router's rule with its groups of experts, checked."""
        experts = self.size("expert_count")
        groups = max(self.count("expert_group_count", default=0), 1)
        if groups == 1:
            return RouterRule(experts, used, normalize)
        groups_used = self.size("expert_group_used_count")
        return self.grouped(RouterRule(experts, used, normalize), groups, groups_used)

    def grouped(self, rule: RouterRule, groups: int, groups_used: int) -> RouterRule:
        """Return the rule with groups of experts, checked."""
        experts, used, members = rule.num_experts, rule.num_experts_used, rule.num_experts // groups
        if experts % groups or members < 2 or not used <= groups_used * members <= experts:
            raise self._bad(
                f"{self._prefix}expert_group_count is {groups} and expert_group_used_count {groups_used}; "
                f"{experts} experts must make equal groups of two or more, whose used ones have {used} experts"
            )
        return replace(rule, num_groups=groups, num_groups_used=groups_used)

    def vocab_size(self, embedding: str) -> int:
        """Return the number of rows of the embedding, which is the true vocabulary size."""
        info = self._file.tensors.get(embedding)
        if info is None or len(shape := without_padding(info.shape)) != 2:
            raise self._bad(f"tensor {embedding!r} is missing or is not a matrix")
        return shape[0]

    def model_name(self) -> str:
        """Return general.name, or the file's name."""
        return self._metadata.get_str("general.name", default=Path(self._file.path).stem)

    def checked(self, spec: ModelSpec) -> ModelSpec:
        """Return `spec` if its numbers are consistent. Raises ModelFileError."""
        shapes = set(spec.kv_shapes)
        rules = (
            (
                all(spec.num_heads % of.kv_heads == 0 for of in shapes),
                "head_count is no multiple of head_count_kv",
            ),
            (
                self._is_latent or all(of.head_dim % 2 == 0 for of in shapes),
                "the head size is odd, so rotary embedding can not pair it",
            ),
            (
                spec.router.num_experts_used <= spec.router.num_experts,
                "expert_used_count exceeds expert_count",
            ),
            (
                spec.router.num_experts <= _MAX_EXPERTS,
                f"expert_count is more than the {_MAX_EXPERTS} that are supported",
            ),
        )
        for holds, what in rules:
            if not holds:
                raise self._bad(f"{self._prefix}*: {what}")
        kinds = set(zip(spec.layer_kinds, spec.kv_shapes, strict=True))
        if len(kinds) > len(set(spec.layer_kinds)):
            raise self._unsupported(
                f"{self._prefix}attention.head_count_kv that differs between layers of one kind"
            )
        return spec

    def _pooling(self) -> Pooling | None:
        name = self._prefix + "pooling_type"
        if name not in self._metadata:
            return None
        value = self._metadata.get_int(name)
        if value not in tuple(Pooling):
            raise self._unsupported(f"{name} = {value}")
        return Pooling(value)

    def _num_scores(self, pooling: Pooling | None) -> int:
        """Return how many outputs a reranker's head has; 0 for a model of text."""
        head = self._file.tensors.get(RERANKING_HEAD)
        if pooling is not Pooling.RANK or head is None:
            return 0
        what = (
            f"{RERANKING_HEAD}, the head of a reranker, which scores pairs of texts and writes none"
        )
        if self._file.architecture not in _RERANKERS:
            fix = "use Qwen3-Reranker, or the family's model for text or for embeddings"
            raise self._unsupported(what, fix)
        if _PAIRS not in self._metadata:
            fix = f"convert the model again with a current converter, which writes {_PAIRS}"
            raise self._unsupported(f"{what}, without the form of a pair", fix)
        return head.shape[0]
