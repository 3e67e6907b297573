"""`thermocline heat`: what is known of a model's experts, shown, exported, forgotten; and planned by."""

from __future__ import annotations

import json
import os

import pytest

from tests.support.toy_model import ToyShape, write_toy_model

RUN = ("-p", "the inner", "--ignore-eos", "--max-tokens", "4", "--kernels", "reference")


@pytest.fixture
def used(tmp_path, kept_heat, invoke) -> str:
    """A toy model that answered once."""
    path = os.fspath(write_toy_model(tmp_path / "toy.gguf", ToyShape()))
    assert invoke("run", path, *RUN).exit_code == 0
    return path


def test_a_table_says_which_experts_were_used(used, invoke):
    """One line per layer, and where it is kept."""
    page = invoke("heat", used).stdout
    for part in ("8 experts of each layer", "top quarter", "bits of 3.00", "cache/heat/toy.gguf-"):
        assert part in "".join(page.splitlines()), part
    table = page.partition("kept in")[0]
    assert max(map(len, table.splitlines())) <= 80


def test_json_has_the_same_figures(used, invoke):
    """One object; shares add up to at most one."""
    found = json.loads(invoke("heat", used, "--json").stdout)
    assert [layer["layer"] for layer in found["layers"]] == [0, 1]
    assert found["num_tokens"] > 4
    assert len(found["repeat_shares"]) == 2
    assert all(0 <= share <= 1 for share in found["repeat_shares"])
    for layer in found["layers"]:
        shares = [entry["share"] for entry in layer["top"]]
        assert shares == sorted(shares, reverse=True)
        assert 0.25 <= layer["top_quarter_share"] <= sum(shares) <= 1 + 1e-9
        assert 0 < layer["entropy_bits"] <= 3


def test_a_plan_goes_by_it_unless_told(used, invoke, tmp_path):
    """From the cache, from an exported file after it is forgotten, or not at all."""
    flags = (
        "--vram",
        "12GiB",
        "--expert-budget",
        f"{8 * 3 * 64 * 32 * 4}B",
        "--ram",
        "1GiB",
        "--json",
    )

    def planned(*more: str) -> dict:
        return json.loads(invoke("plan", used, *flags, *more).stdout)

    by_use, unknown = planned(), planned("--no-heat")
    assert by_use["hot_share"] > 0.5
    assert unknown["hot_share"] is None
    assert unknown["hot_experts"] == [[0, 1], [0, 1]] != by_use["hot_experts"]
    exported = tmp_path / "exported"
    assert invoke("heat", used, "--export", str(exported)).exit_code == 0
    assert invoke("heat", used, "--reset").exit_code == 0
    assert planned() == unknown
    assert planned("--heat", str(exported)) == by_use
    other = os.fspath(write_toy_model(tmp_path / "other.gguf", ToyShape(experts=4)))
    refused = invoke("plan", other, "--heat", str(exported))
    assert (refused.exit_code, "another model" in refused.stderr) == (1, True)


def test_what_is_not_known_is_said(used, invoke):
    """Once it is forgotten there is nothing to show, and nothing to forget."""
    assert "deleted: " in invoke("heat", used, "--reset").stderr
    assert "nothing was kept" in invoke("heat", used, "--reset").stderr
    result = invoke("heat", used)
    assert result.exit_code == 1
    assert "run, chat or serve" in result.stderr


def test_a_benchmark_learns_nothing(used, invoke):
    """Random tokens are no use of the model."""
    before = invoke("heat", used, "--json").stdout
    flags = ("-p", "8", "-n", "2", "-r", "1", "--kernels", "reference", "--json")
    assert invoke("bench", used, *flags).exit_code == 0
    assert invoke("heat", used, "--json").stdout == before


@pytest.mark.parametrize("command", ["run", "bench", "serve", "chat"])
def test_the_flags_of_a_plan_are_those_of_the_other_commands(invoke, command):
    """What keeps experts here or there is said alike everywhere."""
    page = invoke(command, "--help").stdout
    for flag in ("--hot ", "--cold ", "--cpu-moe", "--n-cpu-moe"):
        assert flag in page, flag
        assert flag in invoke("plan", "--help").stdout
    assert "--no-heat" in page
    assert "--heat-file" in page


def test_a_named_file_serves_every_command(used, invoke, tmp_path):
    """run keeps there; heat, plan and bench read there; what excludes it is refused."""
    own = str(tmp_path / "own.json")
    missing = invoke("plan", used, "--vram", "1GiB", "--no-measure", "--heat-file", own)
    assert (missing.exit_code, "is not there" in missing.stderr) == (1, True)
    assert invoke("run", used, *RUN, "--max-tokens", "6", "--heat-file", own).exit_code == 0
    found = json.loads(invoke("heat", used, "--heat-file", own, "--json").stdout)
    assert found["file"] == own
    assert found["num_tokens"] > json.loads(invoke("heat", used, "--json").stdout)["num_tokens"]
    plan = ("plan", used, "--vram", "1GiB", "--no-measure", "--heat-file", own, "--json")
    assert json.loads(invoke(*plan).stdout)["hot_share"] is not None
    flags = ("-p", "8", "-n", "2", "-r", "1", "--kernels", "reference", "--json")
    assert invoke("bench", used, *flags, "--heat-file", own).exit_code == 0
    for command in (("run", used, *RUN), ("plan", used)):
        refused = invoke(*command, "--heat-file", own, "--no-heat")
        assert refused.exit_code != 0
        assert "exclude each other" in refused.stderr
    assert invoke("heat", used, "--heat-file", own, "--reset").exit_code == 0
    assert invoke("heat", used).exit_code == 0


def test_wishes_reach_the_engine(used, invoke):
    """Per layer, per expert; the reasons are told."""
    flags = ("--hot-device", "cpu", "--n-cpu-moe", "1", "--hot", "1:3", "--cold", "1:0-2", "--json")
    found = json.loads(invoke("run", used, *RUN, *flags).stdout)
    assert found["experts"]["num_hot"] <= 5
    assert any("experts on the device" in reason for reason in found["experts"]["reasons"])
    refused = invoke("run", used, *RUN, "--hot-device", "none", "--hot", "1:3")
    assert (refused.exit_code, "give --hot-device" in refused.stderr) == (2, True)
