"""Nemotron-3-Nano: its numbers with the source of each, and how its files are laid out.

Sources: C is the default of transformers' configuration class, J the model's own config.json (named in `own`), T its
tokenizer_config.json, L llama.cpp. Knows no file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from benchmarks.published_models.latent import TEMPLATE
from benchmarks.published_models.shape import Family, Mamba, Metadata, Part, PublishedModel, Shape
from benchmarks.published_models.vocabulary import Kind, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator


def _metadata(shape: Shape) -> Metadata:
    """NemotronHModel in conversion/nemotron.py."""
    mamba, blocks = _mamba_of(shape), range(shape.layers)
    return {
        "block_count": shape.layers,
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "feed_forward_length": tuple(
            shape.expert_width if mamba.pattern[block] == "E" else 0 for block in blocks
        ),
        "attention.head_count": shape.heads,
        "attention.head_count_kv": tuple(
            shape.kv_heads if mamba.pattern[block] == "*" else 0 for block in blocks
        ),
        "rope.freq_base": shape.rope_base,
        "attention.layer_norm_epsilon": shape.rms_epsilon,
        "attention.layer_norm_rms_epsilon": shape.rms_epsilon,
        "vocab_size": _VOCABULARY.size,
        "ssm.conv_kernel": mamba.conv,
        "ssm.state_size": mamba.state,
        "ssm.group_count": mamba.groups,
        "ssm.inner_size": mamba.width,
        "ssm.time_step_rank": mamba.heads,
        "rope.dimension_count": shape.hidden // shape.heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "expert_used_count": shape.used,
        "expert_feed_forward_length": shape.expert_width,
        "expert_shared_feed_forward_length": shape.shared_width,
        "expert_count": shape.experts,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": shape.routed_scale,
        "expert_group_count": 1,
    }


def _block(shape: Shape, block: int) -> Iterator[Part]:
    hidden, mamba = shape.hidden, _mamba_of(shape)
    yield "attn_norm.weight", (hidden,)
    match mamba.pattern[block]:
        case "M":
            yield "ssm_in.weight", (mamba.width + mamba.channels + mamba.heads, hidden)
            yield "ssm_conv1d.weight", (mamba.channels, mamba.conv)
            yield "ssm_conv1d.bias", (mamba.channels,)
            yield "ssm_dt.bias", (mamba.heads,)
            yield "ssm_a", (mamba.heads, 1)
            yield "ssm_d", (mamba.heads, 1)
            yield "ssm_norm.weight", (mamba.groups, mamba.width // mamba.groups)
            yield "ssm_out.weight", (hidden, mamba.width)
        case "*":
            query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
            yield "attn_q.weight", (query, hidden)
            yield "attn_k.weight", (key, hidden)
            yield "attn_v.weight", (key, hidden)
            yield "attn_output.weight", (hidden, query)
        case _:
            yield "ffn_gate_inp.weight", (shape.experts, hidden)
            yield "exp_probs_b.bias", (shape.experts,)
            yield "ffn_up_exps.weight", (shape.experts, shape.expert_width, hidden)
            yield "ffn_down_exps.weight", (shape.experts, hidden, shape.expert_width)
            yield "ffn_up_shexp.weight", (shape.shared_width, hidden)
            yield "ffn_down_shexp.weight", (hidden, shape.shared_width)


def _mamba_of(shape: Shape) -> Mamba:
    assert shape.mamba is not None
    return shape.mamba


# T: a thousand special tokens first. The names of those that are not here are stand-ins.
_NAMED: Final = {0: "<unk>", 1: "<s>", 2: "</s>", 10: "<|im_start|>", 11: "<|im_end|>"}
_VOCABULARY: Final = Vocabulary(
    pre="pixtral",  # L, conversion/base.py
    size=131072,  # C, vocab_size
    num_bpe=130072,
    first=tuple((_NAMED.get(index, f"<SPECIAL_{index}>"), Kind.CONTROL) for index in range(1000)),
    last=(),
    template=TEMPLATE,
    bos_id=1,  # T
    eos_id=11,  # T
    add_bos=True,  # L: what this pre-tokenizer has where a file says nothing
)

NEMOTRON_NANO: Final = PublishedModel(
    name="Nemotron-3-Nano",
    billions="31.6B",
    family=Family("nemotron_h_moe", _metadata, _block),
    shape=Shape(
        layers=52,  # J
        hidden=2688,  # J
        feed_forward=None,  # no block is dense
        heads=32,  # C
        kv_heads=2,  # J
        head_dim=128,  # C
        context=262144,  # J
        rope_base=1e4,  # J; no head turns
        rms_epsilon=1e-5,  # C, layer_norm_epsilon
        experts=128,  # J
        used=6,  # J
        expert_width=1856,  # J; 256 does not divide it
        shared_width=3712,  # J; 256 does not divide it
        routed_scale=2.5,  # J
        mamba=Mamba(
            conv=4,  # C
            heads=64,  # J
            head_dim=64,  # C
            groups=8,  # C
            state=128,  # C
            pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",  # J
        ),
    ),
    vocabulary=_VOCABULARY,
    config_class="NemotronHConfig",
    own=frozenset(
        {
            "layers",
            "hidden",
            "feed_forward",
            "kv_heads",
            "context",
            "experts",
            "used",
            "expert_width",
        }
        | {"shared_width"}
    ),
)
