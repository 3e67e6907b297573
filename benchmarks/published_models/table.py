"""The published models: one row each, with the source of every number. Knows neither files nor tensors.

Sources: C is the default of transformers' configuration class, J the model's own config.json (named in `own`), T its
tokenizer_config.json, L llama.cpp (where it says so).
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from benchmarks.published_models import families
from benchmarks.published_models.gemma import GEMMA4
from benchmarks.published_models.glm import GLM_AIR
from benchmarks.published_models.kimi import KIMI_ROWS
from benchmarks.published_models.latent import LATENT_ROWS
from benchmarks.published_models.nemotron import NEMOTRON_NANO
from benchmarks.published_models.scout import SCOUT
from benchmarks.published_models.shape import Delta, PublishedModel, Shape, Window, Yarn
from benchmarks.published_models.vocabulary import Kind, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping

_CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TULU: Final = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_LAGUNA: Final = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "<assistant>\n{{ message.content }}\n</assistant>\n{% else %}"
    "<user>\n{{ message.content }}\n</user>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)

_OSS: Final = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_GEMMA: Final = (
    "{% for message in messages %}<|turn>{{ message.role }}\n{{ message.content }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)

# T of Qwen3: ids 151643 to 151668. The converter takes what looks like <|...|> for control tokens.
_QWEN_CONTROL: Final = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>",
    "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip


def _qwen_specials(count: int) -> tuple[tuple[str, Kind], ...]:
    return tuple(
        (text, Kind.CONTROL if text.startswith("<|") else Kind.USER_DEFINED)
        for text in _QWEN_CONTROL[:count]
    )


# 151643 tokens and 151387 merges: L, models/ggml-vocab-qwen2.gguf.
_QWEN3: Final = Vocabulary(
    pre="qwen2",
    size=151936,  # C, vocab_size
    num_bpe=151643,
    first=(),
    last=_qwen_specials(len(_QWEN_CONTROL)),
    template=_CHATML,
    bos_id=151643,  # T
    eos_id=151645,  # T
    padding_id=151643,  # T
    add_bos=False,  # T
)
# T of Qwen1.5 has the first three special tokens, and ends with <|endoftext|>.
_QWEN15: Final = replace(_QWEN3, last=_qwen_specials(3), eos_id=151643)
# The same special tokens 96401 ids further on: C of qwen3_5_moe has image_token_id 248056.
_QWEN35: Final = replace(
    _QWEN3,
    pre="qwen35",
    size=248320,  # C, vocab_size
    num_bpe=248044,
    bos_id=None,
    eos_id=248046,
    padding_id=248044,
)
# T: GPT-NeoX's tokens, whose first two and last three are special; runs of spaces are among the last as well.
_OLMO: Final = Vocabulary(
    pre="olmo",
    size=50304,  # C, vocab_size
    num_bpe=50252,
    first=(("|||IP_ADDRESS|||", Kind.CONTROL), ("<|padding|>", Kind.CONTROL)),
    last=(
        *((" " * count, Kind.USER_DEFINED) for count in range(24, 1, -1)),
        ("|||EMAIL_ADDRESS|||", Kind.CONTROL),
        ("|||PHONE_NUMBER|||", Kind.CONTROL),
        ("<|endoftext|>", Kind.CONTROL),
    ),
    template=_TULU,
    eos_id=50279,  # C, eos_token_id
    padding_id=1,  # C, pad_token_id
)
# L, conversion/laguna.py: 2 begins and ends texts, 24 is </assistant>. The names between are stand-ins.
_LAGUNA_FIRST: Final = tuple(
    (
        {2: "\u3008|EOS|\u3009", 24: "</assistant>"}.get(index, f"\u3008|SPECIAL_{index}|\u3009"),
        Kind.CONTROL,
    )
    for index in range(64)
)
_LAGUNA_VOCABULARY: Final = Vocabulary(
    pre="laguna",
    size=100352,  # C, vocab_size
    num_bpe=100352 - len(_LAGUNA_FIRST),
    first=_LAGUNA_FIRST,
    last=(),
    template=_LAGUNA,
    bos_id=2,
    eos_id=2,
    eot_id=24,
)

# T of gpt-oss: ids 199998 to 200018.
_OSS_CONTROL: Final = {
    199998: "<|startoftext|>",
    199999: "<|endoftext|>",
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
    200018: "<|endofprompt|>",
}
_OSS_VOCABULARY: Final = Vocabulary(
    pre="gpt-4o",
    size=201088,  # C, vocab_size
    num_bpe=199998,
    first=(),
    last=tuple(
        (_OSS_CONTROL.get(index, f"<|reserved_{index}|>"), Kind.CONTROL)
        for index in range(199998, 200019)
    ),
    template=_OSS,
    bos_id=199998,  # T
    eos_id=200002,  # T
    padding_id=199999,  # T
)

# L, conversion/gemma.py: BPE over characters, with a token for each byte. Names of special tokens but these are left out.
_GEMMA4_VOCABULARY: Final = Vocabulary(
    pre="",
    size=262144,  # C, vocab_size
    num_bpe=200_000,
    first=(
        *((name, Kind.CONTROL) for name in ("<pad>", "<eos>", "<bos>", "<unk>")),
        *((f"<0x{byte:02X}>", Kind.BYTE) for byte in range(256)),
        ("\u2581", Kind.NORMAL),  # a space
    ),
    last=(("<|turn>", Kind.CONTROL), ("<turn|>", Kind.CONTROL)),
    template=_GEMMA,
    bos_id=2,  # C, bos_token_id
    eos_id=1,  # C, eos_token_id
    padding_id=0,  # C, pad_token_id
    add_bos=True,  # L
    model="gemma4",
)

_QWEN_DELTA: Final = Delta(conv=4, key_heads=16, value_heads=32, state=128)  # C, linear_*

_QWEN36: Final = PublishedModel(
    name="Qwen3.6-35B-A3B",
    billions="35B",
    family=families.QWEN35MOE,
    shape=Shape(
        layers=40,  # C
        hidden=2048,  # C
        feed_forward=None,  # C has no intermediate_size
        heads=16,  # C
        kv_heads=2,  # C
        head_dim=256,  # C
        context=262144,  # J
        rope_base=1e7,  # J
        rms_epsilon=1e-6,  # C
        experts=256,  # C
        used=8,  # C
        expert_width=512,  # C
        shared_width=512,  # C
        rotary=64,  # C, a quarter of the head
        mrope_sections=(11, 11, 10, 0),  # L, conversion/qwen.py
        delta=_QWEN_DELTA,
    ),
    vocabulary=_QWEN35,
    config_class="Qwen3_5MoeTextConfig",
    own=frozenset({"context", "rope_base"}),
)

_ROWS: Final = (
    PublishedModel(
        name="Qwen3-30B-A3B",
        billions="30.5B",
        family=families.QWEN3MOE,
        shape=Shape(
            layers=48,  # J
            hidden=2048,  # C
            feed_forward=6144,  # C
            heads=32,  # C
            kv_heads=4,  # C
            head_dim=128,  # J
            context=40960,  # J
            rope_base=1e6,  # J
            rms_epsilon=1e-6,  # C
            experts=128,  # C
            used=8,  # C
            expert_width=768,  # C
        ),
        vocabulary=_QWEN3,
        config_class="Qwen3MoeConfig",
        own=frozenset({"layers", "head_dim", "context", "rope_base"}),
    ),
    PublishedModel(
        name="Qwen3-Next-80B-A3B",
        billions="80B",
        family=families.QWEN3NEXT,
        shape=Shape(
            layers=48,  # C
            hidden=2048,  # C
            feed_forward=5120,  # J
            heads=16,  # C
            kv_heads=2,  # C
            head_dim=256,  # C
            context=262144,  # J
            rope_base=1e7,  # J
            rms_epsilon=1e-6,  # C
            experts=512,  # C
            used=10,  # C
            expert_width=512,  # C
            shared_width=512,  # C
            rotary=64,  # C, a quarter of the head
            delta=_QWEN_DELTA,
        ),
        vocabulary=_QWEN3,
        config_class="Qwen3NextConfig",
        own=frozenset({"feed_forward", "context", "rope_base"}),
    ),
    _QWEN36,
    replace(
        _QWEN36,
        name="Qwen3.6-35B-A3B-MTP",
        shape=replace(_QWEN36.shape, mtp_blocks=1),  # J, mtp_num_hidden_layers
    ),
    PublishedModel(
        name="Qwen1.5-MoE-A2.7B",
        billions="14.3B",
        family=families.QWEN2MOE,
        shape=Shape(
            layers=24,  # C
            hidden=2048,  # C
            feed_forward=5632,  # C
            heads=16,  # C
            kv_heads=16,  # C
            head_dim=128,  # C, hidden / heads
            context=8192,  # J
            rope_base=1e6,  # J
            rms_epsilon=1e-6,  # C
            experts=60,  # C
            used=4,  # C
            expert_width=1408,  # C; 256 does not divide it
            shared_width=5632,  # C
        ),
        vocabulary=_QWEN15,
        config_class="Qwen2MoeConfig",
        own=frozenset({"context", "rope_base"}),
    ),
    PublishedModel(
        name="OLMoE-1B-7B",
        billions="6.92B",
        family=families.OLMOE,
        shape=Shape(
            layers=16,  # C
            hidden=2048,  # C
            feed_forward=1024,  # J
            heads=16,  # C
            kv_heads=16,  # C
            head_dim=128,  # C, hidden / heads
            context=4096,  # C
            rope_base=1e4,  # C
            rms_epsilon=1e-5,  # C
            experts=64,  # C
            used=8,  # C
            expert_width=1024,  # J, intermediate_size
        ),
        vocabulary=_OLMO,
        config_class="OlmoeConfig",
        own=frozenset({"feed_forward", "expert_width"}),
    ),
    PublishedModel(
        name="Laguna-XS.2",
        billions="33B",
        family=families.LAGUNA,
        shape=Shape(
            layers=40,  # C
            hidden=2048,  # C
            feed_forward=8192,  # C
            heads=48,  # C, of layers with full attention
            kv_heads=8,  # C
            head_dim=128,  # C
            context=131072,  # C
            rope_base=5e5,  # C
            rms_epsilon=1e-6,  # C
            experts=256,  # C
            used=8,  # C
            expert_width=512,  # C
            shared_width=512,  # C
            rotary=64,  # C, half of the head
            # tokens, rope_base and rotary: C; heads and period: L, src/models/laguna.cpp.
            window=Window(tokens=512, heads=64, rope_base=1e4, rotary=128),
            yarn=Yarn(32.0, 4096, 1.0, 64.0, 1.0),  # J
            routed_scale=2.5,  # J
            dense_layers=1,  # C, mlp_layer_types
        ),
        vocabulary=_LAGUNA_VOCABULARY,
        config_class="LagunaConfig",
        own=frozenset({"window", "yarn", "routed_scale"}),
    ),
    PublishedModel(
        name="gpt-oss-20b",
        billions="20.9B",
        family=families.GPT_OSS,
        shape=Shape(
            layers=24,  # J
            hidden=2880,  # C
            feed_forward=2880,  # C
            heads=64,  # C
            kv_heads=8,  # C
            head_dim=64,  # C
            context=131072,  # C
            rope_base=1.5e5,  # C
            rms_epsilon=1e-5,  # C
            experts=32,  # J
            used=4,  # C
            expert_width=2880,  # C, intermediate_size
            window=Window(tokens=128, heads=64, rope_base=1.5e5, rotary=64, period=2, full_at=1),
            yarn=Yarn(32.0, 4096, 1.0, 32.0, 1.0),  # C
        ),
        vocabulary=_OSS_VOCABULARY,
        config_class="GptOssConfig",
        own=frozenset({"layers", "experts"}),
        mix="MXFP4",
    ),
    PublishedModel(
        name="gemma-4-26B-A4B",
        billions="25.2B",
        family=GEMMA4,
        shape=Shape(
            layers=30,  # C
            hidden=2816,  # J
            feed_forward=2112,  # J; 256 does not divide it
            heads=16,  # J
            kv_heads=2,  # J, num_global_key_value_heads
            head_dim=512,  # J, global_head_dim
            context=262144,  # J
            rope_base=1e6,  # C
            rms_epsilon=1e-6,  # C
            experts=128,  # J
            used=8,  # J, top_k_experts
            expert_width=704,  # J; 256 does not divide it
            # heads: J; head_dim and rope_base: C; tokens, kv_heads: J; one of six layers has none: C.
            window=Window(1024, 16, 1e4, 256, period=6, full_at=5, kv_heads=8, head_dim=256),
            softcap=30.0,  # J
        ),
        vocabulary=_GEMMA4_VOCABULARY,
        config_class="Gemma4TextConfig",
        own=frozenset(
            {"hidden", "feed_forward", "heads", "kv_heads", "head_dim", "context", "experts"}
        ),
    ),
    *LATENT_ROWS,
    *KIMI_ROWS,
    SCOUT,
    GLM_AIR,
    NEMOTRON_NANO,
)

MODELS: Final[Mapping[str, PublishedModel]] = MappingProxyType({row.name: row for row in _ROWS})
