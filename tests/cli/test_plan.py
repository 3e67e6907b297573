"""`thermocline plan`: what would lie where, for this machine or any other."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from tests.support.toy_model import ToyShape, toy_weights
from thermocline.traces.chrome import write_chrome
from thermocline.traces.events import ExpertUse


def planned(invoke, toy, *flags: str) -> dict:
    return json.loads(invoke("plan", toy, "--json", *flags).stdout)


def test_a_large_device_takes_all_but_the_embedding_table(toy, invoke):
    """Sizes are the file's own bytes; a cache of half as many bits takes half of the bytes."""
    weights = toy_weights(ToyShape())
    found = planned(invoke, toy, "--vram", "12GiB", "--ctx", "512", "--kv-type", "f32")
    experts = sum(w.nbytes for name, w in weights.items() if "_exps" in name)
    assert found["routed_expert_bytes"] == found["hot_expert_bytes"] == experts
    assert found["trunk_layers_on_gpu"] == found["trunk_layers"] == 2
    embedding = weights["token_embd.weight"].nbytes
    tied = "output.weight" not in weights
    assert found["trunk_bytes"] == sum(w.nbytes for w in weights.values()) - experts - (
        0 if tied else embedding
    )
    halves = planned(invoke, toy, "--vram", "12GiB", "--ctx", "512", "--kv-type", "bf16")
    assert found["kv_bytes"] == 2 * halves["kv_bytes"] > 0
    assert found["device_bytes"] <= found["device_bytes_limit"] == 12 << 30


def test_the_page_says_where_and_why(toy, invoke):
    """People get a table, the reasons, and what the host has to hold."""
    page = invoke("plan", toy, "--vram", "12GiB", "--ram", "1KiB").stdout
    for part in (
        "routed experts",
        "16 of 16 experts",
        "the whole trunk",
        "read from disk each time",
    ):
        assert part in " ".join(page.split()), part


def test_flags_keep_experts_off_the_device(toy, invoke):
    """All, those of the first layers, or single ones."""
    assert not any(planned(invoke, toy, "--vram", "12GiB", "--cpu-moe")["hot_experts"])
    found = planned(invoke, toy, "--vram", "12GiB", "--n-cpu-moe", "1", "--cold", "1:0")
    assert found["hot_experts"] == [[], [1, 2, 3, 4, 5, 6, 7]]


def test_a_recorded_timeline_says_what_is_hot(toy, invoke, tmp_path):
    """With room for three experts the most used ones are chosen."""
    counts = ((9, 0, 0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0, 7, 8))
    write_chrome(tmp_path / "t.json", [], metadata={}, expert_use=ExpertUse(counts, ((), ())))
    expert = 3 * 64 * 32 * 4
    found = planned(
        invoke,
        toy,
        *(
            "--vram",
            "12GiB",
            "--expert-budget",
            str(3 * expert),
            "--heat",
            str(tmp_path / "t.json"),
        ),
    )
    assert found["hot_experts"] == [[0], [6, 7]]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--vram", "much"), "is not a size"),
        (("--hot", "one"), "write layer:expert"),
        (("--hot", "9:0"), "layers 0 to 1"),
        (("--cold", "1-2"), "layers 0 to 1"),
        (("--ctx", "99999999"), "trained for"),
    ],
)
def test_what_can_not_be_is_said(toy, invoke, flags, says):
    """A wrong flag is one line that says the fix."""
    result = invoke("plan", toy, *flags)
    assert result.exit_code == 1
    assert says in result.stderr


def test_a_timeline_of_another_model_is_refused(toy, invoke, tmp_path):
    """Its layers and experts are not this model's."""
    write_chrome(tmp_path / "t.json", [], metadata={}, expert_use=ExpertUse(((1, 2),), ((),)))
    result = invoke("plan", toy, "--heat", str(tmp_path / "t.json"))
    assert result.exit_code == 1
    assert "another model" in result.stderr


@pytest.mark.parametrize("available", [True, False])
def test_the_device_of_this_machine_is_asked_by_default(toy, invoke, monkeypatch, available):
    """Free memory is what the driver says, where there is a driver."""
    cuda = SimpleNamespace(is_available=lambda: available, mem_get_info=lambda: (3 << 30, 4 << 30))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    found = planned(invoke, toy)
    assert found["device_bytes_total"] == (4 << 30 if available else 0)
    assert found["device_bytes_limit"] == (3 << 30 if available else 0)
