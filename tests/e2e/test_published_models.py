"""Published models by their whole headers: read, planned and opened, on some megabytes of disk and of memory."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from benchmarks.published_models.sparse_gguf import write_sparse
from benchmarks.published_models.table import MODELS
from thermocline import Engine, EngineConfig
from thermocline.cli.device_plan import plan_device
from thermocline.config import HeatConfig, MemoryConfig
from thermocline.experts.placement.planner import DeviceMemory
from thermocline.experts.placement.wish import device_needs
from thermocline.modelfile.reader import open_model_file
from thermocline.models.cache_size import cache_spec
from thermocline.models.prompt_limits import prompt_limits
from thermocline.models.registry import read_spec
from thermocline.units import parse_bytes

CONTEXT = 4096
CONFIG = EngineConfig(
    memory=MemoryConfig(max_context_tokens=CONTEXT), heat=HeatConfig(enabled=False)
)
VRAM = ("8GiB", "12GiB", "16GiB", "24GiB")
# Layers whose other weights are on a device that has no room for those of all.
SOME_LAYERS = {("DeepSeek-V3", "8GiB"): "37 of 61", ("Llama-4-Scout", "8GiB"): "22 of 48"}
MAX_DISK_BYTES = 100 << 20
# The first of each architecture, or all.
IS_ALL = os.environ.get("THERMOCLINE_ALLOCATIONS") == "all"
FIRST = {model.family.architecture: name for name, model in reversed(MODELS.items())}
OPENED = [name for name in MODELS if IS_ALL or name in FIRST.values()]
MAX_S = 120
"""Far above the seconds that it takes: the limit is for a machine with other work, the benchmark has the real one."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Every published model's file, by name."""
    folder = tmp_path_factory.mktemp("published")
    return {name: write_sparse(folder / f"{name}.gguf", model) for name, model in MODELS.items()}


def own_memory_bytes() -> int:
    """Anonymous memory of this process, which is none of a mapped file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


@pytest.mark.slow
def test_files_of_full_length_take_little_disk(files):
    """All of them together take less than 100 MiB, and each has the length of the real one."""
    status = {name: path.stat() for name, path in files.items()}
    assert sum(each.st_blocks * 512 for each in status.values()) < MAX_DISK_BYTES
    # What llama.cpp's quantiser made of the published checkpoint, as hosts list it: 18.6 GB.
    assert round(status["Qwen3-30B-A3B"].st_size / 1e9, 1) == 18.6
    assert min(each.st_size for each in status.values()) > 4e9


@pytest.mark.parametrize("name", MODELS)
def test_the_number_of_parameters_is_the_published_one(name):
    """The tensors have as many numbers as the model's card says, in its digits."""
    model = MODELS[name]
    extra = sum(
        length_product(shape)
        for tensor, shape in model.tensors()
        if tensor.startswith("blk.") and int(tensor.split(".")[1]) >= model.shape.layers
    )
    digits = len(model.billions.removesuffix("B").partition(".")[2])
    billions = (model.num_parameters - extra) / 1e9
    assert f"{billions:.{digits}f}B" == model.billions


def length_product(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_is_read_as_what_it_is(files, name):
    """Layers, experts, heads and recurrent layers of the specification are those of the table."""
    model = MODELS[name]
    shape = model.shape
    with open_model_file(files[name]) as file:
        spec = read_spec(file)
        assert file.total_tensor_bytes < files[name].stat().st_size
    assert spec.architecture == model.family.architecture
    assert spec.num_layers == shape.layers
    assert (spec.router.num_experts, spec.router.num_experts_used) == (shape.experts, shape.used)
    assert spec.context_length == shape.context
    assert spec.recurrent_layers == tuple(filter(shape.is_recurrent, range(shape.layers)))
    assert spec.window_layers == tuple(filter(shape.is_window, range(shape.layers)))


def spec_and_needs(path):
    """Return a file's specification, and what its parts take on a device."""
    with open_model_file(path) as file:
        spec = read_spec(file)
        limits = prompt_limits(CONFIG, spec, 1, 2, on_device=True)
        cache = cache_spec(CONFIG, spec, limits)
        return spec, device_needs(file.tensors.values(), spec, cache, limits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("repo", "name"),
    [
        ("allenai/OLMoE-1B-7B-0924-Instruct-GGUF", "OLMoE-1B-7B"),
        ("ggml-org/gpt-oss-20b-GGUF", "gpt-oss-20b"),
        ("Qwen/Qwen3-30B-A3B-GGUF", "Qwen3-30B-A3B"),
    ],
)
def test_the_readme_s_table_of_models_is_the_plan(files, repo, name):
    """Size, and the share of the experts on a GPU of 8, 16 and 24 GiB, with all else but the embedding table there."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (row,) = re.findall(rf"^\| `{re.escape(repo)}` \| (.*) \|$", readme, re.MULTILINE)
    spec, needs = spec_and_needs(files[name])
    said = [f"{files[name].stat().st_size / 2**30:.1f} GiB"]
    for text in ("8GiB", "16GiB", "24GiB"):
        vram = parse_bytes(text)
        plan = plan_device(CONFIG.placement, needs, DeviceMemory(vram, vram), None)
        assert plan.reasons[0].startswith("the whole trunk on the device")
        share = plan.placement.num_hot / (spec.num_layers * spec.router.num_experts)
        said.append("all" if share == 1 else f"{share:.0%}".replace("%", " %"))
    assert row.split(" | ") == said


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_has_a_plan_for_every_device(files, name):
    """From 8 to 24 GiB all that is placed fits, the trunk is on the device, and more memory holds more experts."""
    spec, needs = spec_and_needs(files[name])
    plans = []
    for text in VRAM:
        vram = parse_bytes(text)
        plan = plan_device(CONFIG.placement, needs, DeviceMemory(vram, vram), None)
        assert plan.device_bytes + plan.workspace_bytes <= vram
        where = "the whole trunk on the device"
        if (name, text) in SOME_LAYERS:
            where = (
                f"non-expert weights of {SOME_LAYERS[name, text]} layers and the head on the device"
            )
        assert plan.reasons[0].startswith(where)
        plans.append(plan.placement.num_hot)
    assert plans == sorted(plans)
    assert plans[0] > 0
    num_experts = len(list(filter(None, needs.on_device.experts))) * spec.router.num_experts
    # Of a file of 24.5 GB with large recurrent states (Nemotron-3-Nano), 24 GiB holds all but 25 of 2,944 experts.
    assert (plans[-1] == num_experts) == (files[name].stat().st_size < 24e9)


@pytest.mark.slow
async def test_published_models_open_in_little_memory(files):
    """An engine with a context of 4096 opens on one of each architecture, with all tokens and within 300 MiB; all within some time."""
    start = time.monotonic()
    for name in OPENED:
        path, before = files[name], own_memory_bytes()
        async with Engine.open(path, CONFIG) as engine:
            assert own_memory_bytes() - before < 300 << 20, name
            text = "niuq thsr \u4e00, and <|im_end|>"
            ids = await engine.encode(text)
            if MODELS[name].vocabulary.add_bos:
                assert ids.pop(0) == MODELS[name].vocabulary.bos_id
            assert engine.tokenizer.decode(ids, skip_special=False) == text
            assert len(ids) < len(text), "no merge was used"
            assert engine.tokenizer.vocab_size == MODELS[name].vocabulary.size
            assert MODELS[name].vocabulary.eos_id in engine.tokenizer.end_ids
            assert await engine.encode_chat([{"role": "user", "content": text}])
    assert time.monotonic() - start < MAX_S
