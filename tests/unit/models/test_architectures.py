"""Opening files of every architecture: what is read, what may be missing, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.arch_cases import ARCH_CASES
from tests.support.toy_archs import ToyArch, toy_arch_metadata, toy_arch_weights, write_toy_arch
from thermocline.cli.info import inspect
from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.kernels.delta_contract import DeltaShape
from thermocline.kernels.dense_contract import Gating
from thermocline.kernels.reference import ReferenceKernels
from thermocline.messages import Pooling
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import ARCHITECTURES, open_model, read_spec
from thermocline.models.rope import LinearScaling, RopeRule, Yarn
from thermocline.models.spec import LayerKind

TOYS = {
    "olmoe": ToyArch("olmoe", kv_heads=4),
    "qwen2moe": ToyArch("qwen2moe"),
    "qwen35moe": ToyArch("qwen35moe", layers=4, rotary=8),
    "qwen3next": ToyArch("qwen3next", layers=4, rotary=8),
    "qwen4exp": ToyArch("qwen4exp", layers=4, rotary=8),
    "laguna": ToyArch("laguna", layers=5, rotary=8, window=16),
    "deepseek2": ToyArch("deepseek2", head_dim=24, rotary=8),
    "deepseek32": ToyArch("deepseek32", head_dim=24, rotary=8, query_rank=48),
    "dots3note": ToyArch(
        "dots3note", layers=4, head_dim=24, rotary=8, query_rank=48, near_head_dim=28
    ),
    "deepseek4": ToyArch("deepseek4", layers=3, head_dim=24, rotary=8, query_rank=48, window=8),
    "glm-dsa": ToyArch("glm-dsa", head_dim=24, rotary=8, query_rank=48),
    "glm5-next": ToyArch("glm5-next", layers=4, head_dim=24, rotary=0, query_rank=48),
    "mistral4": ToyArch("mistral4", head_dim=24, rotary=8, query_rank=48, biased=False),
    "kimi-linear": ToyArch("kimi-linear", layers=4, head_dim=24, rotary=8),
    "bailingmoe3": ToyArch("bailingmoe3", layers=4, head_dim=24, rotary=8),
    "afmoe": ToyArch("afmoe", layers=5, window=16),
    "bailingmoe": ToyArch("bailingmoe"),
    "cohere2moe": ToyArch("cohere2moe", layers=5, window=16, shared=64),
    "dbrx": ToyArch("dbrx"),
    "deepseek": ToyArch("deepseek", kv_heads=4),
    "bailingmoe2": ToyArch(
        "bailingmoe2",
        rotary=8,
        extra={"expert_group_count": 4, "expert_group_used_count": 2},
    ),
    "dots1": ToyArch("dots1", kv_heads=4),
    "ernie4_5": ToyArch("ernie4_5", experts=0, used=0, biased=False),
    "ernie4_5-moe": ToyArch("ernie4_5-moe"),
    "exaone-moe": ToyArch("exaone-moe", layers=5, window=16),
    "glm4moe": ToyArch("glm4moe", rotary=8),
    "granite": ToyArch("granite", experts=0, used=0),
    "granite_swa": ToyArch("granite_swa", layers=5, window=16),
    "granitemoe": ToyArch("granitemoe"),
    "hunyuan-dense": ToyArch("hunyuan-dense", experts=0, used=0),
    "hunyuan-moe": ToyArch("hunyuan-moe"),
    "hy_v3": ToyArch("hy_v3"),
    "hy_v4": ToyArch("hy_v4", head_dim=24, rotary=8, query_rank=48),
    "llama4": ToyArch("llama4", layers=5, used=1, window=16),
    "maple": ToyArch("maple", layers=5, window=16),
    "mellum": ToyArch("mellum", layers=5, window=16),
    "smallthinker": ToyArch("smallthinker", layers=5, window=16),
    "mimo2": ToyArch("mimo2", kv_heads=1, head_dim=24, rotary=8, window=16),
    "minimax-m3": ToyArch("minimax-m3", rotary=8),
    "minimax-m2": ToyArch("minimax-m2", rotary=8),
    "phimoe": ToyArch("phimoe", stretched=True),
    "qwen3vlmoe": ToyArch("qwen3vlmoe"),
    "llama": ToyArch("llama", biased=False, experts=0, used=0),
    "qwen2": ToyArch("qwen2", experts=0, used=0),
    "qwen3": ToyArch("qwen3", experts=0, used=0),
    "qwen3vl": ToyArch("qwen3vl", experts=0, used=0),
    "mistral3": ToyArch("mistral3", experts=0, used=0, biased=False),
    "step35": ToyArch("step35", layers=5, window=16),
    "smollm3": ToyArch("smollm3", layers=5, experts=0, used=0, biased=False),
    "qwen35": ToyArch("qwen35", layers=4, rotary=8, experts=0, used=0),
    "gpt-oss": ToyArch("gpt-oss", layers=4, window=16),
    "lfm2": ToyArch("lfm2", layers=4, interval=3, experts=0, used=0),
    "lfm2moe": ToyArch("lfm2moe", layers=4, interval=3),
    "nemotron_h": ToyArch("nemotron_h", layers=5, experts=0, used=0),
    "nemotron_h_moe": ToyArch("nemotron_h_moe", layers=5),
    "granitehybrid": ToyArch("granitehybrid", layers=4, interval=3),
    "jamba": ToyArch("jamba", layers=4, interval=3),
    "gemma4": ToyArch("gemma4", head_dim=32, kv_heads=1, window=16),
}
# Keys that have a default, each stated by its architecture; the tokenizer's are not asked for here.
OPTIONAL = {
    *["attention.key_length", "attention.value_length", "attention.head_count_kv"],
    *["rope.freq_base", "rope.dimension_sections", "full_attention_interval"],
    *["expert_feed_forward_length", "expert_shared_count", "expert_gating_func"],
    *["rope.dimension_count_swa", "rope.freq_base_swa", "attention.sliding_window"],
    *["rope.scaling.type", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"],
    "rope.scaling.original_context_length",
    *["attention.shared_kv_layers", "embedding_length_per_layer_input", "final_logit_softcapping"],
    "attention.value_length_swa",
}
# Keys that some may leave out, or that say nothing of text.
OWN_OPTIONAL = {
    "afmoe": {"expert_weights_norm", "rope.dimension_count"},
    "bailingmoe": {"rope.dimension_count"},
    "cohere2moe": {
        *["rope.dimension_count", "expert_weights_norm", "expert_shared_feed_forward_length"],
    },
    "deepseek": {"rope.dimension_count"},
    "minimax-m3": {
        *["expert_weights_norm", "expert_weights_scale", "leading_dense_block_count"],
    },
    "deepseek4": {"embedding_length_out", "swiglu_clamp_exp", "swiglu_clamp_shexp"},
    "bailingmoe2": {"expert_group_count"},
    "bailingmoe3": {"expert_shared_feed_forward_length", "expert_weights_norm", "kda.safe_gate"},
    "dots3note": {
        *["expert_weights_norm", "expert_weights_scale"],
        *["attention.key_length_swa", "attention.value_length_swa"],
    },
    "ernie4_5-moe": {"expert_shared_feed_forward_length"},
    "granite": {"attention.scale", "embedding_scale", "residual_scale"},
    "granite_swa": {
        *["attention.scale", "embedding_scale", "residual_scale", "rope.dimension_count"],
        *["expert_shared_feed_forward_length", "expert_count"],  # without experts it is dense
    },
    "granitemoe": {
        *["attention.scale", "embedding_scale", "residual_scale"],
        "expert_shared_feed_forward_length",
    },
    "granitehybrid": {
        *["attention.scale", "embedding_scale", "residual_scale", "logit_scale"],
        "expert_shared_feed_forward_length",
        *["expert_count", "expert_used_count"],  # without experts it is dense
    },
    "exaone-moe": {
        *["rope.dimension_count", "leading_dense_block_count"],
        "expert_shared_feed_forward_length",
    },
    "glm4moe": {"leading_dense_block_count"},
    "glm5-next": {
        *["attention.layer_norm_epsilon", "attention.indexer.kpool_select_tail"],
        *["expert_weights_norm", "expert_weights_scale", "kda.gate_lower_bound"],
    },
    "gpt-oss": {"rope.dimension_count"},
    "hunyuan-moe": {"expert_shared_feed_forward_length"},
    "hy_v3": {"rope.dimension_count", "expert_shared_feed_forward_length"},
    "hy_v4": {"attention.indexer.top_k", "expert_weights_norm", "expert_weights_scale"},
    "llama4": {"rope.dimension_count"},
    "maple": {"rope.dimension_count"},
    "mellum": {"rope.dimension_count"},
    "smallthinker": {"rope.dimension_count"},
    "mimo2": {"attention.value_scale", "expert_weights_norm"},
    "mistral4": {"attention.q_lora_rank", "attention.key_length_mla"},
    "phimoe": {"rope.dimension_count", "rope.scaling.attn_factor"},
    "qwen2moe": {"expert_shared_feed_forward_length"},  # its tensor says it
    "qwen3vl": {"n_deepstack_layers"},
    "qwen4exp": {"attention.compress_ratios", "attention.recurrent_layers", "ple.layers"},
    "step35": {
        *["expert_weights_scale", "expert_shared_feed_forward_length", "leading_dense_block_count"],
        *["swiglu_clamp_exp", "swiglu_clamp_shexp"],
    },
    "qwen3vlmoe": {"n_deepstack_layers"},
    "deepseek2": {
        "attention.q_lora_rank",
        "attention.key_length_mla",  # by which old files are known
    },
}
# A dense width is read by those that have dense layers, or experts of that width.
UNREAD = {"feed_forward_length"}
WITH_DENSE = (
    *("olmoe", "laguna", "deepseek2", "mistral4", "kimi-linear", "bailingmoe3"),
    *(
        "afmoe",
        "bailingmoe",
        "cohere2moe",
        "dbrx",
        "deepseek",
        "bailingmoe2",
        "dots1",
        "ernie4_5-moe",
        "exaone-moe",
        "glm4moe",
        "granite_swa",
        "granitemoe",
        "hy_v3",
        "llama4",
        "phimoe",
        "step35",
        "mimo2",
    ),
    *("lfm2moe", "nemotron_h_moe", "granitehybrid", "jamba", "gemma4"),
)
WITHOUT_EXPERTS = (
    "ernie4_5",
    "granite",
    "hunyuan-dense",
    "lfm2",
    "llama",
    "nemotron_h",
    "qwen2",
    "qwen3",
    "qwen3vl",
    "qwen35",
    "mistral3",
    "smollm3",
)
WITHOUT_SHARED = (
    "olmoe",
    "dbrx",
    "phimoe",
    "maple",
    "smallthinker",
    "mellum",
    "mimo2",
    "minimax-m2",
    "qwen3vlmoe",
    "lfm2moe",
    "jamba",
    "gemma4",
    "gpt-oss",
    *WITHOUT_EXPERTS,
)


def spec_of(path):
    with open_model_file(path) as file:
        return read_spec(file)


def opened(path):
    with open_model_file(path) as file:
        return open_model(file, ReferenceKernels())


def required_keys():
    """Every (architecture, key) that a file must have."""
    for arch, toy in TOYS.items():
        prefix = f"{arch}."
        keys = {
            key.removeprefix(prefix) for key in toy_arch_metadata(toy) if key.startswith(prefix)
        }
        if arch in WITHOUT_EXPERTS:
            unread = {"rope.dimension_count"}  # of whole heads, where it is not named
        else:
            unread = set() if arch in WITH_DENSE else UNREAD
        may_lack = OPTIONAL | OWN_OPTIONAL.get(arch, set()) | unread
        yield from ((arch, key) for key in sorted(keys - may_lack))


def test_every_architecture_has_cases():
    """Each is held against its oracle, but for the first, which has cases of its own."""
    assert (
        {case.toy.arch for case in ARCH_CASES} | {"qwen3moe"}
        == set(ARCHITECTURES)
        == {
            *TOYS,
            "qwen3moe",
        }
    )


@pytest.mark.parametrize(("arch", "key"), list(required_keys()))
def test_a_missing_key_is_named(tmp_path, arch, key):
    """No silent default stands in for a number that shapes the result."""
    path = write_toy_arch(tmp_path / "m.gguf", TOYS[arch], metadata={f"{arch}.{key}": None})
    with pytest.raises(ModelFileError, match=f"{arch}.{key}"):
        spec_of(path)


@pytest.mark.parametrize(
    ("arch", "key", "value", "error"),
    [
        ("qwen2moe", "expert_weights_scale", 2.5, UnsupportedModelError),
        ("olmoe", "rope.scaling.factor", -4.0, ModelFileError),
        ("olmoe", "rope.dimension_count", 8, UnsupportedModelError),
        ("qwen35moe", "rope.scaling.type", "longrope", UnsupportedModelError),
        ("qwen35moe", "rope.dimension_count", 7, ModelFileError),
        ("qwen35moe", "rope.dimension_count", 18, ModelFileError),
        ("qwen35moe", "ssm.inner_size", 65, ModelFileError),
        ("qwen35moe", "ssm.group_count", 3, ModelFileError),
        ("qwen35moe", "ssm.conv_kernel", 1, ModelFileError),
        ("qwen35moe", "nextn_predict_layers", 4, ModelFileError),
        ("laguna", "expert_gating_func", 5, UnsupportedModelError),
        ("laguna", "expert_gating_func", 64, UnsupportedModelError),
        ("laguna", "expert_shared_count", 2, UnsupportedModelError),
        ("laguna", "rope.scaling.type", "su", UnsupportedModelError),
        ("laguna", "rope.scaling.yarn_log_multiplier", 0.5, UnsupportedModelError),
        ("laguna", "attention.head_count", [4, 6], ModelFileError),
        ("laguna", "attention.head_count_kv", [2, 2, 1, 2, 2], UnsupportedModelError),
        ("laguna", "attention.sliding_window_pattern", [True, False], ModelFileError),
        ("laguna", "leading_dense_block_count", -1, ModelFileError),
        ("lfm2", "shortconv.l_cache", 1, ModelFileError),
        ("lfm2", "attention.head_count_kv", [0, 0, 0, 0], UnsupportedModelError),
        ("lfm2", "attention.causal", False, UnsupportedModelError),
        ("lfm2", "attention.sliding_window", 512, UnsupportedModelError),
        ("lfm2", "expert_count", 4, UnsupportedModelError),
        ("lfm2moe", "shortconv.l_cache", 1, ModelFileError),
        ("lfm2moe", "attention.head_count_kv", [0, 0, 0, 0], UnsupportedModelError),
        ("lfm2moe", "attention.head_count_kv", [0, 2, 1, 0], UnsupportedModelError),
        ("lfm2moe", "expert_weights_scale", 2.5, UnsupportedModelError),
        ("nemotron_h", "attention.head_count_kv", [0, 0, 0, 0, 0], UnsupportedModelError),
        ("nemotron_h", "feed_forward_length", [0, 32], ModelFileError),
        ("nemotron_h", "feed_forward_length", [0, 0, 0, 0, 0], ModelFileError),
        ("nemotron_h", "ssm.inner_size", 65, ModelFileError),
        ("nemotron_h", "ssm.group_count", 3, ModelFileError),
        ("nemotron_h", "attention.causal", False, UnsupportedModelError),
        ("nemotron_h", "expert_count", 4, UnsupportedModelError),
        ("nemotron_h_moe", "moe_latent_size", -1, ModelFileError),
        ("nemotron_h_moe", "expert_used_count", [0, 2, 0, 0, 0], ModelFileError),
        ("nemotron_h_moe", "expert_used_count", [0, 2, 0, 0, 9], ModelFileError),
        ("nemotron_h_moe", "expert_feed_forward_length", [0, 32, 0, 0, 0], ModelFileError),
        ("nemotron_h_moe", "ssm.inner_size", 65, ModelFileError),
        ("nemotron_h_moe", "ssm.group_count", 3, ModelFileError),
        ("nemotron_h_moe", "ssm.conv_kernel", 1, ModelFileError),
        ("nemotron_h_moe", "feed_forward_length", [0, 32], ModelFileError),
        ("granitehybrid", "attention.head_count_kv", [0, 0, 0, 0], UnsupportedModelError),
        ("granitehybrid", "attention.head_count_kv", [0, 2, 1, 0], UnsupportedModelError),
        ("granitehybrid", "expert_gating_func", 2, UnsupportedModelError),
        ("granitehybrid", "expert_weights_scale", 2.5, UnsupportedModelError),
        ("granitehybrid", "expert_shared_feed_forward_length", -1, ModelFileError),
        ("granitehybrid", "residual_scale", -0.5, ModelFileError),
        ("granitehybrid", "logit_scale", -8.0, ModelFileError),
        ("granitehybrid", "ssm.inner_size", 65, ModelFileError),
        ("granitehybrid", "ssm.group_count", 3, ModelFileError),
        ("granitehybrid", "ssm.conv_kernel", 1, ModelFileError),
        ("jamba", "attention.head_count_kv", [0, 0, 0, 0], UnsupportedModelError),
        ("jamba", "attention.head_count_kv", [0, 2, 1, 0], UnsupportedModelError),
        ("jamba", "expert_gating_func", 2, UnsupportedModelError),
        ("jamba", "expert_weights_scale", 2.5, UnsupportedModelError),
        ("jamba", "expert_count", 0, ModelFileError),
        ("jamba", "expert_used_count", 9, ModelFileError),
        ("jamba", "ssm.conv_kernel", 1, ModelFileError),
        ("jamba", "ssm.state_size", 0, ModelFileError),
        ("jamba", "ssm.time_step_rank", 0, ModelFileError),
        ("deepseek2", "attention.key_length", 41, UnsupportedModelError),
        ("deepseek2", "attention.value_length", 31, UnsupportedModelError),
        ("deepseek2", "attention.head_count_kv", 2, UnsupportedModelError),
        ("deepseek2", "attention.temperature_scale", -0.1, ModelFileError),
        ("deepseek2", "rope.dimension_count", 24, ModelFileError),
        ("mistral4", "attention.temperature_scale", -0.1, ModelFileError),
        ("kimi-linear", "attention.head_count_kv", [0, 0, 0, 0], UnsupportedModelError),
        ("kimi-linear", "attention.head_count_kv", [0, 0, 1], ModelFileError),
        ("kimi-linear", "kda.gate_lower_bound", -5.0, UnsupportedModelError),
        ("kimi-linear", "kda.head_dim", 0, ModelFileError),
        ("kimi-linear", "ssm.conv_kernel", 1, ModelFileError),
        ("kimi-linear", "rope.dimension_count", 24, ModelFileError),
        ("kimi-linear", "rope.scaling.factor", 4.0, UnsupportedModelError),
        ("kimi-linear", "expert_gating_func", 5, UnsupportedModelError),
        ("bailingmoe3", "attention.head_count_kv", [0, 0, 0, 0], UnsupportedModelError),
        ("bailingmoe3", "attention.head_count_kv", [0, 0, 1], ModelFileError),
        ("bailingmoe3", "kda.gate_lower_bound", 0.0, ModelFileError),
        ("bailingmoe3", "kda.safe_gate", False, UnsupportedModelError),
        ("bailingmoe3", "kda.head_dim", 0, ModelFileError),
        ("bailingmoe3", "ssm.conv_kernel", 1, ModelFileError),
        ("bailingmoe3", "rope.dimension_count", 24, ModelFileError),
        ("bailingmoe3", "expert_gating_func", 5, UnsupportedModelError),
        ("bailingmoe3", "swiglu_clamp_exp", [0.0, -7.0, 0.0, 0.0], ModelFileError),
        ("bailingmoe3", "swiglu_clamp_shexp", [0.0, 7.0, 0.0], ModelFileError),
        ("mistral4", "expert_gating_func", 5, UnsupportedModelError),
        ("deepseek2", "nextn_predict_layers", 3, ModelFileError),
        ("afmoe", "attention.sliding_window", 0, ModelFileError),
        ("afmoe", "attention.sliding_window_pattern", [True, False], ModelFileError),
        ("afmoe", "expert_gating_func", 5, UnsupportedModelError),
        ("afmoe", "leading_dense_block_count", 5, ModelFileError),
        ("afmoe", "rope.dimension_count", 18, ModelFileError),
        ("afmoe", "rope.freq_base_swa", 0.0, ModelFileError),
        ("bailingmoe", "expert_gating_func", 2, UnsupportedModelError),
        ("bailingmoe", "rope.dimension_count", 8, UnsupportedModelError),
        ("deepseek", "expert_gating_func", 2, UnsupportedModelError),
        ("deepseek", "rope.dimension_count", 8, UnsupportedModelError),
        ("deepseek", "leading_dense_block_count", 3, ModelFileError),
        ("cohere2moe", "attention.sliding_window", 0, ModelFileError),
        ("cohere2moe", "attention.layer_norm_epsilon", 0.0, ModelFileError),
        ("cohere2moe", "expert_gating_func", 5, UnsupportedModelError),
        ("cohere2moe", "leading_dense_block_count", 5, ModelFileError),
        ("cohere2moe", "logit_scale", -1.0, ModelFileError),
        ("cohere2moe", "rope.dimension_count", 8, UnsupportedModelError),
        ("cohere2moe", "rope.scaling.factor", 8.0, UnsupportedModelError),
        ("dbrx", "attention.clamp_kqv", -8.0, ModelFileError),
        ("dbrx", "attention.layer_norm_epsilon", 0.0, ModelFileError),
        ("dbrx", "attention.causal", False, UnsupportedModelError),
        ("dbrx", "attention.sliding_window", 16, UnsupportedModelError),
        ("dbrx", "expert_weights_scale", 2.0, UnsupportedModelError),
        ("dbrx", "rope.dimension_count", 8, UnsupportedModelError),
        ("dbrx", "rope.scaling.factor", 8.0, UnsupportedModelError),
        ("exaone-moe", "attention.sliding_window", 0, ModelFileError),
        ("exaone-moe", "attention.sliding_window_pattern", [True, False], ModelFileError),
        ("exaone-moe", "expert_gating_func", 5, UnsupportedModelError),
        ("exaone-moe", "leading_dense_block_count", 5, ModelFileError),
        ("exaone-moe", "rope.dimension_count", 8, UnsupportedModelError),
        ("hy_v3", "expert_weights_scale", -1.0, ModelFileError),
        ("hy_v3", "rope.dimension_count", 8, UnsupportedModelError),
        ("mimo2", "attention.head_count", [4, 4, 2], UnsupportedModelError),
        ("mimo2", "attention.head_count_kv", [1, 2], ModelFileError),
        ("mimo2", "attention.head_count_kv", [1, 2, 1], UnsupportedModelError),
        ("mimo2", "attention.key_length_swa", 32, UnsupportedModelError),
        ("mimo2", "attention.sliding_window_pattern", [1, 0], ModelFileError),
        ("mimo2", "attention.sliding_window_pattern", [0, 1, 2], ModelFileError),
        ("mimo2", "attention.value_length", 0, ModelFileError),
        ("mimo2", "attention.value_length", None, ModelFileError),
        ("mimo2", "attention.value_length_swa", 8, UnsupportedModelError),
        ("mimo2", "attention.value_scale", 0.0, ModelFileError),
        ("mimo2", "expert_gating_func", 1, UnsupportedModelError),
        ("mimo2", "expert_shared_count", 1, UnsupportedModelError),
        ("mimo2", "expert_weights_norm", False, UnsupportedModelError),
        ("mimo2", "expert_weights_scale", 2.5, UnsupportedModelError),
        ("mimo2", "rope.dimension_count_swa", 4, UnsupportedModelError),
        ("mimo2", "rope.scaling.factor", 4.0, UnsupportedModelError),
        ("llama4", "attention.sliding_window", 0, ModelFileError),
        ("llama4", "attention.sliding_window_pattern", 2, UnsupportedModelError),
        ("llama4", "attention.temperature_length", 0, ModelFileError),
        ("llama4", "attention.temperature_scale", -0.1, ModelFileError),
        ("llama4", "expert_gating_func", 1, UnsupportedModelError),
        ("llama4", "expert_used_count", 2, UnsupportedModelError),
        ("llama4", "expert_weights_scale", 2.0, UnsupportedModelError),
        ("llama4", "rope.dimension_count", 8, UnsupportedModelError),
        ("maple", "rope.dimension_count", 18, ModelFileError),
        ("maple", "attention.sliding_window", 0, ModelFileError),
        ("maple", "attention.sliding_window_pattern", 4, ModelFileError),
        ("maple", "attention.sliding_window_pattern", [True, False], ModelFileError),
        ("maple", "expert_weights_scale", 1.5, UnsupportedModelError),
        ("maple", "swiglu_clamp_exp", [7.0] * 4, ModelFileError),
        ("maple", "swiglu_clamp_exp", [7.0, 7.0, -7.0, 7.0, 7.0], ModelFileError),
        ("maple", "swiglu_clamp_exp", [7.0, float("nan"), 7.0, 7.0, 7.0], ModelFileError),
        ("maple", "swiglu_clamp_exp", [7.0, float("inf"), 7.0, 7.0, 7.0], ModelFileError),
        ("maple", "swiglu_clamp_exp", float("inf"), ModelFileError),
        ("maple", "swiglu_clamp_exp", float("nan"), ModelFileError),
        ("maple", "swiglu_clamp_exp", [], ModelFileError),
        ("maple", "swiglu_clamp_exp", "7", ModelFileError),
        ("smallthinker", "attention.sliding_window_pattern", 4, UnsupportedModelError),
        ("smallthinker", "expert_gating_func", 5, UnsupportedModelError),
        ("smallthinker", "expert_weights_scale", -1.0, ModelFileError),
        ("smallthinker", "rope.dimension_count", 8, UnsupportedModelError),
        ("phimoe", "attention.layer_norm_rms_epsilon", 0.0, ModelFileError),
        ("phimoe", "expert_used_count", 1, UnsupportedModelError),
        ("phimoe", "expert_used_count", 3, UnsupportedModelError),
        ("phimoe", "expert_gating_func", 2, UnsupportedModelError),
        ("phimoe", "expert_weights_scale", 2.0, UnsupportedModelError),
        ("phimoe", "rope.dimension_count", 8, UnsupportedModelError),
        ("phimoe", "rope.scaling.attn_factor", -1.0, ModelFileError),
        ("phimoe", "rope.scaling.factor", 8.0, UnsupportedModelError),
        ("phimoe", "rope.scaling.original_context_length", 0, ModelFileError),
        ("step35", "rope.dimension_count", 14, ModelFileError),
        ("step35", "rope.dimension_count", 18, ModelFileError),
        ("step35", "rope.dimension_count_swa", 18, ModelFileError),
        ("step35", "attention.head_count", [4, 6, 6, 6], ModelFileError),
        ("step35", "attention.head_count", [4, 5, 6, 6, 4], ModelFileError),
        ("step35", "attention.head_count_kv", [2, 2, 1, 2, 2], UnsupportedModelError),
        ("step35", "attention.sliding_window_pattern", 4, ModelFileError),
        ("step35", "attention.sliding_window", 0, ModelFileError),
        ("step35", "expert_gating_func", 5, UnsupportedModelError),
        ("step35", "expert_weights_scale", -1.0, ModelFileError),
        ("step35", "swiglu_clamp_exp", [7.0] * 4, ModelFileError),
        ("step35", "swiglu_clamp_exp", [7.0, 7.0, -7.0, 7.0, 7.0], ModelFileError),
        ("step35", "swiglu_clamp_shexp", [7.0, float("nan"), 7.0, 7.0, 7.0], ModelFileError),
        ("step35", "swiglu_clamp_shexp", -1.0, ModelFileError),
        ("step35", "nextn_predict_layers", 5, ModelFileError),
        ("mellum", "rope.dimension_count", 8, UnsupportedModelError),
        ("mellum", "rope.freq_base_swa", 0.0, ModelFileError),
        ("mellum", "expert_weights_scale", 1.5, UnsupportedModelError),
        ("mellum", "attention.sliding_window_pattern", [True, False], ModelFileError),
        ("bailingmoe2", "expert_group_count", 3, ModelFileError),
        ("bailingmoe2", "expert_group_count", 8, ModelFileError),
        ("bailingmoe2", "expert_group_used_count", 5, ModelFileError),
        ("dots1", "expert_gating_func", 5, UnsupportedModelError),
        ("glm4moe", "leading_dense_block_count", 3, ModelFileError),
        ("glm4moe", "expert_weights_scale", -1.0, ModelFileError),
        ("ernie4_5", "rope.dimension_count", 8, UnsupportedModelError),
        ("ernie4_5", "attention.causal", False, UnsupportedModelError),
        ("ernie4_5", "expert_count", 4, UnsupportedModelError),
        ("ernie4_5-moe", "interleave_moe_layer_step", 0, ModelFileError),
        ("ernie4_5-moe", "expert_gating_func", 2, UnsupportedModelError),
        ("granite", "rope.scaling.finetuned", False, UnsupportedModelError),
        ("granite_swa", "attention.rope_pattern", [True, False], ModelFileError),
        ("granite_swa", "attention.sliding_window", 0, ModelFileError),
        ("granite_swa", "attention.sliding_window_pattern", [True, False], ModelFileError),
        ("granite_swa", "attention.sliding_window_pattern", 4, ModelFileError),
        ("granite_swa", "expert_gating_func", 2, UnsupportedModelError),
        ("granite_swa", "expert_weights_scale", 2.5, UnsupportedModelError),
        ("granite_swa", "logit_scale", 0.0, ModelFileError),
        ("granite_swa", "rope.dimension_count", 8, UnsupportedModelError),
        ("granite_swa", "rope.freq_base_swa", 0.0, ModelFileError),
        ("granite_swa", "rope.scaling.type", "longrope", UnsupportedModelError),
        ("granitemoe", "rope.scaling.finetuned", False, UnsupportedModelError),
        ("granitemoe", "logit_scale", 0.0, ModelFileError),
        ("granitemoe", "residual_scale", -0.5, ModelFileError),
        ("hunyuan-dense", "rope.dimension_count", 8, UnsupportedModelError),
        ("hunyuan-dense", "attention.causal", False, UnsupportedModelError),
        ("hunyuan-dense", "expert_count", 2, UnsupportedModelError),
        ("hunyuan-moe", "expert_gating_func", 2, UnsupportedModelError),
        ("minimax-m2", "rope.dimension_count", 18, ModelFileError),
        ("minimax-m2", "expert_weights_scale", 2.0, UnsupportedModelError),
        ("mistral3", "rope.dimension_count", 8, UnsupportedModelError),
        ("mistral3", "attention.temperature_scale", -0.1, ModelFileError),
        ("mistral3", "expert_count", 4, UnsupportedModelError),
        ("smollm3", "rope.dimension_count", 8, UnsupportedModelError),
        ("smollm3", "attention.sliding_window", 512, UnsupportedModelError),
        ("smollm3", "expert_count", 4, UnsupportedModelError),
        ("qwen3vl", "rope.dimension_count", 8, UnsupportedModelError),
        ("qwen3vl", "attention.causal", False, UnsupportedModelError),
        ("qwen3vl", "expert_count", 4, UnsupportedModelError),
        ("qwen3vlmoe", "rope.dimension_count", 8, UnsupportedModelError),
        ("llama", "attention.causal", False, UnsupportedModelError),
        ("llama", "attention.sliding_window", 4096, UnsupportedModelError),
        ("llama", "attention.scale", -1.0, ModelFileError),
        ("llama", "rope.dimension_count", 8, UnsupportedModelError),
        ("llama", "expert_shared_count", 1, UnsupportedModelError),
        ("llama", "pooling_type", 9, UnsupportedModelError),
        ("qwen2", "expert_count", 4, UnsupportedModelError),
        ("qwen3", "rope.scaling.type", "longrope", UnsupportedModelError),
        ("gemma4", "attention.shared_kv_layers", 2, ModelFileError),
        ("gemma4", "attention.shared_kv_layers", 9, ModelFileError),
        ("gemma4", "attention.shared_kv_layers", -1, ModelFileError),
        ("gemma4", "embedding_length_per_layer_input", -1, ModelFileError),
        ("gemma4", "feed_forward_length", [48, 48], ModelFileError),
        ("gemma4", "expert_feed_forward_length", [32, 32, 16], UnsupportedModelError),
        ("gemma4", "attention.value_length_swa", 8, UnsupportedModelError),
        ("gemma4", "attention.head_count_kv", [2, 1, 1], UnsupportedModelError),
        ("gemma4", "attention.head_count_kv", [3, 3, 1], ModelFileError),
        ("gemma4", "attention.sliding_window_pattern", [True, False], ModelFileError),
        ("gemma4", "expert_gating_func", 2, UnsupportedModelError),
        ("gemma4", "rope.scaling.factor", 8.0, UnsupportedModelError),
        ("gemma4", "final_logit_softcapping", -1.0, ModelFileError),
    ],
)
def test_what_would_be_wrong_is_refused(tmp_path, arch, key, value, error):
    """Numbers that do not go together, and what is not supported, are errors that name the key."""
    path = write_toy_arch(tmp_path / "m.gguf", TOYS[arch], metadata={f"{arch}.{key}": value})
    with pytest.raises(error, match=key.split(".")[-1].partition("_log")[0]):
        spec_of(path)


def test_a_hybrid_knows_its_layers(tmp_path):
    """Three layers with state, one with keys and values; and what a state takes."""
    spec = spec_of(write_toy_arch(tmp_path / "m.gguf", TOYS["qwen35moe"]))
    assert [kind is LayerKind.RECURRENT for kind in spec.layer_kinds] == [True, True, True, False]
    assert spec.recurrent_layers == (0, 1, 2)
    assert isinstance(spec.recurrent, DeltaShape)
    assert spec.recurrent.tiled
    assert spec.recurrent.state.num_bytes == 4 * (3 * 128 + 4 * 16 * 16)
    assert spec.rotary_dims == 8
    assert not spec_of(write_toy_arch(tmp_path / "n.gguf", TOYS["qwen3next"])).recurrent.tiled


def test_a_block_may_lack_its_mixer_or_its_feed_forward(tmp_path):
    """Nemotron's blocks are layers: two keep states, one keys and values, and two with experts nothing."""
    path = write_toy_arch(tmp_path / "m.gguf", TOYS["nemotron_h_moe"])
    with open_model_file(path) as file:
        model = open_model(file, ReferenceKernels())
    spec = model.spec
    assert spec.recurrent_layers == (0, 2)
    assert spec.keyless_layers == (0, 1, 2, 4)
    assert spec.dense_layers == {0, 2, 3}
    assert [layer is None for layer in model.expert_layers] == [True, False, True, True, False]
    assert spec.rotary_dims == 0


def test_a_block_that_guesses_may_have_all_parts(tmp_path):
    """Nemotron's block behind the last has attention and experts; it is left out, and so is its place in the lists."""
    toy = TOYS["nemotron_h_moe"]
    weights = toy_arch_weights(toy)
    for name, values in list(weights.items()):
        if name.startswith(("blk.3.", "blk.4.")):
            weights[f"blk.5.{name[6:]}"] = values
    weights["blk.5.nextn.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    found = toy_arch_metadata(toy)
    keys = {"nemotron_h_moe.block_count": 6, "nemotron_h_moe.nextn_predict_layers": 1}
    for key in ("attention.head_count_kv", "feed_forward_length"):
        values = found[f"nemotron_h_moe.{key}"]
        keys[f"nemotron_h_moe.{key}"] = [*values, max(values)]
    path = write_toy_arch(tmp_path / "m.gguf", toy, weights=weights, metadata=keys)
    model = opened(path)
    plain = spec_of(write_toy_arch(tmp_path / "plain.gguf", toy))
    assert model.spec == replace(plain, num_predict_layers=1)


def test_a_hybrid_may_name_its_layers(tmp_path):
    """A list of recurrent layers counts instead of the interval."""
    pattern = {"qwen35moe.attention.recurrent_layers": [True, False, True, False]}
    path = write_toy_arch(tmp_path / "m.gguf", TOYS["qwen35moe"], metadata=pattern)
    assert spec_of(path).recurrent_layers == (0, 2)
    short = {"qwen35moe.attention.recurrent_layers": [True]}
    path = write_toy_arch(tmp_path / "n.gguf", TOYS["qwen35moe"], metadata=short)
    with pytest.raises(ModelFileError, match="recurrent_layers has 1 entries for 4 layers"):
        spec_of(path)


def test_blocks_that_guess_are_left_out(tmp_path):
    """A file with an extra block opens as the layers alone, whatever the extra block consists of."""
    toy = TOYS["qwen35moe"]
    weights = toy_arch_weights(toy)
    extra = {name: values for name, values in weights.items() if name.startswith("blk.3.")}
    weights |= {name.replace("blk.3.", "blk.4."): values for name, values in extra.items()}
    weights["blk.4.nextn.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    metadata = {"qwen35moe.block_count": 5, "qwen35moe.nextn_predict_layers": 1}
    path = write_toy_arch(tmp_path / "m.gguf", toy, weights=weights, metadata=metadata)
    model = opened(path)
    assert (model.spec.num_layers, model.spec.num_predict_layers) == (4, 1)
    assert len(model.expert_layers) == 4
    plain = write_toy_arch(tmp_path / "plain.gguf", toy)
    with open_model_file(path) as file, open_model_file(plain) as other:
        ours, theirs = inspect(file).footprint, inspect(other).footprint
    assert ours.token_bytes == theirs.token_bytes
    assert ours.shared_bytes == theirs.shared_bytes == 4 * 4 * (3 * 48 + 1) * 64


def test_a_fused_expert_is_two_views_of_the_file(tmp_path):
    """Gate and up are the halves of one tensor, and an expert is two ranges of the file."""
    toy = ToyArch("qwen35moe", layers=1, fused=True)
    with open_model_file(write_toy_arch(tmp_path / "m.gguf", toy)) as file:
        (experts,) = open_model(file, ReferenceKernels()).expert_layers
        assert experts is not None
        both = file.view("blk.0.ffn_gate_up_exps.weight")
        assert np.shares_memory(experts.stack.gate.raw, both)
        assert np.array_equal(experts.stack[3].gate.raw, both[3, :32])
        assert np.array_equal(experts.stack[3].up.raw, both[3, 32:])
        assert len(experts.tensors) == 2


def test_laguna_reads_what_differs_by_layer(tmp_path):
    """Heads, windows, dense layers, the router's rule, and two ways to turn."""
    spec = spec_of(write_toy_arch(tmp_path / "m.gguf", TOYS["laguna"]))
    assert spec.layer_heads == (4, 6, 6, 6, 4)
    assert spec.num_heads == 6
    assert [kind is LayerKind.WINDOW for kind in spec.layer_kinds] == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert (spec.num_dense_layers, spec.dense_intermediate_size) == (1, 96)
    assert (spec.router.gating, spec.router.scale) == (Gating.SIGMOID, 1.5)
    assert spec.window is not None
    assert (spec.window.num_tokens, spec.window.rope) == (16, RopeRule(16, 500.0))
    assert spec.rope_scaling == Yarn(8.0, 64, 8.0, 1.0, pytest.approx(0.1 * np.log(8) + 1))
    pattern = {"laguna.attention.sliding_window_pattern": [True, False, False, True, True]}
    path = write_toy_arch(tmp_path / "n.gguf", TOYS["laguna"], metadata=pattern)
    kinds = spec_of(path).layer_kinds
    assert [kind is LayerKind.WINDOW for kind in kinds] == [True, False, False, True, True]


def test_one_expert_may_mean_the_feed_forward(tmp_path):
    """As in llama.cpp, a file of hunyuan-dense that names one expert is one without experts."""
    keys = {"hunyuan-dense.expert_count": 1}
    path = write_toy_arch(tmp_path / "m.gguf", TOYS["hunyuan-dense"], metadata=keys)
    assert not opened(path).spec.has_experts


def test_a_tensor_per_expert_is_told_apart(tmp_path):
    """Mixtral files of old converters: what helps is a newer file, and what does not."""
    toy = replace(TOYS["llama"], experts=4, used=2)
    weights = toy_arch_weights(toy)
    for name in [name for name in weights if "_exps" in name]:
        for expert, values in enumerate(weights.pop(name)):
            weights[name.replace("_exps", f".{expert}")] = values
    path = write_toy_arch(tmp_path / "m.gguf", toy, weights=weights)
    with pytest.raises(UnsupportedModelError, match="a tensor per expert") as told:
        opened(path)
    assert "convert its checkpoint again" in str(told.value)


def test_a_reranker_is_called_one(tmp_path):
    """A head of scores is refused where nothing says what they mean; a text model may name that pooling."""
    keys = {"qwen2.pooling_type": 4}
    weights = toy_arch_weights(TOYS["qwen2"])
    plain = write_toy_arch(tmp_path / "plain.gguf", TOYS["qwen2"], metadata=keys)
    assert spec_of(plain).pooling is Pooling.RANK
    head = {"cls.output.weight": weights.pop("output.weight")[:2]}
    path = write_toy_arch(tmp_path / "m.gguf", TOYS["qwen2"], weights=weights | head, metadata=keys)
    with pytest.raises(UnsupportedModelError, match="a reranker, which scores pairs of texts"):
        spec_of(path)


def test_biases_of_a_dense_layer_may_be_some(tmp_path):
    """What the file has is added, and zeros stand for the others."""
    toy = replace(TOYS["llama"], all_biased=True, biased=True)
    weights = toy_arch_weights(toy)
    del weights["blk.0.ffn_gate.bias"]
    layer = opened(write_toy_arch(tmp_path / "m.gguf", toy, weights=weights)).non_expert.layers[0]
    gate, up, down = (part.raw[0, 0].view(np.float32) for part in layer.shared.stack.bias_parts)
    assert not gate.any()
    assert np.array_equal(up, weights["blk.0.ffn_up.bias"])
    assert np.array_equal(down, weights["blk.0.ffn_down.bias"])
    assert np.array_equal(layer.mixer.output_bias, weights["blk.0.attn_output.bias"])


def test_yarn_leaves_fast_dimensions_and_slows_slow_ones():
    """The fastest pair turns as before, the slowest by the factor less, and none faster than before."""
    plain = RopeRule(64, 10000.0).frequencies()
    slowed = RopeRule(64, 10000.0, Yarn(8.0, 4096, 32.0, 1.0, 1.2)).frequencies()
    assert slowed[0] == plain[0]
    assert slowed[-1] == pytest.approx(plain[-1] / 8)
    assert (np.diff(plain / slowed) >= -1e-12).all()


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.factor": 0.0}, None),
        ({"rope.scaling.factor": 4.0}, LinearScaling(4.0)),
        ({"rope.scale_linear": 2.0}, LinearScaling(2.0)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.5}, LinearScaling(2.5)),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            Yarn(4.0, 128, 32.0, 1.0, pytest.approx(0.1 * np.log(4) + 1)),
        ),
    ],
)
@pytest.mark.parametrize("arch", ["qwen2moe", "qwen35moe", "qwen3next", "olmoe"])
def test_rope_scaling_is_read_as_llama_cpp_reads_it(tmp_path, arch, keys, wanted):
    """A factor without a type is linear; the original context is the model's where none is named."""
    given = {f"{arch}.{key}": value for key, value in keys.items()}
    path = write_toy_arch(
        tmp_path / "m.gguf", TOYS[arch], metadata=given | {f"{arch}.context_length": 128}
    )
    assert spec_of(path).rope_scaling == wanted


def test_linear_scaling_slows_every_dimension():
    """The angles of position 8 are those of position 2."""
    slowed = RopeRule(64, 10000.0, LinearScaling(4.0))
    assert slowed.frequencies() == pytest.approx(RopeRule(64, 10000.0).frequencies() / 4)
    assert slowed.magnitude == 1.0


@pytest.mark.parametrize("toy", TOYS.values(), ids=TOYS)
def test_info_says_that_it_runs(tmp_path, toy):
    """Nothing is in the way, and every token reads the shared experts."""
    with open_model_file(write_toy_arch(tmp_path / "m.gguf", toy)) as file:
        facts = inspect(file)
    assert facts.unsupported == ()
    assert (facts.footprint.shared_bytes > 0) == (toy.arch not in WITHOUT_SHARED)
    assert facts.footprint.token_bytes is not None
    assert facts.footprint.token_bytes > facts.footprint.shared_bytes


def test_a_model_may_have_no_experts(tmp_path):
    """Every layer is dense, no byte is an expert's, and a token uses every weight but the rest of the embedding."""
    path = write_toy_arch(tmp_path / "m.gguf", TOYS["llama"])
    with open_model_file(path) as file:
        model, facts = open_model(file, ReferenceKernels()), inspect(file)
    spec = model.spec
    assert (spec.has_experts, spec.num_dense_layers, spec.dense_intermediate_size) == (False, 3, 48)
    assert model.expert_layers == (None,) * 3
    footprint = facts.footprint
    assert (footprint.experts_bytes, footprint.expert_bytes) == (0, (0,) * 3)
    table_rows = spec.vocab_size - 1
    assert footprint.num_active_parameters == footprint.num_parameters - table_rows * 64
    assert facts.unsupported == ()


def test_llama_turns_neighbours_by_the_factors_of_the_file(tmp_path):
    """Its rule names pairs and factors; factors that are not positive are refused by the tensor's name."""
    toy = ToyArch("llama", biased=False, experts=0, used=0, slowed=True)
    weights = toy_arch_weights(toy)
    model = opened(write_toy_arch(tmp_path / "m.gguf", toy, weights=weights))
    factors = tuple(weights["rope_freqs.weight"].tolist())
    assert model.non_expert.ropes == (RopeRule(16, 10000.0, pairs=True, factors=factors),) * 3
    weights["rope_freqs.weight"][3] = 0
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight"):
        opened(write_toy_arch(tmp_path / "n.gguf", toy, weights=weights))


def test_every_fourth_layer_of_smollm3_does_not_turn(tmp_path):
    """Its heads attend by what they hold alone, whatever the position."""
    model = opened(write_toy_arch(tmp_path / "m.gguf", TOYS["smollm3"]))
    turn = RopeRule(16, 10000.0, pairs=True)
    assert model.non_expert.ropes == (turn, turn, turn, None, turn)


def test_llama_may_name_its_attention_scale(tmp_path):
    """attention.scale replaces 1 / sqrt(head_dim); 0 means the usual one, as in llama.cpp."""
    for given, wanted in ((0.5, 0.5), (0.0, 0.25)):
        path = write_toy_arch(
            tmp_path / "m.gguf", TOYS["llama"], metadata={"llama.attention.scale": given}
        )
        assert spec_of(path).attention_scale == wanted
