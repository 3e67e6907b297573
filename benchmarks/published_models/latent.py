"""Published models with latent attention: one row each with the source of every number, and how their files are laid out.

Sources: C is the default of transformers' configuration class, J the model's own config.json (named in `own`).
Vocabularies have the real sizes, kinds of tokens and pre-tokenizers. Knows no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.published_models.families import common
from benchmarks.published_models.shape import Family, Metadata, Part, PublishedModel, Shape
from benchmarks.published_models.vocabulary import Kind, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

_SOFTMAX: Final = 1
_SIGMOID: Final = 2
TEMPLATE: Final = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "<|assistant|>\n{{ message.content }}\n{% else %}<|user|>\n{{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Sizes beside those of `Shape`. query_rank: 0 for one matrix. mscale: of YaRN, 0 without."""

    query_rank: int
    plain: int
    value: int
    shared: int
    is_sigmoid: bool = True
    groups: tuple[int, int] = (1, 1)
    mscale: float = 0.0
    rank: int = 512
    rotary: int = 64


def _metadata(shape: Shape, latent: Latent) -> Metadata:
    """DeepseekV2Model.set_gguf_parameters in conversion/deepseek.py."""
    row = latent.rank + latent.rotary
    found = common(shape) | {
        "attention.head_count_kv": 1,
        "expert_group_count": latent.groups[0],
        "expert_group_used_count": latent.groups[1],
        "leading_dense_block_count": shape.dense_layers,
        "attention.kv_lora_rank": latent.rank,
        "attention.key_length": row,
        "attention.value_length": latent.rank,
        "attention.key_length_mla": latent.plain + latent.rotary,
        "attention.value_length_mla": latent.value,
        "expert_feed_forward_length": shape.expert_width,
        "expert_shared_count": latent.shared,
        "expert_weights_scale": shape.routed_scale,
        "expert_gating_func": _SIGMOID if latent.is_sigmoid else _SOFTMAX,
        "rope.dimension_count": latent.rotary,
    }
    if latent.query_rank:
        found["attention.q_lora_rank"] = latent.query_rank
    if latent.is_sigmoid:
        found["expert_weights_norm"] = True
    if shape.mtp_blocks:
        found["nextn_predict_layers"] = shape.mtp_blocks
    if latent.mscale:
        found["rope.scaling.type"] = "yarn"
        found["rope.scaling.factor"] = 40.0
        found["rope.scaling.original_context_length"] = 4096
        found["rope.scaling.yarn_beta_fast"] = 32.0
        found["rope.scaling.yarn_beta_slow"] = 1.0
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * latent.mscale
    return found


def _block(shape: Shape, block: int, latent: Latent) -> Iterator[Part]:
    hidden = shape.hidden
    yield from latent_attention(shape, latent)
    yield "ffn_norm.weight", (hidden,)
    yield from mixed_feed_forward(shape, block, latent.shared, biased=latent.is_sigmoid)
    if block >= shape.layers:
        yield "nextn.eh_proj.weight", (hidden, 2 * hidden)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            yield f"nextn.{name}.weight", (hidden,)


def latent_attention(shape: Shape, latent: Latent) -> Iterator[Part]:
    """Yield the tensors of a layer's attention, its norm first."""
    hidden, heads, rank = shape.hidden, shape.heads, latent.rank
    rows = heads * (latent.plain + latent.rotary)
    yield "attn_norm.weight", (hidden,)
    if latent.query_rank:
        yield "attn_q_a.weight", (latent.query_rank, hidden)
        yield "attn_q_a_norm.weight", (latent.query_rank,)
        yield "attn_q_b.weight", (rows, latent.query_rank)
    else:
        yield "attn_q.weight", (rows, hidden)
    yield "attn_kv_a_mqa.weight", (rank + latent.rotary, hidden)
    yield "attn_kv_a_norm.weight", (rank,)
    yield "attn_k_b.weight", (heads, rank, latent.plain)
    yield "attn_v_b.weight", (heads, latent.value, rank)
    yield "attn_output.weight", (hidden, heads * latent.value)


def mixed_feed_forward(shape: Shape, block: int, shared: int, *, biased: bool) -> Iterator[Part]:
    """Yield a dense feed-forward, or a router, its experts and so many shared ones. biased: the choice has a bias."""
    hidden, width = shape.hidden, shape.expert_width
    if block < shape.dense_layers:
        yield from feed_forward(hidden, shape.feed_forward or 0, "")
        return
    yield "ffn_gate_inp.weight", (shape.experts, hidden)
    for name, size in feed_forward(hidden, width, "_exps"):
        yield name, (shape.experts, *size)
    if biased:
        yield "exp_probs_b.bias", (shape.experts,)
    yield from feed_forward(hidden, shared * width, "_shexp")


def feed_forward(hidden: int, width: int, suffix: str) -> Iterator[Part]:
    """Yield the three matrices of a feed-forward, or of one expert."""
    yield f"ffn_gate{suffix}.weight", (width, hidden)
    yield f"ffn_up{suffix}.weight", (width, hidden)
    yield f"ffn_down{suffix}.weight", (hidden, width)


def _family(latent: Latent) -> Family:
    return Family(
        "deepseek2",
        lambda shape: _metadata(shape, latent),
        lambda shape, block: _block(shape, block, latent),
    )


def plain_vocabulary(pre: str, size: int, num_bpe: int) -> Vocabulary:
    """Return one whose special tokens follow the others; the first of them begins a text and the second ends it."""
    names = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
    last = tuple((name, Kind.CONTROL) for name in names)
    return Vocabulary(
        pre, size, num_bpe, (), last, TEMPLATE, eos_id=num_bpe + 1, bos_id=num_bpe, add_bos=False
    )


LATENT_ROWS: Final = (
    PublishedModel(
        name="DeepSeek-V2-Lite",
        billions="15.7B",
        family=_family(
            Latent(query_rank=0, plain=128, value=128, shared=2, is_sigmoid=False, mscale=0.707)
        ),
        shape=Shape(
            layers=27,  # J
            hidden=2048,  # J
            feed_forward=10944,  # J
            heads=16,  # J
            kv_heads=16,  # J
            head_dim=64,  # C, what is turned
            context=163840,  # J
            rope_base=1e4,  # C
            rms_epsilon=1e-6,  # C
            experts=64,  # C
            used=6,  # J
            expert_width=1408,  # J
            dense_layers=1,  # J
        ),
        vocabulary=plain_vocabulary("deepseek-llm", 102400, 100000),
        config_class="DeepseekV2Config",
        own=frozenset(
            {"layers", "hidden", "feed_forward", "heads", "kv_heads", "context", "expert_width"}
        ),
    ),
    PublishedModel(
        name="DeepSeek-V3",
        billions="671B",
        family=_family(
            Latent(query_rank=1536, plain=128, value=128, shared=1, groups=(8, 4), mscale=1.0)
        ),
        shape=Shape(
            layers=61,  # C
            hidden=7168,  # C
            feed_forward=18432,  # C
            heads=128,  # C
            kv_heads=128,  # C
            head_dim=64,  # C, what is turned
            context=163840,  # J
            rope_base=1e4,  # C
            rms_epsilon=1e-6,  # C
            experts=256,  # C
            used=8,  # C
            expert_width=2048,  # C
            routed_scale=2.5,  # C
            dense_layers=3,  # C
        ),
        vocabulary=plain_vocabulary("deepseek-v3", 129280, 128000),
        config_class="DeepseekV3Config",
        own=frozenset({"context"}),
    ),
    PublishedModel(
        name="GLM-4.7-Flash",
        billions="30B",
        family=_family(Latent(query_rank=768, plain=192, value=256, shared=1)),
        shape=Shape(
            layers=47,  # C
            hidden=2048,  # C
            feed_forward=10240,  # C
            heads=20,  # C
            kv_heads=20,  # C
            head_dim=64,  # C, what is turned
            context=202752,  # C
            rope_base=1e6,  # J
            rms_epsilon=1e-5,  # C
            experts=64,  # C
            used=4,  # C
            expert_width=1536,  # C
            routed_scale=1.8,  # C
            dense_layers=1,  # C, mlp_layer_types
            mtp_blocks=1,  # J
        ),
        vocabulary=plain_vocabulary("glm4", 154880, 151329),
        config_class="Glm4MoeLiteConfig",
        own=frozenset({"rope_base"}),
    ),
)
