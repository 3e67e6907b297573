"""The toy models of each architecture that oracles, golden files and schedules are held against."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.deepseek4_cases import DEEPSEEK4_MIXED, DEEPSEEK4_OPTIONS, LONG_PROMPT
from tests.support.dots3_cases import DOTS3_MIXED, DOTS3_OPTIONS
from tests.support.glm5_cases import GLM5_MIXED, GLM5_OPTIONS
from tests.support.hy_v4_cases import HY_V4_MIXED, HY_V4_OPTIONS
from tests.support.jamba_cases import JAMBA_MIXED, JAMBA_OPTIONS
from tests.support.latent_cases import (
    BAILINGMOE3_MIXED,
    BAILINGMOE3_OPTIONS,
    DEEPSEEK32_OPTIONS,
    GLM_DSA_OPTIONS,
    KIMI_LINEAR_MIXED,
    KIMI_LINEAR_OPTIONS,
    LATENT_MIXED,
    LATENT_OPTIONS,
    MISTRAL4_OPTIONS,
    SPARSE_MIXED,
)
from tests.support.minimax_m3_cases import MINIMAX_M3_MIXED, MINIMAX_M3_OPTIONS
from tests.support.norms_cases import DBRX_OPTIONS, PHIMOE_OPTIONS
from tests.support.recurrent_cases import (
    GRANITE_MIXED,
    GRANITE_OPTIONS,
    LFM2_DENSE_OPTIONS,
    LFM2_MIXED,
    LFM2_OPTIONS,
    NEMOTRON_DENSE_OPTIONS,
    NEMOTRON_MIXED,
    NEMOTRON_OPTIONS,
)
from tests.support.streams_cases import STREAMS_MIXED, STREAMS_OPTIONS
from tests.support.toy_archs import ToyArch

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class ArchCase:
    """A toy model by name."""

    name: str
    toy: ToyArch

    def __str__(self) -> str:
        return self.name


def _case(name: str, arch: str, **options: object) -> ArchCase:
    return ArchCase(f"{arch}_{name}", ToyArch(arch, **options))


_ODD = {
    "hidden": 30,
    "heads": 3,
    "kv_heads": 3,
    "head_dim": 10,
    "experts": 5,
    "used": 3,
    "intermediate": 19,
    "shared": 23,
}
_ODD_STATE = {"key_heads": 3, "value_heads": 6, "state": 10, "conv_width": 3, "interval": 2}

_LONE_EXPERT = {"experts": 1, "used": 1, "kv_heads": 1}
_NO_EXPERTS = {"experts": 0, "used": 0}
_LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}
_HOT_YARN = _YARN | {"attention.temperature_scale": 0.6}
_MINISTRAL = _HOT_YARN | {"rope.scaling.yarn_log_multiplier": 1.0}
_OWN_BASE = {"rope.freq_base_swa": 500.0}
_OWN_YARN = {"rope.scaling.yarn_attn_factor": 1.0}
_GEMMA4_SMALL = {"head_dim": 32, "kv_heads": 1, "window": 16, "layer_embedding": 8, "tied": True}
_GEMMA4_ODD = {"window": 7, "near_head_dim": 6, "near_kv_heads": 1, "layer_embedding": 5}
_GROUPS = {"expert_group_count": 4, "expert_group_used_count": 2}
_ODD_HEADS = {"head_dim": 24, "experts": 7, "used": 3, "intermediate": 19, "shared": 23}

_FAR_UNTURNED = {"attention.rope_pattern": [False, True, True, True, False]}
_NEAR_UNTURNED = {"attention.rope_pattern": [True, False], "deepstack_mapping": [-1, 1]}
_QUIET = {"embedding_scale": 0.3}  # or a tied head would repeat its token
_NO_WINDOW = _QUIET | {"attention.sliding_window_pattern": [False] * 3}
_EARLY_HEAT = {"attention.temperature_length": 9, "attention.temperature_scale": 0.4}
_COHERE = {"window": 16, "shared": 64}
_RMS = {
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.sliding_window_pattern": [False, True, False],
}
_SOFTMAX = {"expert_gating_func": 1}
_MIMO = {"kv_heads": 1, "head_dim": 24, "rotary": 8}
_MIMO_ODD = _ODD | {"heads": 6, "near_kv_heads": 6, "value_dim": 7, "rotary": 6}
_MIMO_WIDE_VALUES = {
    "kv_heads": 1,
    "value_dim": 24,
    "experts": 5,
    "used": 5,
    "extra": {"attention.value_scale": None},
}
_LLAMA4_ODD = _ODD_HEADS | {"used": 1, "heads": 3, "kv_heads": 3, "slowed": True, "tied": True}

ROUTER_CASES = (
    _case("default", "afmoe", layers=5, window=16, seed=59),
    _case("odd", "afmoe", **_ODD_HEADS | {"rotary": 24}, layers=4, window=7, dense=2, seed=60),
    _case("all_routed", "afmoe", layers=4, window=64, dense=0, shared=0, tied=True, seed=71),
    _case("one_expert", "afmoe", layers=4, experts=1, used=1, window=2, kv_heads=1, seed=72),
    _case("lone_layer", "afmoe", layers=1, dense=0, window=16, biased=False, seed=73),
    _case("default", "bailingmoe2", rotary=8, extra=_GROUPS, seed=61),
    _case("default", "bailingmoe", layers=2, dense=0, seed=74),
    _case("odd", "bailingmoe", **_ODD_HEADS, layers=3, dense=0, seed=75),
    _case("one_dense", "bailingmoe", kv_heads=1, tied=True, seed=76),
    _case("default", "cohere2moe", **_COHERE, layers=6, seed=98),
    _case("odd", "cohere2moe", **_ODD_HEADS | {"shared": 38}, layers=4, window=7, dense=2, seed=99),
    _case("rms", "cohere2moe", **_COHERE | {"shared": 0}, layers=3, tied=True, extra=_RMS, seed=1),
    _case(
        "softmax", "cohere2moe", **_COHERE, layers=2, dense=0, kv_heads=1, extra=_SOFTMAX, seed=2
    ),
    _case("default", "deepseek", kv_heads=4, seed=77),
    _case("odd", "deepseek", **_ODD, dense=2, tied=True, seed=78),
    _case("no_dense", "deepseek", layers=1, dense=0, experts=5, used=5, seed=79),
    _case("default", "dots1", kv_heads=4, experts=9, seed=62),
    _case("default", "ernie4_5", **_NO_EXPERTS, biased=False, tied=True, seed=80),
    _case("odd", "ernie4_5", **_ODD | _NO_EXPERTS | {"kv_heads": 1}, biased=False, seed=81),
    _case("odd", "ernie4_5-moe", **_ODD_HEADS, layers=2, tied=True, seed=63),
    _case("default", "exaone-moe", layers=5, window=16, seed=84),
    _case("odd", "exaone-moe", **_ODD_HEADS, layers=4, window=7, dense=2, seed=85),
    _case(
        "all_routed",
        "exaone-moe",
        layers=4,
        window=2,
        dense=0,
        kv_heads=1,
        slowed=True,
        seed=86,
    ),
    _case("default", "glm4moe", rotary=8, seed=64),
    _case("normed", "glm4moe", **_ODD_HEADS, rotary=10, dense=2, biased=False, seed=65),
    _case("default", "granite", **_NO_EXPERTS, layers=2, seed=68),
    _case("odd", "granite", **_ODD | _NO_EXPERTS, tied=True, seed=69),
    _case("default", "granite_swa", layers=5, window=16, fused=True, extra=_FAR_UNTURNED, seed=98),
    _case(
        "odd",
        "granite_swa",
        **_ODD,
        layers=4,
        window=7,
        slowed=True,
        tied=True,
        extra=_QUIET,
        seed=99,
    ),
    _case(
        "one_expert",
        "granite_swa",
        layers=2,
        experts=1,
        used=1,
        kv_heads=1,
        window=2,
        shared=0,
        biased=False,
        extra=_NEAR_UNTURNED,
        seed=100,
    ),
    _case("dense", "granite_swa", **_NO_EXPERTS, layers=4, window=16, extra=_YARN, seed=101),
    _case(
        "dense_odd",
        "granite_swa",
        **_ODD | _NO_EXPERTS | {"kv_heads": 1},
        biased=False,
        tied=True,
        extra=_NO_WINDOW,
        seed=102,
    ),
    _case("default", "granitemoe", layers=2, seed=66),
    _case("lone_layer", "granitemoe", layers=1, shared=0, experts=5, tied=True, seed=67),
    _case("default", "hunyuan-dense", **_NO_EXPERTS, head_dim=32, seed=85),
    _case("odd", "hunyuan-dense", **_ODD | _NO_EXPERTS | {"kv_heads": 1}, tied=True, seed=86),
    _case("odd", "hunyuan-moe", **_ODD_HEADS, layers=2, seed=68),
    _case("default", "hy_v3", layers=2, seed=87),
    _case("odd", "hy_v3", **_ODD_HEADS, dense=2, tied=True, seed=88),
    _case("one_expert", "hy_v3", layers=1, dense=0, experts=1, used=1, kv_heads=1, seed=89),
    _case("default", "llama4", layers=5, used=1, dense=0, window=16, extra=_EARLY_HEAT, seed=94),
    _case("odd", "llama4", **_LLAMA4_ODD, layers=4, window=7, extra=_EARLY_HEAT, seed=95),
    _case("scout", "llama4", layers=4, used=1, dense=0, kv_heads=1, slowed=True, seed=96),
    _case("maverick", "llama4", layers=4, experts=128, used=1, intermediate=16, seed=97),
    _case("default", "mellum", layers=5, window=16, seed=90),
    _case("odd", "mellum", **_ODD_HEADS, layers=4, window=7, extra=_YARN, seed=91),
    _case("own_base", "mellum", layers=4, window=2, extra=_OWN_BASE, kv_heads=1, seed=92),
    _case("full", "mellum", layers=2, experts=5, used=5, seed=93),
    _case("odd", "minimax-m2", **_ODD_HEADS, layers=2, rotary=10, seed=69),
    _case("odd", "qwen3vlmoe", **_ODD_HEADS, layers=2, seed=70),
)
"""Architectures that differ by their routers."""

FORMULA_CASES = (
    _case("default", "gpt-oss", layers=4, window=16, seed=81),
    _case("odd", "gpt-oss", **_ODD_HEADS | {"head_dim": 16, "hidden": 42}, window=5, seed=82),
    _case("one_expert", "gpt-oss", layers=2, window=2, experts=1, used=1, kv_heads=1, seed=83),
    _case("default", "maple", layers=5, window=16, seed=87),
    _case("odd", "maple", **_ODD_HEADS, layers=4, window=7, extra=_YARN | _OWN_BASE, seed=85),
    _case("one_expert", "maple", layers=4, window=2, experts=1, used=1, kv_heads=1, seed=86),
    _case("default", "smallthinker", layers=5, window=4096, seed=91),
    _case("near", "smallthinker", layers=6, window=16, kv_heads=1, seed=92),
    _case("odd", "smallthinker", **_ODD, extra={"expert_gating_func": 1}, tied=True, seed=93),
    _case("one_expert", "smallthinker", layers=2, experts=1, used=1, seed=94),
    _case("default", "step35", layers=5, window=16, seed=91),
    _case("odd", "step35", **_ODD_HEADS, layers=4, window=7, dense=2, slowed=True, seed=92),
    _case("one_expert", "step35", layers=3, window=2, dense=0, **_LONE_EXPERT, seed=93),
    _case("default", "mimo2", **_MIMO, layers=5, window=16, joined=True, seed=106),
    _case("odd", "mimo2", **_MIMO_ODD, layers=4, window=7, dense=2, seed=107),
    _case("wide_values", "mimo2", **_MIMO_WIDE_VALUES, window=2, dense=0, seed=108),
)
"""Architectures that differ by the formula of their experts."""

ARCH_CASES = (
    _case("default", "olmoe", kv_heads=4),
    _case("shared_heads", "olmoe", hidden=96, heads=6, rms_epsilon=1e-5, seed=11),
    _case("odd", "olmoe", **_ODD, seed=12),
    _case("tied_all_experts", "olmoe", kv_heads=4, tied=True, experts=6, used=6, seed=13),
    _case("one_expert", "olmoe", kv_heads=4, experts=1, used=1, seed=14),
    _case("default", "qwen2moe"),
    _case("odd", "qwen2moe", **_ODD, seed=21),
    _case("tied_unbiased", "qwen2moe", biased=False, tied=True, seed=22),
    _case("one_expert", "qwen2moe", experts=1, used=1, kv_heads=1, seed=23),
    _case("lonely_experts", "qwen2moe", experts=64, used=1, intermediate=16, seed=24),
    _case("default", "qwen35moe", layers=4, rotary=8),
    _case("odd", "qwen35moe", layers=5, **_ODD, **_ODD_STATE, rotary=6, seed=31),
    _case("fused_tied", "qwen35moe", layers=2, interval=2, fused=True, tied=True, seed=32),
    _case("equal_heads", "qwen35moe", interval=3, key_heads=3, value_heads=3, seed=33),
    _case("wide_state", "qwen35moe", layers=2, interval=2, state=80, value_heads=2, seed=34),
    _case("default", "qwen3next", layers=4, rotary=8, seed=41),
    _case("odd", "qwen3next", layers=3, **_ODD, **_ODD_STATE, rotary=2, seed=42),
    _case("one_expert", "qwen3next", layers=2, interval=2, experts=1, used=1, seed=43),
    _case("default", "laguna", layers=5, rotary=8, window=16, seed=51),
    _case("odd", "laguna", layers=3, **_ODD, rotary=6, window=7, head_gates=False, seed=52),
    _case("own_yarn", "laguna", layers=2, rotary=8, window=16, extra=_OWN_YARN, seed=56),
    _case("full", "laguna", layers=2, rotary=8, head_gates=False, tied=True, seed=53),
    _case("two_dense", "laguna", layers=6, dense=2, rotary=16, window=64, seed=54),
    _case(
        "narrow_window", "laguna", layers=2, dense=0, rotary=4, window=2, experts=1, used=1, seed=55
    ),
    _case("default", "llama", **_NO_EXPERTS, biased=False, seed=61),
    _case("odd", "llama", **_ODD | _NO_EXPERTS, biased=False, slowed=True, seed=62),
    _case("tied_biased", "llama", **_NO_EXPERTS, tied=True, kv_heads=1, extra=_LINEAR, seed=63),
    _case("slow_yarn", "llama", **_NO_EXPERTS, biased=False, slowed=True, extra=_YARN, seed=64),
    _case("all_biased", "llama", **_NO_EXPERTS, all_biased=True, seed=66),
    _case("experts", "llama", kv_heads=4, seed=65),
    _case("odd_experts", "llama", **_ODD, seed=68),
    _case("one_expert", "llama", layers=2, experts=1, used=1, tied=True, seed=67),
    _case("default", "qwen2", **_NO_EXPERTS, seed=71),
    _case("odd", "qwen2", **_ODD | _NO_EXPERTS, biased=False, tied=True, seed=72),
    _case("default", "qwen3", **_NO_EXPERTS, head_dim=32, seed=81),
    _case("odd", "qwen3", **_ODD | _NO_EXPERTS, tied=True, extra=_YARN, seed=82),
    _case("default", "qwen3vl", **_NO_EXPERTS, head_dim=32, seed=83),
    _case("odd", "qwen3vl", **_ODD | _NO_EXPERTS | {"kv_heads": 1}, tied=True, seed=84),
    _case("default", "mistral3", **_NO_EXPERTS, biased=False, extra=_MINISTRAL, seed=89),
    _case(
        "odd", "mistral3", **_ODD | _NO_EXPERTS, biased=False, tied=True, extra=_HOT_YARN, seed=90
    ),
    _case("default", "smollm3", **_NO_EXPERTS, layers=5, biased=False, tied=True, seed=87),
    _case(
        "odd", "smollm3", **_ODD | _NO_EXPERTS | {"kv_heads": 1}, layers=8, biased=False, seed=88
    ),
    _case("default", "qwen35", **_NO_EXPERTS, layers=4, rotary=8, seed=91),
    _case(
        "odd", "qwen35", **_ODD | _NO_EXPERTS, **_ODD_STATE, layers=5, rotary=6, tied=True, seed=92
    ),
    *(_case(name, "qwen4exp", **options) for name, options in STREAMS_OPTIONS.items()),
    *(_case(name, "deepseek2", **options) for name, options in LATENT_OPTIONS.items()),
    *(_case(name, "deepseek32", **options) for name, options in DEEPSEEK32_OPTIONS.items()),
    *(_case(name, "deepseek4", **options) for name, options in DEEPSEEK4_OPTIONS.items()),
    *(_case(name, "glm-dsa", **options) for name, options in GLM_DSA_OPTIONS.items()),
    *(_case(name, "glm5-next", **options) for name, options in GLM5_OPTIONS.items()),
    *(_case(name, "hy_v4", **options) for name, options in HY_V4_OPTIONS.items()),
    *(_case(name, "dots3note", **options) for name, options in DOTS3_OPTIONS.items()),
    *(_case(name, "minimax-m3", **options) for name, options in MINIMAX_M3_OPTIONS.items()),
    *(_case(name, "mistral4", **options) for name, options in MISTRAL4_OPTIONS.items()),
    *(_case(name, "kimi-linear", **options) for name, options in KIMI_LINEAR_OPTIONS.items()),
    *(_case(name, "bailingmoe3", **options) for name, options in BAILINGMOE3_OPTIONS.items()),
    *(_case(name, "dbrx", **options) for name, options in DBRX_OPTIONS.items()),
    *(_case(name, "phimoe", **options) for name, options in PHIMOE_OPTIONS.items()),
    *ROUTER_CASES,
    *FORMULA_CASES,
    *(_case(name, "lfm2", **options) for name, options in LFM2_DENSE_OPTIONS.items()),
    *(_case(name, "lfm2moe", **options) for name, options in LFM2_OPTIONS.items()),
    *(_case(name, "nemotron_h", **options) for name, options in NEMOTRON_DENSE_OPTIONS.items()),
    *(_case(name, "nemotron_h_moe", **options) for name, options in NEMOTRON_OPTIONS.items()),
    *(_case(name, "granitehybrid", **options) for name, options in GRANITE_OPTIONS.items()),
    *(_case(name, "jamba", **options) for name, options in JAMBA_OPTIONS.items()),
    _case("default", "gemma4", head_dim=32, kv_heads=1, window=16, fused=True, tied=True, seed=61),
    _case("odd", "gemma4", **_ODD, window=7, near_head_dim=6, near_kv_heads=1, seed=62),
    _case("wide_heads", "gemma4", head_dim=512, near_head_dim=256, window=24, seed=63),
    _case(
        "dense", "gemma4", **_NO_EXPERTS, head_dim=32, kv_heads=1, window=16, fused=True, seed=66
    ),
    _case("one_expert", "gemma4", layers=6, experts=1, used=1, window=2, tied=True, seed=64),
    _case("small", "gemma4", **_NO_EXPERTS, **_GEMMA4_SMALL, layers=6, readers=3, seed=67),
    _case("small_experts", "gemma4", **_GEMMA4_SMALL, readers=0, fused=True, seed=68),
    _case(
        "small_uneven", "gemma4", **_ODD | _NO_EXPERTS, **_GEMMA4_ODD, layers=6, readers=2, seed=73
    ),
)

LONG_PROMPTS = {"deepseek4": LONG_PROMPT}
"""Tokens of one more prompt, of architectures that keep something of many tokens."""

_MIX = {"embed": "Q8_0", "attn": "Q5_K", "gate_up": "Q4_K", "down": "Q6_K", "output": "Q6_K"}
_NARROW_MIX = {
    "embed": "Q8_0",
    "attn": "Q8_0",
    "gate_up": "MXFP4",
    "down": "MXFP4",
    "output": "Q8_0",
}
_WIDE = {
    "hidden": 256,
    "intermediate": 256,
    "shared": 256,
    "head_dim": 64,
    "used": 3,
    "context": 96,
    "state": 64,
    "interval": 2,
    "window": 24,
}

_PHIMOE_MIXED = {"used": 2, "layers": 2, "window": 0, "stretched": True}
_MIMO_MIXED = {"kv_heads": 1, "head_dim": 96, "value_dim": 64, "rotary": 32, "joined": True}
_GEMMA4 = _WIDE | {"head_dim": 128, "near_head_dim": 64, "kv_heads": 1, "fused": True}

SCHEDULED_CASES = (
    *(
        _case(
            "mixed", arch, **_WIDE, formats=_MIX, kv_heads=4 if arch in ("olmoe", "laguna") else 2
        )
        for arch in ("olmoe", "qwen2moe", "qwen35moe", "qwen3next", "laguna")
    ),
    _case("mixed", "llama", **_WIDE, formats=_MIX, slowed=True),
    _case("mixed", "deepseek2", **_WIDE | LATENT_MIXED, formats=_MIX | {"latent": "Q8_0"}),
    _case("mixed", "kimi-linear", **_WIDE | KIMI_LINEAR_MIXED, formats=_MIX | {"latent": "Q8_0"}),
    _case("mixed", "bailingmoe3", **_WIDE | BAILINGMOE3_MIXED, formats=_MIX | {"latent": "Q8_0"}),
    _case("mixed", "bailingmoe2", **_WIDE, rotary=32, formats=_MIX, extra=_GROUPS),
    _case("mixed", "afmoe", **_WIDE, layers=4, rotary=64, formats=_MIX, seed=65),
    _case("mixed", "cohere2moe", **_WIDE, layers=2, formats=_MIX, seed=67),
    _case("mixed", "dbrx", **_WIDE, layers=2, formats=_MIX, seed=68),
    _case("mixed", "phimoe", **_WIDE | _PHIMOE_MIXED, formats=_MIX, seed=69),
    # Rows of whole blocks of 32, not of 256, as gpt-oss has them.
    _case("mixed", "gpt-oss", **_WIDE | {"hidden": 160, "intermediate": 96}, formats=_NARROW_MIX),
    _case("mixed", "mimo2", **_WIDE | _MIMO_MIXED, formats=_MIX),
    _case("mixed", "lfm2moe", **_WIDE | LFM2_MIXED, formats=_MIX),
    _case("mixed", "nemotron_h_moe", **_WIDE | NEMOTRON_MIXED, formats=_MIX),
    _case("mixed", "granitehybrid", **_WIDE | GRANITE_MIXED, formats=_MIX),
    _case("mixed", "jamba", **_WIDE | JAMBA_MIXED, formats=_MIX | {"steps": "Q8_0"}),
    _case("mixed", "gemma4", **_GEMMA4, formats=_MIX, seed=65),
)
"""Quantised models of architectures that differ in what they compute, for schedules."""

IS_LONG = "THERMOCLINE_SCHEDULES" in os.environ
"""Whether `make schedules` runs."""

# Experts beside attention, latent rows, windows and sinks, biases of experts, short convolutions, both Mambas, the gated delta
# rule, and what only they have between these.
_KINDS = (
    *(
        "cohere2moe",
        "deepseek2",
        "gemma4",
        "gpt-oss",
        "jamba",
        "lfm2moe",
        "nemotron_h_moe",
        "qwen35moe",
    ),
)


def of_each_kind(cases: Sequence[ArchCase]) -> list[ArchCase]:
    """Return the cases that stand for each kind of layer, for tests of seconds; all of them in a long run."""
    return [case for case in cases if IS_LONG or case.toy.arch in _KINDS]


CHUNKED_CASE = _case(
    "mixed", "llama4", **_WIDE | {"used": 1}, layers=4, formats=_MIX, extra=_EARLY_HEAT
)
"""A quantised model whose windows do not slide, whose experts' input is weighed, and whose scores grow with the position."""

MORE_SCHEDULED_CASES = (
    *(
        _case("mixed", arch, **_WIDE, formats=_MIX)
        for arch in (
            *("ernie4_5-moe", "granitemoe", "granite_swa", "hunyuan-moe"),
            *("exaone-moe", "hy_v3", "mellum"),
        )
    ),
    _case("mixed", "maple", **_WIDE, layers=4, formats=_MIX, seed=68),
    _case("mixed", "smallthinker", **_WIDE, layers=2, formats=_MIX, seed=69),
    _case("mixed", "step35", **_WIDE, layers=4, kv_heads=4, formats=_MIX, seed=69),
    CHUNKED_CASE,
)
"""More of them, for the quicker checks and for long runs."""

PLACED_CASES = tuple(
    {
        case.toy.arch: case
        for case in (*reversed(ARCH_CASES), *SCHEDULED_CASES)
        if case.toy.experts > case.toy.used and (case in ARCH_CASES or case.toy.arch == "gpt-oss")
    }.values()
) + tuple(case for case in ARCH_CASES if case.toy.narrow)
"""One small model of each architecture with experts, for places of experts; gpt-oss' are in MXFP4."""

SPARSE_CASE = _case(
    "mixed", "deepseek32", **_WIDE | SPARSE_MIXED, formats=_MIX | {"latent": "Q8_0"}
)
"""A quantised model whose tokens read 16 positions, which no device computes, and no whole layer."""

STREAMS_CASE = _case(
    "mixed",
    "qwen4exp",
    **_WIDE | STREAMS_MIXED,
    formats=_MIX | {"layer_embed": "Q8_0", "streams": "Q8_0"},
)
"""A quantised model with several residual streams, whose tokens read 24 positions in blocks."""

GLM5_CASE = _case("mixed", "glm5-next", **_WIDE | GLM5_MIXED, formats=_MIX | {"latent": "Q8_0"})
"""The same that keeps states and chooses pools of latent rows."""

DEEPSEEK4_CASE = _case(
    "mixed",
    "deepseek4",
    **_WIDE | DEEPSEEK4_MIXED,
    formats=_MIX | {"latent": "Q8_0", "compressor": "Q8_0"},
)
"""The same whose tokens read a window of rows, and entries that are made of several tokens."""

MINIMAX_M3_CASE = _case("mixed", "minimax-m3", **_WIDE | MINIMAX_M3_MIXED, formats=_MIX)
"""The same each of whose heads of keys reads three blocks of eight positions."""

DOTS3_CASE = _case("mixed", "dots3note", **_WIDE | DOTS3_MIXED, formats=_MIX | {"latent": "Q8_0"})
"""A quantised model whose windows have latent rows of another size than other layers'."""

HY_V4_CASE = _case("mixed", "hy_v4", **_WIDE | HY_V4_MIXED, formats=_MIX | {"latent": "Q8_0"})
"""The same with streams that are not mixed, sinks, and gates of each number."""

READERS_CASE = _case(
    "small_mixed",
    "gemma4",
    **_GEMMA4 | _NO_EXPERTS | {"layers": 6, "readers": 3, "layer_embedding": 32},
    formats=_MIX | {"layer_embed": "Q8_0", "layer_end": "Q8_0"},
    seed=70,
)
"""A quantised model whose layers have embeddings of their own, and whose last ones attend to keys of earlier ones."""

DENSE_CASE = _case("mixed", "qwen3", **_WIDE | _NO_EXPERTS, formats=_MIX)
"""A quantised model without experts."""

DENSE_HYBRID_CASE = _case("mixed", "qwen35", **_WIDE | _NO_EXPERTS, formats=_MIX)
"""The same whose layers attend and keep a state in turns."""

DENSE_SIBLING_CASES = (
    _case("mixed", "ernie4_5", **_WIDE | _NO_EXPERTS, biased=False, formats=_MIX),
    _case("mixed", "hunyuan-dense", **_WIDE | _NO_EXPERTS, formats=_MIX),
    _case("mixed", "mistral3", **_WIDE | _NO_EXPERTS, biased=False, formats=_MIX, extra=_MINISTRAL),
    _case("mixed", "smollm3", **_WIDE | _NO_EXPERTS, layers=4, biased=False, formats=_MIX),
    _case("mixed", "qwen3vl", **_WIDE | _NO_EXPERTS, formats=_MIX),
    _case("mixed", "lfm2", **_WIDE | LFM2_MIXED | _NO_EXPERTS, formats=_MIX, seed=68),
    # Of other seeds llama.cpp's perplexity is up to 0.7 % from that of exact arithmetic, ours up to 0.07 %.
    _case(
        "mixed", "nemotron_h", **_WIDE | NEMOTRON_MIXED | _NO_EXPERTS | {"seed": 78}, formats=_MIX
    ),
)
"""More of them, of architectures whose siblings have experts."""
