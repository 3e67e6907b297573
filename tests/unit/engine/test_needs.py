"""What a model takes of the memory, against what its engine reserves."""

from __future__ import annotations

import pytest

from tests.support.arch_cases import ARCH_CASES
from tests.support.toy_archs import write_toy_arch
from thermocline import EngineConfig, PlacementConfig
from thermocline.engine import cache_builder
from thermocline.engine.cache_builder import choose_limits, cpu_cache
from thermocline.engine.needs import model_needs
from thermocline.kernels.guarded_model import open_guarded_model
from thermocline.models.cache_size import cache_spec
from thermocline.models.registry import read_spec

CPU = EngineConfig(placement=PlacementConfig(hot_device="none", trunk_device="cpu"))
KINDS = (
    *("qwen2moe", "deepseek2", "gemma4", "gpt-oss", "lfm2moe", "nemotron_h_moe", "qwen3next"),
    *("granitehybrid", "kimi-linear", "bailingmoe3", "cohere2moe", "mimo2", "step35"),
    *("glm-dsa", "glm5-next", "qwen4exp", "deepseek4", "dots3note", "hy_v4", "minimax-m3", "jamba"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_counts_as_it_is_reserved(tmp_path, kind):
    """Keys, values, an indexer's rows and states of every kind of layer, to the byte, and all tensors but n-grams."""
    case = next(case for case in ARCH_CASES if case.toy.arch == kind)
    path = write_toy_arch(tmp_path / "model.gguf", case.toy)
    with open_guarded_model(path) as file:
        spec = read_spec(file)
        reserved = cpu_cache(cache_spec(CPU, spec, choose_limits(CPU, spec, file)), spec, ())
        tensor_bytes = file.total_tensor_bytes
        if kind == "qwen4exp":
            tensor_bytes -= file.tensors["per_layer_token_embd.weight"].nbytes
    states = reserved.states
    state_bytes = 0 if states is None else states.slot_bytes * states.num_slots
    needs = model_needs(path, CPU)
    assert needs.host_bytes == tensor_bytes + reserved.kv.reserved_bytes + state_bytes
    assert not needs.uses_device


def test_a_table_of_ngrams_need_not_fit(tmp_path, monkeypatch):
    """A file fits where memory has room for all else of it, and not where it has less."""
    case = next(case for case in ARCH_CASES if case.toy.arch == "qwen4exp")
    path = write_toy_arch(tmp_path / "model.gguf", case.toy)
    with open_guarded_model(path) as file:
        spec, table = read_spec(file), file.tensors["per_layer_token_embd.weight"]
        needed = file.total_tensor_bytes - table.nbytes
        for room, fits in ((needed, True), (needed - 1, False)):
            monkeypatch.setattr(cache_builder, "page_cache_room_bytes", lambda room=room: room)
            assert ("fits in memory" in choose_limits(CPU, spec, file).why_chunk) == fits


def test_a_limit_of_the_device_is_told(tmp_path):
    """None is all of it."""
    path = write_toy_arch(tmp_path / "model.gguf", ARCH_CASES[0].toy)
    for limit in (None, 1 << 30):
        placement = PlacementConfig(
            hot_device="cuda", trunk_device="cuda", device_memory_bytes=limit
        )
        needs = model_needs(path, EngineConfig(placement=placement))
        assert (needs.uses_device, needs.device_bytes) == (True, limit)
