"""The table of published models against llama.cpp, which loads and quantises them, and transformers' defaults."""

from __future__ import annotations

import ctypes
import re

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("transformers")

import llama_cpp
import transformers

from benchmarks.published_models.sparse_gguf import write_sparse
from benchmarks.published_models.table import MODELS
from benchmarks.published_models.tensor_types import q4_k_m_types

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

Q4_K_M = 15
NO_MAP = 0
CONFIG_NAMES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "feed_forward": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "context": "max_position_embeddings",
    "rms_epsilon": "rms_norm_eps",
    "experts": "num_experts",
    "used": "num_experts_per_tok",
    "expert_width": "moe_intermediate_size",
    "shared_width": "shared_expert_intermediate_size",
}
_said: list[str] = []


@llama_cpp.llama_log_callback
def _listen(_level, text, _data):
    """Keep what llama.cpp says."""
    _said.append(text.decode("utf-8", "replace"))


@pytest.fixture(autouse=True)
def _log():
    _said.clear()
    llama_cpp.llama_log_set(_listen, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()


@pytest.mark.parametrize("name", MODELS)
def test_llama_takes_names_shapes_and_keys(tmp_path, name):
    """It loads the whole file without reading weights, and counts the same parameters, layers and tokens."""
    model = MODELS[name]
    path = write_sparse(tmp_path / "model.gguf", model)
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    # A map would be read ahead as a whole; without one, and without memory, only the header is read.
    params.load_mode = NO_MAP
    params.no_alloc = True
    params.load_mtp = True
    loaded = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert loaded, "".join(_said)[-3000:]
    try:
        vocabulary = llama_cpp.llama_model_get_vocab(loaded)
        assert llama_cpp.llama_vocab_n_tokens(vocabulary) == model.vocabulary.size
        assert llama_cpp.llama_vocab_eos(vocabulary) == model.vocabulary.eos_id
        assert llama_cpp.llama_vocab_is_eog(vocabulary, model.vocabulary.eos_id)
        assert llama_cpp.llama_model_n_params(loaded) == model.num_parameters
        assert llama_cpp.llama_model_n_embd(loaded) == model.shape.hidden
        assert llama_cpp.llama_model_n_layer(loaded) in (model.shape.layers, model.shape.blocks)
    finally:
        llama_cpp.llama_model_free(loaded)
    assert "unused tensor" not in "".join(_said)


@pytest.mark.parametrize("name", MODELS)
def test_types_are_those_of_the_quantiser(tmp_path, name):
    """A dry run of llama.cpp's quantiser over the converter's file chooses our type for every tensor."""
    model = MODELS[name]
    path = write_sparse(tmp_path / "model.gguf", model, "BF16")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = Q4_K_M
    params.dry_run = True
    target = str(tmp_path / "none.gguf").encode()
    code = llama_cpp.llama_model_quantize(str(path).encode(), target, ctypes.byref(params))
    said = "".join(_said)
    assert code == 0, said[-3000:]
    chosen = {
        match["name"]: (match["to"] or match["kept"]).upper()
        for match in re.finditer(
            r"\]\s+(?P<name>\S+)\s+- \[[^]]*\], type =\s*(?P<kept>\w+), "
            r"size =[^\n(]*(?:\((?P<to>\w+)\))?\n",
            said,
        )
    }
    assert chosen == q4_k_m_types(model.tensors(), model.shape.blocks)


@pytest.mark.parametrize("name", MODELS)
def test_numbers_without_another_source_are_transformers_defaults(name):
    """Each number of the table is the configuration class's default, except those that the table calls its own."""
    model = MODELS[name]
    config = getattr(transformers, model.config_class)()
    defaults = config.to_dict()
    for field, attribute in CONFIG_NAMES.items():
        default = defaults.get(attribute)
        if default is None:
            continue
        ours = getattr(model.shape, field)
        assert (ours != default) == (field in model.own), (field, ours, default)
    assert config.vocab_size == model.vocabulary.size
    rope = getattr(config, "rope_parameters", None)
    if rope is None:  # heads that do not turn
        return
    full = rope.get("full_attention", rope)
    assert (model.shape.rope_base != full["rope_theta"]) == ("rope_base" in model.own)
    if model.shape.rotary is not None:
        assert model.shape.rotary == model.shape.head_dim * full["partial_rotary_factor"]
    if model.shape.delta is not None:
        delta = model.shape.delta
        assert delta.conv == config.linear_conv_kernel_dim
        assert (delta.key_heads, delta.value_heads) == (
            config.linear_num_key_heads,
            config.linear_num_value_heads,
        )
        assert delta.state == config.linear_key_head_dim == config.linear_value_head_dim
        kinds = [kind == "linear_attention" for kind in config.layer_types]
        assert kinds == [model.shape.is_recurrent(layer) for layer in range(model.shape.layers)]
