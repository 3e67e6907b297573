"""What files carry besides a model: blocks that guess tokens, several files, keys of every kind, fused tensors."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest

from tests.support.engine_runs import prompt_logits
from tests.support.gguf_files import GGUFValue
from tests.support.toy_archs import ToyArch, toy_arch_weights, write_toy_arch
from tests.support.toy_model import ToyShape, toy_metadata, toy_weights, write_toy_model
from thermocline.cli.info import inspect
from thermocline.engine.api import Engine
from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.kernels.reference import ReferenceKernels
from thermocline.modelfile.reader import open_model_file
from thermocline.models.footprint import Role
from thermocline.models.registry import open_model, read_spec

PROMPT = [3, 200, 17, 5, 64, 9, 9, 100]
HYBRIDS = {
    "qwen35moe": ToyArch("qwen35moe", layers=4, rotary=8),
    "qwen3next": ToyArch("qwen3next", layers=4, rotary=8),
}
ALL_HYBRIDS = pytest.mark.parametrize("toy", HYBRIDS.values(), ids=HYBRIDS)


async def logits_of(path):
    """The logits after each token of a prompt."""
    async with Engine.open(path) as engine:
        return await prompt_logits(engine, PROMPT)


def with_extra_block(toy):
    """The toy's tensors, and those of a block of attention that guesses a further token."""
    weights = toy_arch_weights(toy)
    last, extra = f"blk.{toy.layers - 1}.", f"blk.{toy.layers}."
    block = {
        extra + name.removeprefix(last): values
        for name, values in weights.items()
        if name.startswith(last)
    }
    block[f"{extra}nextn.eh_proj.weight"] = np.ones((toy.hidden, 2 * toy.hidden), np.float32)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        block[f"{extra}nextn.{name}.weight"] = np.ones(toy.hidden, np.float32)
    return weights, block


def keys_of(toy, blocks, extra=1):
    """Metadata for so many blocks, the last `extra` of which guess."""
    return {f"{toy.arch}.block_count": blocks, f"{toy.arch}.nextn_predict_layers": extra}


@pytest.mark.slow
@ALL_HYBRIDS
async def test_a_block_that_guesses_changes_nothing(tmp_path, invoke, toy):
    """Same logits and same sizes as the trunk alone, and `info` says what the block is for, and its bytes."""
    weights, block = with_extra_block(toy)
    plain = write_toy_arch(tmp_path / "plain.gguf", toy)
    path = write_toy_arch(
        tmp_path / "m.gguf", toy, weights=weights | block, metadata=keys_of(toy, toy.layers + 1)
    )
    assert np.array_equal(await logits_of(path), await logits_of(plain))
    with open_model_file(path) as file, open_model_file(plain) as other:
        ours, theirs = inspect(file), inspect(other)
    assert ours.footprint == theirs.footprint
    assert ours.sizes == theirs.sizes
    block_bytes = sum(values.nbytes for values in block.values())
    facts = json.loads(invoke("info", str(path), "--json").stdout)
    assert facts["next_token_blocks"] == {"count": 1, "bytes": block_bytes, "why_not_used": ""}
    assert facts["spec"]["num_layers"] == toy.layers
    page = invoke("info", str(path)).stdout
    assert "1 block guesses them" in page
    assert "for --speculate mtp" in page
    plain_facts = json.loads(invoke("info", str(plain), "--json").stdout)
    assert plain_facts["next_token_blocks"] == {"count": 0, "bytes": 0, "why_not_used": ""}


@ALL_HYBRIDS
def test_a_block_that_can_not_draft_says_why(tmp_path, invoke, toy):
    """The model runs without it."""
    weights, block = with_extra_block(toy)
    del block[f"blk.{toy.layers}.nextn.enorm.weight"]
    path = write_toy_arch(
        tmp_path / "m.gguf", toy, weights=weights | block, metadata=keys_of(toy, toy.layers + 1)
    )
    facts = json.loads(invoke("info", str(path), "--json").stdout)
    assert facts["supported"]
    why = "tensor 'blk.4.nextn.enorm.weight' is missing"
    assert facts["next_token_blocks"]["why_not_used"] == why
    page = " ".join(invoke("info", str(path)).stdout.split())
    assert f"not used: {why}" in page


@pytest.mark.slow
@ALL_HYBRIDS
@pytest.mark.parametrize("counted", [True, False], ids=["counted", "not counted"])
async def test_a_file_of_the_trunk_alone_may_name_the_block(tmp_path, toy, counted):
    """The key says one block, and none is there: every block of the file is the trunk's, counted or not."""
    plain = write_toy_arch(tmp_path / "plain.gguf", toy)
    keys = keys_of(toy, toy.layers + counted)
    path = write_toy_arch(tmp_path / "m.gguf", toy, metadata=keys)
    assert np.array_equal(await logits_of(path), await logits_of(plain))
    with open_model_file(path) as file:
        assert read_spec(file).num_layers == toy.layers
        assert inspect(file).block_bytes == 0


@ALL_HYBRIDS
def test_a_block_without_a_trunk_is_refused_as_such(tmp_path, toy):
    """A file of the guessing block alone, which converters write too, says that it is no model by itself."""
    weights, block = with_extra_block(toy)
    own = {name: values for name, values in weights.items() if not name.startswith("blk.")} | block
    path = write_toy_arch(
        tmp_path / "m.gguf", toy, weights=own, metadata=keys_of(toy, toy.layers + 1)
    )
    with (
        open_model_file(path) as file,
        pytest.raises(UnsupportedModelError, match="nothing but blocks that guess"),
    ):
        open_model(file, ReferenceKernels())


def test_a_file_without_a_chat_template_still_runs(tmp_path, invoke):
    """A plain prompt is answered; only a chat is refused, with what to do instead."""
    path = write_toy_model(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": ""})
    content = path.read_bytes()
    path.write_bytes(content.replace(b"tokenizer.chat_template", b"tokenizer.chat_templat_"))
    answered = invoke("run", str(path), "-p", "the", "--max-tokens", "3", "--ignore-eos")
    assert answered.exit_code == 0, answered.stderr
    assert answered.stdout
    # A chat says so before the first message.
    for command in (("run", str(path), "--chat", "hello"), ("chat", str(path))):
        refused = invoke(*command, input="")
        assert refused.exit_code != 0
        assert "no chat template: give a plain prompt, or use an instruct model" in refused.stderr


async def test_keys_of_any_kind_do_no_harm(tmp_path):
    """Unknown keys of every type, arrays and arrays of arrays: read as they are, and the model runs."""
    shape = ToyShape()
    plain = write_toy_model(tmp_path / "plain.gguf", shape)
    extra = {
        "general.tags": ["moe", "tést"],
        "general.languages": ["en"],
        "general.base_model.count": 1,
        "general.base_model.0.repo_url": "https://example.org/model",
        "general.sampling.temp": 0.7,
        "general.empty": "",
        "general.unheard_of": GGUFValue(-(2**62), gguf.GGUFValueType.INT64),
        "general.precise": GGUFValue(0.1, gguf.GGUFValueType.FLOAT64),
        "general.flags": [True, False],
        "general.nested": GGUFValue([[1, 2], [3]], gguf.GGUFValueType.ARRAY),
        "qwen3moe.rope.never_heard_of": 3,
        "tokenizer.ggml.never_heard_of": [1.5, 2.5],
        "quantize.imatrix.file": "x.dat",
    }
    path = write_toy_model(tmp_path / "m.gguf", shape, metadata=extra)
    with open_model_file(path) as file:
        assert file.metadata.raw("general.nested") == ((1, 2), (3,))
        assert file.metadata.is_array("general.nested")
        assert file.metadata.raw("general.tags") == ("moe", "tést")
        assert file.metadata.raw("general.unheard_of") == -(2**62)
        with pytest.raises(ModelFileError, match=r"general\.nested.*array of ARRAY"):
            file.metadata.get_ints("general.nested")
    assert np.array_equal(await logits_of(path), await logits_of(plain))


@pytest.mark.slow
@pytest.mark.parametrize("small_first", [False, True])
async def test_files_of_the_packages_splitter_open(tmp_path, small_first):
    """A model in several files, as the gguf package splits it, with metadata alone in the first or not."""
    shape = ToyShape()
    plain = write_toy_model(tmp_path / "plain.gguf", shape)
    writer = gguf.GGUFWriter(
        tmp_path / "m.gguf", "qwen3moe", split_max_tensors=7, small_first_shard=small_first
    )
    for key, value in toy_metadata(shape).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            kind = gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind)
    for name, values in toy_weights(shape).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = sorted(tmp_path.glob("m-*-of-*.gguf"))
    assert len(files) > 2
    expected = await logits_of(plain)
    for path in (files[0], files[-1]):
        assert np.array_equal(await logits_of(path), expected)


@pytest.mark.parametrize(
    "toy",
    [
        ToyArch("qwen2moe", layers=2),
        ToyArch("olmoe", layers=2, kv_heads=4),
        ToyArch("qwen35moe", layers=2, interval=2, rotary=8),
    ],
    ids=lambda toy: toy.arch,
)
def test_queries_keys_and_values_may_be_one_tensor(tmp_path, toy):
    """Fused, with their biases, they are views of the file, equal to what lies apart; and count as attention."""
    weights = toy_arch_weights(toy)
    fused = dict(weights)
    for layer in range(toy.layers):
        for kind in ("weight", "bias"):
            names = [f"blk.{layer}.attn_{part}.{kind}" for part in "qkv"]
            if names[0] in weights:
                parts = [fused.pop(name) for name in names]
                fused[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)
    assert len(fused) < len(weights)
    plain = write_toy_arch(tmp_path / "plain.gguf", toy)
    path = write_toy_arch(tmp_path / "m.gguf", toy, weights=fused)
    with open_model_file(path) as file, open_model_file(plain) as other:
        ours, theirs = (
            open_model(each, ReferenceKernels()).non_expert.layers[-1] for each in (file, other)
        )
        assert np.shares_memory(
            ours.mixer.k.raw, file.view(f"blk.{toy.layers - 1}.attn_qkv.weight")
        )
        for part in ("q", "k", "v"):
            assert np.array_equal(getattr(ours.mixer, part).raw, getattr(theirs.mixer, part).raw)
        if theirs.mixer.biases is not None:
            for mine, expected in zip(ours.mixer.biases, theirs.mixer.biases, strict=True):
                assert np.array_equal(mine, expected)
        formats = [
            [(share.role, share.total_bytes) for share in inspect(each).footprint.formats]
            for each in (file, other)
        ]
    assert formats[0] == formats[1]
    assert any(role is Role.ATTENTION for role, _ in formats[0])
