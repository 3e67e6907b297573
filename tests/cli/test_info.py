"""`thermocline info`: what it says about good, unsupported and damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.support.gguf_files import write_gguf
from tests.support.toy_archs import ToyArch, write_toy_arch
from tests.support.toy_model import ToyShape, toy_metadata, toy_weights, write_toy_model


def test_json_has_the_dimensions_and_sizes(toy, invoke):
    """Everything that the file says is there under its plain name."""
    facts = json.loads(invoke("info", toy, "--json").stdout)
    assert facts["path"] == toy
    assert facts["architecture"] == "qwen3moe"
    assert facts["supported"] is True
    assert facts["unsupported"] == []
    assert facts["spec"]["num_layers"] == 2
    assert facts["spec"]["router"]["num_experts"] == 8
    footprint = facts["footprint"]
    assert footprint["total_bytes"] == sum(w.nbytes for w in toy_weights(ToyShape()).values())
    assert footprint["experts_bytes"] == 2 * 8 * 3 * 64 * 32 * 4
    assert facts["tokenizer"] == "gpt2, qwen2"
    assert facts["has_chat_template"] is True


def test_the_table_names_what_matters(toy, invoke):
    """The page for people has sizes, experts, formats, and whether it runs."""
    page = invoke("info", toy).stdout
    for part in ("qwen3moe", "8 per layer, 2 used", "32768 tokens", "F32", "runs here", "yes"):
        assert part in page, part


def test_an_unknown_architecture_is_described_and_refused(tmp_path, invoke):
    """A valid file of another architecture shows its sizes and says what is in the way."""
    path = tmp_path / "other.gguf"
    write_gguf(path, {}, [("token_embd.weight", "F32", np.ones((4, 32), np.float32))], arch="gpt2")
    result = invoke("info", str(path))
    assert result.exit_code == 0
    assert "architecture is not supported: gpt2" in result.stdout
    facts = json.loads(invoke("info", str(path), "--json").stdout)
    assert facts["supported"] is False
    assert facts["unsupported"] == ["this architecture is not supported: gpt2"]
    assert facts["spec"] is None
    assert facts["footprint"]["total_bytes"] == 4 * 32 * 4


def test_everything_unsupported_is_listed_at_once(tmp_path, invoke, monkeypatch):
    """Formats and tokenizer that are missing both show up in one look."""
    monkeypatch.setattr("thermocline.kernels.weight.SUPPORTED_FORMATS", frozenset({"F32"}))
    shape = ToyShape(formats={"gate_up": "Q4_0", "embed": "Q8_0"})
    path = write_toy_model(tmp_path / "odd.gguf", shape, metadata={"tokenizer.ggml.pre": "mystery"})
    unsupported = json.loads(invoke("info", str(path), "--json").stdout)["unsupported"]
    text = " ".join(unsupported)
    assert len(unsupported) == 3
    assert "Q4_0" in text
    assert "Q8_0" in text
    assert "mystery" in text


def test_a_tensor_without_a_place_is_said(tmp_path, invoke):
    """`runs here: yes` is only said of a file that would really open."""
    weights = toy_weights(ToyShape()) | {"blk.0.extra.weight": np.ones(4, np.float32)}
    path = write_toy_model(tmp_path / "extra.gguf", weights=weights)
    facts = json.loads(invoke("info", str(path), "--json").stdout)
    assert facts["supported"] is False
    assert "blk.0.extra.weight" in facts["unsupported"][0]


def test_a_damaged_file_is_an_error(tmp_path, toy, invoke):
    """A cut file has no facts to show."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(Path(toy).read_bytes()[:1000])
    result = invoke("info", str(path))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {path}")
    assert result.stdout == ""


def test_a_name_can_not_control_the_terminal(tmp_path, invoke):
    """Escape sequences and markup in a file's name of itself are shown, not obeyed."""
    metadata = toy_metadata(ToyShape()) | {"general.name": "a\x1b[31mb[red]c"}
    path = write_toy_model(tmp_path / "m.gguf", metadata=metadata)
    page = invoke("info", str(path)).stdout
    assert "\x1b" not in page
    assert "b[red]c" in page


def test_a_requests_cache_counts_windows_as_they_are_kept(tmp_path, invoke):
    """A model whose layers but one see 16 tokens keeps those and what is in flight of them, and all in one."""
    shape = ToyArch("laguna", layers=4, rotary=8, window=16, context=4096)
    path = str(write_toy_arch(tmp_path / "m.gguf", shape))
    cache = json.loads(invoke("info", path, "--json").stdout)["cache"]
    per_token, kept = 2 * 2 * 16 * 2, 32 + 1024
    assert cache == {"tokens": 4096, "f16_bytes": (4096 + 3 * kept) * per_token}
    assert f"for 4096 tokens in f16, {kept} in windows" in invoke("info", path).stdout
    chunked = write_toy_arch(tmp_path / "n.gguf", ToyArch("llama4", layers=4, used=1, window=16))
    assert "3 layers see their chunk of 16 tokens, 1 see all" in invoke("info", str(chunked)).stdout
    # A device has windows for more requests, from the start.
    flags = ("--json", "--vram", "12GiB", "--kv-type", "f16", "--max-requests", "1")
    assert json.loads(invoke("plan", path, *flags).stdout)["kv_bytes"] >= cache["f16_bytes"]
