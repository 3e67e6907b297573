"""The small models of which the real tools make files, by name: what is different of each, and how it is converted.

Knows no tool, and not what is compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.oracle.toolchain import (
    tiny_dots3,
    tiny_formulas,
    tiny_glm5,
    tiny_hy_v4,
    tiny_jamba,
    tiny_latent,
    tiny_minimax_m3,
    tiny_norms,
    tiny_streams,
)
from tests.oracle.toolchain.tiny_deepseek4 import DEEPSEEK4_MIXED, DEEPSEEK4_PACKED
from tests.oracle.toolchain.tiny_formulas import MIMO_WIDE
from tests.oracle.toolchain.tiny_hf import NUM_TOKENS, TinyModel
from tests.oracle.toolchain.tiny_latent import LITE_LAYERS
from tests.oracle.toolchain.tiny_routers import CLASSES, wide_experts

_HYBRIDS = ("qwen3next", "qwen35", "qwen35moe")


_THETA = {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
_LINEAR = {"rope_type": "linear", "factor": 4.0, **_THETA}
_YARN = {"rope_type": "yarn", "factor": 4.0, **_THETA}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    **_THETA,
}


_LAGUNA_YARN = {
    "full_attention": _YARN | {"partial_rotary_factor": 0.5, "attention_factor": 1.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
"""As Laguna's published configuration has it, but for the factor."""
_THETA_ALONE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
_HUNYUAN_ROPE = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0},
    "max_position_embeddings": 32768,
    "num_attention_heads": 2,
    "head_dim": 128,
}
"""The one base, factor and head size that the converter takes."""


_LATENT_YARN = _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 0.9}
_EARLY_END = {"moe_layer_start_index": 1, "moe_layer_end_index": 2}
_TWO_SHARED = {"moe_num_shared_experts": 2, "num_key_value_heads": 1}
_MELLUM_YARN = {"full_attention": _YARN, "sliding_attention": _THETA | {"rope_type": "default"}}
_NO_WINDOW = {"layer_types": ["full_attention"] * 2, "sliding_window": None}
_MAVERICK = {"num_local_experts": 128, "use_qk_norm": False, "interleave_moe_layer_step": 2}
_IN_TURNS = ["dense", "sparse", "dense", "sparse"]


@dataclass(frozen=True)
class ToolCase:
    """A tiny model, and what the converter is told besides."""

    name: str
    tiny: TinyModel
    arguments: tuple[str, ...] = ()
    nvfp4: bool = False
    """Converted from a checkpoint of that format, as ModelOpt has it."""

    def __str__(self) -> str:
        return self.name


def _case(name: str, arch: str, *arguments: str, **options: object) -> ToolCase:
    tiny = TinyModel(arch, **options)
    if arch in _HYBRIDS and not tiny.extra_block:
        arguments += ("--no-mtp",)
    return ToolCase(f"{arch}_{name}", tiny, arguments)


def _wide(arch: str, width: int = 256) -> dict[str, object]:
    """Experts of this width."""
    if arch in ROUTER_ARCHS:
        return wide_experts(arch, width)
    if arch == "olmoe":
        return {"intermediate_size": width}
    shared = {} if arch == "qwen3moe" else {"shared_expert_intermediate_size": width}
    return {"moe_intermediate_size": width, **shared}


def _nvfp4(arch: str) -> ToolCase:
    """Rows of 64, which are a block of that format in llama.cpp."""
    case = _case("nvfp4", arch, hidden=64, seed=10, options=_wide(arch, 64))
    return replace(case, nvfp4=True)


ARCHS = ("qwen2moe", "qwen3moe", "olmoe", "qwen3next", "qwen35moe", "laguna", "gemma4")
_UNEVEN = {
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "n_routed_experts": 9,
    "n_group": 3,
    "topk_group": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 19,
    "kv_lora_rank": 37,
    "qk_nope_head_dim": 11,
    "qk_rope_head_dim": 6,
    "v_head_dim": 13,
    "q_lora_rank": 29,
}
_KIMI_UNEVEN = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 19,
    "n_shared_experts": 2,
    "kv_lora_rank": 37,
    "qk_nope_head_dim": 11,
    "qk_rope_head_dim": 6,
    "v_head_dim": 13,
    "linear_num_heads": 3,
    "linear_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "rms_norm_eps": 1e-5,
}
_KIMI_WIDE = {"moe_intermediate_size": 256, "linear_head_dim": 64}
_GEMMA_DENSE = {
    "enable_moe_block": False,
    **dict.fromkeys(
        ("num_experts", "top_k_experts", "moe_intermediate_size", "num_experts_per_tok")
    ),
}
_GEMMA_SMALL = _GEMMA_DENSE | {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": NUM_TOKENS,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "attention_k_eq_v": False,
}
_LFM2_ROUNDED = {
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.3,
    "block_multiple_of": 24,
}
"""The feed-forward's width is computed: 72 of 64."""
_LFM2_WIDE = {"intermediate_size": 256, "moe_intermediate_size": 256}
_GRANITE_WIDE = {"intermediate_size": 256, "shared_intermediate_size": 256}
_GRANITE_DENSE = {"num_local_experts": 0, "num_experts_per_tok": 0}
_GRANITE_DENSE_SMALL = _GRANITE_DENSE | {"intermediate_size": 48, "mamba_n_groups": 2}
_GRANITE_UNEVEN = {
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "intermediate_size": 19,
    "shared_intermediate_size": 23,
    "mamba_n_heads": 8,
    "mamba_n_groups": 4,
    "mamba_d_state": 7,
    "mamba_d_conv": 3,
}
_SWA_UNEVEN = {
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "intermediate_size": 19,
    "shared_intermediate_size": 23,
    "attention_bias": True,
    "tie_word_embeddings": True,
}
_USUAL_LISTS = {"layer_types": None, "layer_rope_theta": None, "no_rope_layers": None}
_GRANITE_BIASES = {"attention_bias": True, "mamba_conv_bias": False}
_WHOLE_ATTENTION = {
    "layer_types": ["full_attention", "full_attention"],
    "position_embedding_type": "rope",
}
_DENSE_ATTENTION = _WHOLE_ATTENTION | _GRANITE_DENSE | {"intermediate_size": 48}
_NEMOTRON_BIASES = {"attention_bias": True, "mlp_bias": True}
_NEMOTRON_WIDE = {
    "mamba_head_dim": 64,
    "moe_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 256,
}
ROUTER_ARCHS = tuple(CLASSES)
"""Those that differ by their routers."""
FORMULA_ARCHS = tuple(tiny_formulas.CLASSES)
"""Those that differ by the formula of their experts."""

SMALL_CASES = tuple(_case("small", arch) for arch in ARCHS + ROUTER_ARCHS + FORMULA_ARCHS)
"""In float32; no row is a multiple of 256."""

_OWN = (
    tiny_formulas,
    tiny_latent,
    tiny_streams,
    tiny_glm5,
    tiny_hy_v4,
    tiny_dots3,
    tiny_minimax_m3,
    tiny_norms,
    tiny_jamba,
)
_MORE = tuple(case for module in _OWN for case in module.OTHERS)
_WIDER = tuple(case for module in _OWN for case in module.MIXED)
OTHER_CASES = (
    _case("fused", "qwen3next", "--fuse-gate-up-exps", seed=2),
    _case("fused", "qwen35moe", "--fuse-gate-up-exps", seed=2),
    _case("fused_qkv", "qwen2moe", "--fuse-qkv", seed=5),
    _case("fused_qkv", "qwen3moe", "--fuse-qkv", seed=3),
    _case("fused_qkv", "olmoe", "--fuse-qkv", seed=2),
    _case("fused_qkv", "qwen3next", "--fuse-qkv", seed=3),
    _case("fused_qkv", "qwen35moe", "--fuse-qkv", seed=3),
    _case("tied", "qwen3moe", options={"tie_word_embeddings": True}, seed=4),
    _case("extra_block", "qwen35moe", extra_block=True),
    _case("extra_block", "qwen3next", extra_block=True),
    _case("long", "laguna", layers=5, seed=3),
    _case("element_gates", "laguna", layers=2, options={"gating": "per-element"}),
    _case("split", "qwen2moe", "--split-max-tensors", "10", seed=5),
    *(_case("small", arch) for arch in ("llama", "mixtral", "qwen2", "qwen3", "qwen35", "granite")),
    _case("small", "ernie4_5"),
    _case("tied", "ernie4_5", options={"tie_word_embeddings": True}, seed=2),
    _case("small", "hunyuan-dense"),
    _case("tied", "hunyuan-dense", options={"tie_word_embeddings": True}, seed=2),
    _case("dynamic", "hunyuan-dense", hidden=256, options=_HUNYUAN_ROPE, seed=3),
    _case("small", "mistral3"),
    _case("tied", "mistral3", options={"tie_word_embeddings": True}, seed=2),
    _case("small", "smollm3", layers=5),
    _case("tied", "smollm3", layers=4, options={"tie_word_embeddings": True}, seed=2),
    _case("small", "qwen3vl"),
    _case("tied", "qwen3vl", options={"tie_word_embeddings": True}, seed=2),
    _case("tied", "granite", options={"tie_word_embeddings": True}, seed=2),
    _case("small", "granite_swa"),
    _case("usual_lists", "granite_swa", layers=5, options=_USUAL_LISTS, seed=2),
    _case("biased", "granite_swa", options={"attention_bias": True}, seed=3),
    _case("llama3", "granite_swa", options={"rope_parameters": _LLAMA3}, seed=4),
    _case("yarn", "granite_swa", options={"rope_parameters": _YARN}, seed=5),
    _case("unshared", "granitemoe_swa", options={"shared_intermediate_size": 0}, seed=6),
    _case("uneven", "granitemoe_swa", options=_SWA_UNEVEN, seed=7),
    _case("extra_block", "qwen35", extra_block=True, seed=2),
    _case("llama3", "llama", seed=2, options={"rope_parameters": _LLAMA3}),
    _case("linear", "llama", seed=3, options={"rope_parameters": _LINEAR}),
    _case("yarn", "qwen3", seed=4, options={"rope_parameters": _YARN}),
    _case("tied", "qwen2", seed=5, options={"tie_word_embeddings": True}),
    _case("long", "afmoe", layers=5, seed=3),
    _case("tied", "afmoe", layers=4, options={"tie_word_embeddings": True}, seed=4),
    _case("no_dense", "afmoe", layers=4, options={"num_dense_layers": 0}, seed=5),
    _case("biased", "afmoe", layers=4, options={"attention_bias": True}, seed=6),
    _case("yarn", "afmoe", layers=4, options={"rope_parameters": _YARN}, seed=7),
    _case("long", "cohere2moe", layers=6, seed=3),
    _case("rms", "cohere2moe", layers=5, options={"rms_norm_eps": 1e-5}, seed=4),
    _case("unshared", "cohere2moe", layers=4, options={"num_shared_experts": 0}, seed=5),
    _case("no_dense", "cohere2moe", layers=4, options={"first_k_dense_replace": 0}, seed=6),
    _case("softmax", "cohere2moe", layers=4, options={"expert_selection_fn": "softmax"}, seed=7),
    _case("long", "exaone-moe", layers=5, seed=3),
    _case("no_dense", "exaone-moe", layers=4, options={"first_k_dense_replace": 0}, seed=5),
    _case("llama3", "exaone-moe", layers=4, options={"rope_parameters": _LLAMA3}, seed=7),
    _case("tied", "hy_v3", options={"tie_word_embeddings": True}, seed=4),
    _case("extra_block", "hy_v3", extra_block=True, seed=6),
    _case("in_turns", "hy_v3", layers=4, options={"mlp_layer_types": _IN_TURNS}, seed=5),
    _case("long", "llama4", layers=5, seed=3),
    _case("in_turns", "llama4", layers=4, options={"interleave_moe_layer_step": 2}, seed=4),
    _case("llama3", "llama4", layers=4, options={"rope_parameters": _LLAMA3}, seed=5),
    _case("tied", "llama4", layers=4, options={"tie_word_embeddings": True}, seed=6),
    _case("unnormed", "llama4", layers=4, options=_MAVERICK, seed=7),
    _case("long", "mellum", layers=5, options={"rope_parameters": _MELLUM_YARN}, seed=3),
    _case("full", "mellum", options=_NO_WINDOW, seed=4),
    _case("extra_block", "glm4moe", extra_block=True),
    _case("normed", "glm4moe", options={"use_qk_norm": True, "attention_bias": False}, seed=2),
    _case("groups", "glm4moe", options={"n_routed_experts": 6, "n_group": 3, "topk_group": 1}),
    _case("lone_layer", "bailingmoe2", layers=1, options={"first_k_dense_replace": 0}, seed=3),
    _case("shared_heads", "bailingmoe", options={"num_key_value_heads": 1}, seed=2),
    _case("unnormalised", "bailingmoe", options={"norm_topk_prob": False}, seed=9),
    _case("tied", "deepseek", layers=3, options={"tie_word_embeddings": True}, seed=5),
    _case("no_dense", "deepseek", options={"mlp_only_layers": []}, seed=6),
    _case("unnormalised", "dots1", options={"norm_topk_prob": False}, seed=4),
    _case("tied", "granitemoe", options={"tie_word_embeddings": True}, seed=5),
    _case("unshared", "ernie4_5-moe", options={"moe_num_shared_experts": 0}, seed=6),
    _case("uneven", "gpt-oss", layers=5, options={"num_local_experts": 5, "head_dim": 24}, seed=3),
    _case("no_blocks", "mimo2", "--no-mtp", "--fuse-qkv", layers=7, seed=4),
    _case("small", "deepseek_v2", layers=LITE_LAYERS),
    _case("small", "deepseek_v3", layers=3),
    _case("small", "mistral4", layers=3),
    _case("small", "kimi_linear", layers=4),
    _case("uneven", "kimi_linear", layers=5, options=_KIMI_UNEVEN, seed=2),
    _case("no_dense", "kimi_linear", options={"mlp_layer_types": ["sparse"] * 2}, seed=3),
    _case("fused_qkv", "kimi_linear", "--fuse-qkv", layers=3, seed=4),
    _case("small", "glm4_moe_lite"),
    _case("extra_block", "glm4_moe_lite", extra_block=True),
    _case("uneven", "deepseek_v3", seed=7, options=_UNEVEN),
    _case("small", "lfm2", layers=4),
    _case("rounded_width", "lfm2", layers=3, options=_LFM2_ROUNDED, seed=2),
    _case("small", "lfm2moe", layers=4),
    _case("small", "nemotron_h", layers=7),
    _case("biased", "nemotron_h", layers=5, options=_NEMOTRON_BIASES, seed=2),
    _case("small", "nemotron_h_moe", layers=7),
    _case("narrow_experts", "nemotron_h_moe", layers=7, options={"moe_latent_size": 40}, seed=2),
    _case("extra_block", "nemotron_h_moe", layers=7, extra_block=True, seed=3),
    _case("small", "granitehybrid", layers=4),
    _case("dense", "granitehybrid", layers=4, options=_GRANITE_DENSE, seed=2),
    _case("dense_small", "granitehybrid", layers=3, options=_GRANITE_DENSE_SMALL, seed=8),
    _case("uneven", "granitehybrid", layers=5, options=_GRANITE_UNEVEN, seed=3),
    _case("tied", "granitehybrid", options={"tie_word_embeddings": True}, seed=4),
    _case("biased", "granitehybrid", layers=3, options=_GRANITE_BIASES, seed=5),
    # Without recurrent layers it becomes a file of granitemoe, and without experts, too, of granite.
    _case("whole_attention", "granitehybrid", options=_WHOLE_ATTENTION, seed=6),
    _case("dense_attention", "granitehybrid", options=_DENSE_ATTENTION, seed=6),
    _case("dense", "gemma4", layers=5, options=_GEMMA_DENSE, seed=2),
    _case("small_dense", "gemma4", layers=6, options=_GEMMA_SMALL, seed=4),
    _case("own_values", "gemma4", layers=4, options={"attention_k_eq_v": False}, seed=3),
    _case("all_biased", "llama", options={"attention_bias": True, "mlp_bias": True}, seed=6),
    _case("wide_heads", "llama", options={"head_dim": 32}, seed=7),
    _case("biased", "qwen3", options={"attention_bias": True}, seed=6),
    _case("own_yarn", "qwen3", options={"rope_parameters": _YARN | {"attention_factor": 0.9}}),
    _case("own_yarn", "laguna", options={"rope_parameters": _LAGUNA_YARN}, seed=8),
    _case("small", "solar_open", seed=9),
    _case("biased", "granitemoe", options={"attention_bias": True}, seed=7),
    _case("unshared", "granitemoe", options={"shared_intermediate_size": 0}, seed=8),
    _case("whole_heads", "bailingmoe2", options={"rope_parameters": _THETA_ALONE}, seed=4),
    _case("dynamic", "hunyuan-moe", hidden=256, options=_HUNYUAN_ROPE, seed=3),
    # What llama.cpp computes otherwise, or can not open (docs/decisions/0100).
    _case("wide_values", "qwen3next", options={"linear_value_head_dim": 24}, seed=6),
    _case("narrow_values", "qwen35moe", options={"linear_value_head_dim": 8}, seed=6),
    _case("every_second", "ernie4_5-moe", layers=5, options={"moe_layer_interval": 2}, seed=7),
    _case("early_end", "ernie4_5-moe", layers=4, options=_EARLY_END, seed=8),
    _case("two_shared", "ernie4_5-moe", options=_TWO_SHARED, seed=9),
    _case("two_shared", "bailingmoe2", options={"n_shared_experts": 2}, seed=5),
    _case("plain_yarn", "deepseek_v2", options={"rope_parameters": _YARN}, seed=10),
    _case("plain_yarn", "deepseek_v3", options={"rope_parameters": _YARN}, seed=10),
    _case("own_yarn", "deepseek_v3", options={"rope_parameters": _LATENT_YARN}, seed=11),
    _case("in_turns", "deepseek_v3", layers=4, options={"mlp_layer_types": _IN_TURNS}, seed=12),
    _case("in_turns", "laguna", layers=4, options={"mlp_layer_types": _IN_TURNS}, seed=12),
    *(_case(name, arch, **options) for name, arch, options in _MORE),
)
"""What the converter writes otherwise for some."""

BF16_CASES = tuple(
    _case("bf16", arch, "--outtype", "bf16", seed=11)
    for arch in (
        *(*ARCHS, *ROUTER_ARCHS, "deepseek_v3", "glm4_moe_lite", "mistral4", "granitehybrid"),
        *("kimi_linear", "bailingmoe3", "mimo2", *tiny_formulas.LIMITED),
        *(
            "dbrx",
            "phimoe",
            "glm5_next",
            "hy_v4",
            "jamba",
            "minimax_m3",
            "qwen4exp",
            *tiny_latent.SPARSE,
        ),
    )
)
"""Rounded to bfloat16 by the converter, but for what it always keeps in float32."""

MIXED_CASES = (
    *(_case("narrow", arch, hidden=256, seed=6) for arch in ARCHS),
    *(_case("wide", arch, hidden=256, seed=7, options=_wide(arch)) for arch in ARCHS),
    *(
        _case("wide", arch, hidden=256, seed=7, options=_wide(arch))
        for arch in ROUTER_ARCHS
        if arch
        != "llama4"  # of which llama.cpp computes nothing without a layer that sees all tokens
    ),
    *(_case(*names, hidden=256, seed=7, **own) for *names, own in (*_WIDER, *DEEPSEEK4_MIXED)),
    _case("rows_of_96", "gpt-oss", hidden=96, seed=7, options={"intermediate_size": 160}),
    *(
        _case("wide", arch, hidden=256, seed=7, options={"moe_intermediate_size": 256})
        for arch in ("deepseek_v3", "glm4_moe_lite", "mistral4")
    ),
    _case("wide", "kimi_linear", hidden=256, layers=4, seed=7, options=_KIMI_WIDE),
    _case("wide", "mimo2", hidden=256, layers=3, seed=7, options=MIMO_WIDE),
    _case("wide", "llama4", hidden=256, layers=4, seed=7, options=_wide("llama4")),
    _case("wide_full", "afmoe", hidden=256, layers=4, seed=7, options=_wide("afmoe")),
    _case("wide", "lfm2", hidden=256, layers=4, seed=7, options={"intermediate_size": 256}),
    _case("wide", "lfm2moe", hidden=256, layers=4, seed=7, options=_LFM2_WIDE),
    *(
        _case("wide", arch, hidden=256, seed=7, options={"intermediate_size": 256})
        for arch in ("qwen35", "granite", "ernie4_5", "hunyuan-dense", "mistral3")
    ),
    _case("wide", "smollm3", hidden=256, layers=4, seed=7, options={"intermediate_size": 256}),
    _case("wide", "qwen3vl", hidden=256, seed=7, options={"intermediate_size": 256}),
    _case(
        "wide",
        "nemotron_h",
        hidden=256,
        layers=7,
        seed=7,
        options=_NEMOTRON_WIDE | {"intermediate_size": 256},
    ),
    _case("wide", "nemotron_h_moe", hidden=256, layers=7, seed=7, options=_NEMOTRON_WIDE),
    _case("wide", "granitehybrid", hidden=256, layers=4, seed=7, options=_GRANITE_WIDE),
    _case(
        "wide_dense",
        "granitehybrid",
        hidden=256,
        layers=4,
        seed=8,
        options=_GRANITE_WIDE | _GRANITE_DENSE,
    ),
    _case(
        "narrow_experts",
        "nemotron_h_moe",
        hidden=256,
        layers=7,
        seed=8,
        options=_NEMOTRON_WIDE | {"moe_latent_size": 96},
    ),
    _case("dense", "gemma4", hidden=256, layers=3, seed=7, options=_GEMMA_DENSE),
    _case(
        "small_dense",
        "gemma4",
        hidden=256,
        layers=6,
        seed=7,
        options=_GEMMA_SMALL | {"hidden_size_per_layer_input": 64},
    ),
)
"""To be quantised. Down matrices of the narrow ones have rows of 32, for which the quantiser falls back to others."""

PACKED_CASES = (
    _case("packed", "gpt-oss", packed=True, seed=2),
    _case("packed_wide", "gpt-oss", hidden=96, packed=True, options={"intermediate_size": 160}),
    *(_case(name, arch, **options) for name, arch, options in DEEPSEEK4_PACKED),
)
"""Converted from checkpoints whose experts are in MXFP4, as OpenAI and DeepSeek published them."""

_WITH_SCALES = ("dots1", "ernie4_5-moe", "glm4moe", "granitemoe", "hunyuan-moe")
NVFP4_CASES = tuple(_nvfp4(arch) for arch in ARCHS + _WITH_SCALES)
"""Converted from checkpoints in NVFP4, whose matrices have scales beside them."""

GOLDEN_CASES = (
    *(
        (_case("tiny", arch, hidden=32, seed=8), "F32")
        for arch in ARCHS
        if arch not in ("qwen35moe", "gemma4")
    ),
    (_case("tiny", "qwen35moe", hidden=32, seed=8, extra_block=True), "F32"),
    *(
        (_case("golden", arch, hidden=256, layers=layers, seed=9), mix)
        for arch, layers, mix in (
            ("qwen2moe", 1, "Q4_K_M"),
            ("qwen3moe", 1, "MXFP4_MOE"),
            ("olmoe", 1, "IQ4_XS"),
            ("qwen3next", 2, "Q5_K_S"),
            ("qwen35moe", 2, "Q6_K"),
            ("laguna", 2, "Q2_K"),
        )
    ),
    (_case("tiny", "qwen3moe", hidden=32, seed=8), "Q8_0"),
    *((_case("tiny", arch, hidden=32, seed=8), "F32") for arch in ("llama", "qwen2", "qwen3")),
    *(
        (_case("golden", arch, hidden=256, layers=1, seed=9), "Q4_K_M")
        for arch in ("llama", "qwen2", "qwen3")
    ),
    *((case, "NVFP4") for case in NVFP4_CASES if case.tiny.arch in ("qwen3moe", "qwen35moe")),
    *((_case("tiny", arch, hidden=32, seed=8), "F32") for arch in ("bailingmoe2", "granitemoe")),
    (_case("tiny", "afmoe", hidden=32, layers=4, seed=8), "F32"),
    (_case("tiny", "granitehybrid", hidden=32, seed=8), "F32"),
    (
        _case(
            "golden",
            "granitehybrid",
            hidden=256,
            seed=9,
            options=_GRANITE_DENSE | {"intermediate_size": 32, "shared_intermediate_size": 32},
        ),
        "Q4_K_M",
    ),
)
"""With the mix of each: what the ordinary suite opens."""
