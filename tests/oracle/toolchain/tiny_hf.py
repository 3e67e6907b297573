"""Tiny random models of transformers' own classes, saved as a model from the hub is: config, safetensors, tokenizer.

Knows the configurations of the first six architectures, not GGUF. Needs `torch`, `transformers` and `tokenizers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.oracle.toolchain import (
    tiny_deepseek4,
    tiny_dots3,
    tiny_formulas,
    tiny_glm5,
    tiny_hy_v4,
    tiny_jamba,
    tiny_latent,
    tiny_minimax_m3,
    tiny_norms,
    tiny_recurrent,
    tiny_routers,
    tiny_streams,
)
from tests.oracle.toolchain.tiny_gemma import gemma4_config, gemma4_tokenizer
from thermocline.demo import DEMO_HELD_TEXT_PATH

if TYPE_CHECKING:
    from pathlib import Path

NUM_TOKENS = 320
# What routers are called; the names end so.
_ROUTERS = (
    "mlp.gate.weight",
    "mlp.gate.wg.weight",
    "block_sparse_moe.router.weight",
    "mlp.router.weight",
    "mlp.router.gate.weight",
    "feed_forward.router.weight",
    "ffn.router.layer.weight",
)
_AROUND = (
    "norm.weight",
    "norm_f.weight",
    "_1.weight",
    "_2.weight",
    "router.scale",
    "expert_scale",
    "hc.scale",
    "hc_scale",
)
"""What is drawn around its first value."""
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyModel:
    """A random model. options: of the configuration, over the defaults of `_CONFIGS`.

    extra_block: with a block after the trunk that guesses a further token, as the hybrids, GLM and Nemotron have.
    """

    arch: str
    hidden: int = 64
    layers: int = 2
    seed: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    extra_block: bool = False
    packed: bool = False
    """With experts in the hub's MXFP4, as gpt-oss has them."""


def save_tiny_model(folder: Path, tiny: TinyModel) -> torch.nn.Module:
    """Save the model and its tokenizer in `folder`, and return it in float32, ready to be asked."""
    torch.manual_seed(tiny.seed)
    torch.set_num_threads(1)  # products this small only lose by sharing
    config = _CONFIGS[tiny.arch](common_settings(tiny), tiny)
    make = _CLASSES[tiny.arch]
    model = getattr(transformers, make)(config) if isinstance(make, str) else make(config)
    draw_weights(model)
    tiny_deepseek4.draw_tables(model)
    if tiny.arch in tiny_routers.UNGATED:
        tiny_routers.half_gates(model)
    limited = (*tiny_formulas.LIMITED, *tiny_minimax_m3.CLASSES)
    if tiny.arch in limited or tiny_latent.LIMITS[0] in tiny.options:
        tiny_formulas.speak_up(model)
    model.save_pretrained(folder)
    if tiny.extra_block and tiny.arch not in tiny_deepseek4.CLASSES:
        _BLOCKS.get(tiny.arch, _add_block)(folder, config)
    if tiny.arch in tiny_deepseek4.CLASSES:
        tiny_deepseek4.save_as_published(folder, model, tiny)
    elif tiny.packed:
        tiny_formulas.pack_experts(folder, model)
    published = tiny_routers.PUBLISHED | tiny_formulas.PUBLISHED
    published |= tiny_recurrent.PUBLISHED | tiny_latent.PUBLISHED | tiny_streams.PUBLISHED
    published |= (
        tiny_glm5.PUBLISHED
        | tiny_hy_v4.PUBLISHED
        | tiny_minimax_m3.PUBLISHED
        | tiny_norms.PUBLISHED
    )
    published |= tiny_dots3.PUBLISHED
    if tiny.arch in published:
        published[tiny.arch](folder, config)
    save_tokenizer(folder, tiny.arch)
    return model.eval().requires_grad_(False)


def draw_weights(model: torch.nn.Module) -> None:
    """Fill a model with numbers of a trained one's spread, from torch's generator."""
    with torch.no_grad():
        for name, values in model.named_parameters():
            _draw(name, values)
        for name, values in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                values.normal_(0, 0.2)
            elif name.endswith("layer_scalar"):
                values.normal_(0.8, 0.1)


def save_tokenizer(folder: Path, arch: str) -> None:
    """Save the vocabulary that models of an architecture have, beside one."""
    _tokenizer(arch).save_pretrained(folder)


def _draw(name: str, values: torch.Tensor) -> None:
    """Fill a parameter with numbers of a trained model's spread: each product keeps its input's power."""
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        values.normal_(0, 0.5)
    elif name.endswith(("embed_tokens.weight", "embeddings.weight", "ngram_embedding.weight")):
        values.normal_(0, 1)
    elif values.ndim >= 2:
        gain = 3.0 if name == "lm_head.weight" else 2.0 if name.endswith(_ROUTERS) else 1.0
        gain = (
            6.0
            if name.endswith((*tiny_streams.DIVIDED, *tiny_glm5.FAINT, *tiny_deepseek4.FAINT))
            else gain
        )
        values.normal_(0, gain * values.shape[-1] ** -0.5)
    elif name.endswith(_AROUND):
        values.normal_(float(values.mean()), 0.1)  # around one, or around zero where one is added
    elif name.endswith("dt_bias"):
        values.normal_(-1, 0.5)
    elif name.endswith("A_log"):
        values.normal_(-1, 1)
    else:
        values.normal_(0, 0.2)


def _tokenizer(arch: str) -> transformers.PreTrainedTokenizerFast:
    """A byte-level vocabulary with merges of English prose, and three control tokens at its end."""
    if arch == "gemma4":
        return gemma4_tokenizer(DEMO_HELD_TEXT_PATH.read_text(encoding="utf-8"), NUM_TOKENS)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS - len(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([DEMO_HELD_TEXT_PATH.read_text(encoding="utf-8")], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_SPECIAL[2], pad_token=_SPECIAL[0]
    )
    fast.add_special_tokens({"additional_special_tokens": _SPECIAL})
    fast.chat_template = _CHAT_TEMPLATE
    assert len(fast) == NUM_TOKENS, len(fast)
    return fast


def _add_block(folder: Path, config: Any) -> None:
    """Add the tensors of a block that guesses a further token, under the names that published files have."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    last = f"model.layers.{config.num_hidden_layers - 1}."  # of attention
    block = {
        "mtp.layers.0." + name.removeprefix(last): values.flip(0).contiguous()
        for name, values in tensors.items()
        if name.startswith(last)
    }
    hidden = config.hidden_size
    block["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden) * hidden**-0.5
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        block[f"mtp.{name}.weight"] = torch.randn(hidden) * 0.1
    save_file(tensors | block, path, {"format": "pt"})


def common_settings(tiny: TinyModel) -> dict[str, Any]:
    """Return the settings that all configurations have."""
    return {
        "vocab_size": NUM_TOKENS,
        "hidden_size": tiny.hidden,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": tiny.hidden // 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        "dtype": "float32",
        "eos_token_id": NUM_TOKENS - 1,
        "pad_token_id": NUM_TOKENS - 3,
    }


def _olmoe(common: dict[str, Any], tiny: TinyModel) -> Any:
    del common["moe_intermediate_size"], common["head_dim"]
    # The converter writes this epsilon whatever the configuration says: published models have it.
    own = {"intermediate_size": 32, "norm_topk_prob": False, "rms_norm_eps": 1e-5}
    own["num_key_value_heads"] = 4  # llama.cpp opens no other
    return transformers.OlmoeConfig(**(common | own | tiny.options))


def _qwen2moe(common: dict[str, Any], tiny: TinyModel) -> Any:
    del common["head_dim"]
    own = {"intermediate_size": 64, "shared_expert_intermediate_size": 32, "norm_topk_prob": False}
    return transformers.Qwen2MoeConfig(**(common | own | tiny.options))


def _qwen3moe(common: dict[str, Any], tiny: TinyModel) -> Any:
    own = {"intermediate_size": 64, "norm_topk_prob": True, "head_dim": 32}
    return transformers.Qwen3MoeConfig(**(common | own | tiny.options))


def _hybrid(tiny: TinyModel) -> dict[str, Any]:
    own: dict[str, Any] = {
        "shared_expert_intermediate_size": 32,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"] * (tiny.layers // 2),
        "full_attention_interval": 2,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    }
    return own


def _qwen35moe(common: dict[str, Any], tiny: TinyModel) -> Any:
    settings = common | _hybrid(tiny) | tiny.options
    settings["rope_parameters"]["mrope_section"] = [3, 3, 2]
    if tiny.extra_block:
        settings["mtp_num_hidden_layers"] = 1
    return transformers.Qwen3_5MoeTextConfig(**settings)


def _qwen35(common: dict[str, Any], tiny: TinyModel) -> Any:
    settings = _dense(common | _hybrid(tiny), tiny)
    settings["rope_parameters"]["mrope_section"] = [3, 3, 2]
    if tiny.extra_block:
        settings["mtp_num_hidden_layers"] = 1
    return transformers.Qwen3_5TextConfig(**settings)


def _qwen3next(common: dict[str, Any], tiny: TinyModel) -> Any:
    own = {"intermediate_size": 64, "norm_topk_prob": True, "decoder_sparse_step": 1}
    return transformers.Qwen3NextConfig(**(common | _hybrid(tiny) | own | tiny.options))


def _laguna(common: dict[str, Any], tiny: TinyModel) -> Any:
    heads = [4 if layer % 4 == 0 else 6 for layer in range(tiny.layers)]
    own = {
        "num_attention_heads": max(heads),
        "num_attention_heads_per_layer": heads,
        "head_dim": 16,
        "layer_types": [
            "sliding_attention" if layer % 4 else "full_attention" for layer in range(tiny.layers)
        ],
        "mlp_layer_types": ["dense"] + ["sparse"] * (tiny.layers - 1),
        "intermediate_size": 64,
        "shared_expert_intermediate_size": 32,
        "moe_routed_scaling_factor": 1.5,
        "gating": "per-head",
        "sliding_window": 16,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 8.0,
                "beta_slow": 1.0,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 1.0,
            },
        },
    }
    return transformers.LagunaConfig(**(common | own | tiny.options))


def _dense(common: dict[str, Any], tiny: TinyModel) -> dict[str, Any]:
    for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        del common[name]
    return common | {"intermediate_size": 64} | tiny.options


def _llama(common: dict[str, Any], tiny: TinyModel) -> Any:
    if tiny.arch == "mixtral":
        common |= {"num_local_experts": 4, "intermediate_size": 32, "sliding_window": None}
        del common["num_experts"], common["moe_intermediate_size"]
        return transformers.MixtralConfig(**(common | tiny.options))
    return transformers.LlamaConfig(**_dense(common, tiny))


def _granite(common: dict[str, Any], tiny: TinyModel) -> Any:
    del common["head_dim"]
    return transformers.GraniteConfig(**_dense(common | tiny_routers.GRANITE_FACTORS, tiny))


def _granite_swa(common: dict[str, Any], tiny: TinyModel) -> Any:
    del common["head_dim"]
    own = tiny_routers.GRANITE_FACTORS | tiny_routers.GRANITE_LISTS | {"bos_token_id": None}
    return transformers.GraniteSWAConfig(**_dense(common | own, tiny))


def _ernie(common: dict[str, Any], tiny: TinyModel) -> Any:
    return transformers.Ernie4_5Config(**_dense(common | {"head_dim": 32}, tiny))


def _hunyuan(common: dict[str, Any], tiny: TinyModel) -> Any:
    return transformers.HunYuanDenseV1Config(**_dense(common | {"head_dim": 32}, tiny))


def _smollm3(common: dict[str, Any], tiny: TinyModel) -> Any:
    del common["head_dim"]
    return transformers.SmolLM3Config(**_dense(common | {"bos_token_id": None}, tiny))


def _mistral3(common: dict[str, Any], tiny: TinyModel) -> Any:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.5,
    }
    own = {"rope_parameters": rope, "head_dim": 32, "bos_token_id": None}
    return transformers.Ministral3Config(**_dense(common | own, tiny))


def _qwen2(common: dict[str, Any], tiny: TinyModel) -> Any:
    del common["head_dim"]
    return transformers.Qwen2Config(**_dense(common, tiny))


def _qwen3(common: dict[str, Any], tiny: TinyModel) -> Any:
    return transformers.Qwen3Config(**_dense(common | {"head_dim": 32}, tiny))


_BLOCKS = {
    "bailingmoe3": tiny_routers.add_glm_block,
    "glm5_next": tiny_glm5.add_glm5_block,
    "glm4moe": tiny_routers.add_glm_block,
    "glm4_moe_lite": tiny_routers.add_glm_block,
    "deepseek_v32": tiny_routers.add_glm_block,
    "glm_moe_dsa": tiny_routers.add_glm_block,
    "hy_v3": tiny_routers.add_hy_block,
    "mimo2": tiny_formulas.add_mimo_blocks,
    "nemotron_h_moe": tiny_recurrent.add_nemotron_block,
    "step35": tiny_formulas.ask_for_blocks,
}
"""What adds a block that guesses a further token, where it is not as Qwen's."""
_CLASSES = {
    "gemma4": "Gemma4ForCausalLM",
    "laguna": "LagunaForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
    "granite": "GraniteForCausalLM",
    "granite_swa": "GraniteSWAForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "hunyuan-dense": "HunYuanDenseV1ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral3": "Ministral3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "qwen3vl": "Qwen3VLForConditionalGeneration",
    "solar_open": "SolarOpenForCausalLM",
    **tiny_routers.CLASSES,
    **tiny_formulas.CLASSES,
    **tiny_deepseek4.CLASSES,
    **tiny_dots3.CLASSES,
    **tiny_glm5.CLASSES,
    **tiny_hy_v4.CLASSES,
    **tiny_jamba.CLASSES,
    **tiny_latent.CLASSES,
    **tiny_minimax_m3.CLASSES,
    **tiny_norms.CLASSES,
    **tiny_recurrent.CLASSES,
    **tiny_streams.CLASSES,
}
_CONFIGS = {
    "gemma4": gemma4_config,
    "laguna": _laguna,
    "olmoe": _olmoe,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35moe,
    "qwen3next": _qwen3next,
    "granite": _granite,
    "granite_swa": _granite_swa,
    "ernie4_5": _ernie,
    "hunyuan-dense": _hunyuan,
    "llama": _llama,
    "mixtral": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral3": _mistral3,
    "smollm3": _smollm3,
    "qwen3vl": tiny_routers.qwen3vl,
    "solar_open": tiny_routers.solar_open,
    **tiny_routers.CONFIGS,
    **tiny_formulas.CONFIGS,
    **tiny_deepseek4.CONFIGS,
    **tiny_dots3.CONFIGS,
    **tiny_glm5.CONFIGS,
    **tiny_hy_v4.CONFIGS,
    **tiny_jamba.CONFIGS,
    **tiny_latent.CONFIGS,
    **tiny_minimax_m3.CONFIGS,
    **tiny_norms.CONFIGS,
    **tiny_recurrent.CONFIGS,
    **tiny_streams.CONFIGS,
}
