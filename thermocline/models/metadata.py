"""Reads a model's dimensions from metadata with checks that every architecture needs.

Knows the keys' meaning, not what an architecture does with them. A missing or impossible value is a
ModelFileError that names the key.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.kernels.dense_contract import Gating
from thermocline.messages import Pooling
from thermocline.modelfile.cursor import quoted
from thermocline.modelfile.layout import without_padding
from thermocline.models.rope import LinearScaling, RopeScaling, Yarn
from thermocline.models.spec import NO_EXPERTS, ModelSpec, RouterRule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thermocline.kernels.delta_contract import DeltaShape
    from thermocline.modelfile.layout import TensorInfo
    from thermocline.modelfile.reader import ModelFile

RERANKING_HEAD: Final = "cls.output.weight"
"""The matrix of a reranker's outputs, of which the softmax's first is the score."""
_RERANKERS: Final = ("qwen3",)
_WITH_MULTIPLIER: Final = ("mistral3",)
_PAIRS: Final = "tokenizer.chat_template.rerank"
_FIX = "convert or download the model again"
# Far above any published model: a larger value means that the file is damaged.
_MAX_SIZE = 1 << 24
# Experts are sorted as 16-bit numbers.
_MAX_EXPERTS: Final = 1 << 16


class SpecReader:
    """Typed reads of `{architecture}.*` keys of one file."""

    def __init__(self, file: ModelFile, *, is_latent: bool = False, uneven: bool = False) -> None:
        """is_latent: its attention is, whose keys mean otherwise. uneven: a value may have other than a key's numbers."""
        self._file = file
        self._is_latent = is_latent
        self._uneven = uneven
        self._metadata = file.metadata
        self._prefix = f"{file.architecture}."

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a count of at least 1; the default, if given, where the key is missing."""
        return self._count(key, default, least=least)

    def sizes(self, key: str, num_layers: int, *, least: int = 1) -> tuple[int, ...]:
        """Return a count of at least 1 for each layer; the file may have one for all."""
        name = self._prefix + key
        if self._metadata.is_array(name):
            values = self._metadata.get_ints(name)[:num_layers]
        else:
            values = (self._metadata.get_int(name),) * num_layers
        if len(values) != num_layers or not all(least <= value <= _MAX_SIZE for value in values):
            raise self._bad(
                f"{name} must be a number of {least}..{_MAX_SIZE}, or one for each layer"
            )
        return values

    def integers(self, key: str, length: int, *, least: int = 0) -> tuple[int, ...]:
        """Return the first so many whole numbers of an array, which may be of any size."""
        values = self._metadata.get_ints(self._prefix + key)[:length]
        if len(values) < length or min(values, default=0) < least:
            raise self.bad(key, f"must have {length} entries, each at least {least}")
        return values

    def same_size(self, key: str, num_layers: int, default: int) -> int:
        """Return a count of at least 1 that all layers have in common."""
        if self._prefix + key not in self._metadata:
            return default
        values = set(self.sizes(key, num_layers))
        if len(values) > 1:
            raise self._unsupported(f"{self._prefix}{key} that differs by layer: {sorted(values)}")
        return values.pop()

    def attention_heads(self, key: str, num_layers: int) -> tuple[tuple[int, ...], int]:
        """Return a count for each layer, 0 for those that do not attend, and the count that the others have in common."""
        counts = self.sizes(key, num_layers, least=0)
        found = set(counts) - {0}
        if not found:
            raise self._unsupported(f"{self._prefix}{key} of 0 in every layer: no attention")
        if len(found) > 1:
            raise self._unsupported(f"{self._prefix}{key} that differs by layer: {sorted(found)}")
        return counts, found.pop()

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return a boolean; the default, if given, where the key is missing."""
        name = self._prefix + key
        if default is not None and name not in self._metadata:
            return default
        return self._metadata.get_bool(name)

    def gating(self, default: Gating | None = None) -> Gating:
        """Return how router logits become scores; the default, if given, where the key is missing."""
        name = self._prefix + "expert_gating_func"
        if default is None:
            value = self._metadata.get_int(name)
        else:
            value = self._metadata.get_int(name, default=int(default))
        if value not in tuple(Gating):
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

    def required_flags(self, key: str, num_layers: int) -> tuple[bool, ...]:
        """Return a boolean for each layer."""
        flags = self.layer_flags(key, num_layers)
        if len(flags) != num_layers:
            raise self._bad(f"{self._prefix}{key} must have a boolean for each layer")
        return flags

    def refuse_rope_scaling(self) -> None:
        """Refuse scaled rotary embedding, for an architecture without it."""
        if self.rope_scaling() is not None:
            raise self._unsupported(f"{self._prefix}rope.scaling.factor, or another scaling")

    def layer_flags(self, key: str, num_layers: int) -> tuple[bool, ...]:
        """Return a boolean for each layer; () where the key holds no array."""
        name = self._prefix + key
        if not self._metadata.is_array(name):
            return ()
        found = self._metadata.get_bools(name)
        if len(found) < num_layers:
            raise self._bad(f"{name} has {len(found)} entries for {num_layers} layers")
        return found[:num_layers]

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

    def count(self, key: str, default: int | None = None) -> int:
        """Return a count of at least 0; the default, if given, where the key is missing."""
        return self._count(key, default, least=0)

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

    def positive_float(
        self, key: str, default: float | None = None, zero: float | None = None
    ) -> float:
        """Return a finite number above zero. zero: what 0 stands for, where it is allowed."""
        name = self._prefix + key
        metadata = self._metadata
        value = metadata.get_float(name) if default is None else metadata.get_float(name, default)
        if value == 0 and zero is not None:
            return zero
        if not (math.isfinite(value) and value > 0):
            raise self._bad(f"{name} is {value}; it must be a positive number")
        return value

    def require_equal(self, key: str, expected: int) -> None:
        """Refuse the file if the key is there and differs from what this architecture supports."""
        value = self._metadata.get_int(self._prefix + key, default=expected)
        if value != expected:
            raise self._unsupported(f"{self._prefix}{key} = {value} (only {expected} is supported)")

    def bad(self, key: str, what: str) -> ModelFileError:
        """Return the error of a key whose value does not go with others. what: a sentence about it without its subject."""
        return self._bad(f"{self._prefix}{key} {what}")

    def unsupported(self, what: str) -> UnsupportedModelError:
        """Return the error of something that is not supported. what: its key and value, or words for it."""
        return self._unsupported(f"{self._prefix}{what}")

    def require_alike(self, fix: str, *keys: str) -> None:
        """Refuse the file if one of these keys has a number for each layer. fix: what can be done."""
        for name in (self._prefix + key for key in keys):
            if self._metadata.is_array(name):
                raise self._unsupported(f"{name} of each layer's own", fix)

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

    def refuse(self, *keys: str) -> None:
        """Refuse the file if it has one of these keys: they would change the result."""
        for name in (self._prefix + key for key in keys):
            if name in self._metadata:
                raise self._unsupported(name)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The file's tensors by name."""
        return self._file.tensors

    def has(self, key: str) -> bool:
        """Whether the file states this key."""
        return self._prefix + key in self._metadata

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

    def _count(self, key: str, default: int | None, *, least: int) -> int:
        name = self._prefix + key
        metadata = self._metadata
        value = metadata.get_int(name) if default is None else metadata.get_int(name, default)
        if not least <= value <= _MAX_SIZE:
            raise self._bad(f"{name} is {value}; it must lie in {least}..{_MAX_SIZE}")
        return value

    def _bad(self, what: str) -> ModelFileError:
        return ModelFileError(self._file.path, what, fix=_FIX)

    def _unsupported(self, what: str, fix: str = "use a file without it") -> UnsupportedModelError:
        return UnsupportedModelError(
            self._file.path,
            f"the {self._file.architecture} model needs something that is not supported",
            unsupported=(what,),
            fix=fix,
        )
