"""Every benchmark runs to its end on a tiny model, through the code that a real run takes."""

from __future__ import annotations

import csv
import json
import math
import os
import platform
import shutil
import statistics

import pytest

from benchmarks import (
    against_llama,
    agent,
    expert_cache,
    expert_foresight,
    expert_link,
    expert_workers,
    gpu_proof,
    loop_lag,
    many_requests,
    memory,
    moe_layer,
    overlap,
    pipeline_overhead,
    predictions,
    prompt_streaming,
    proof_cpu,
    settings,
    shared_step,
    speculation,
    synthetic_model,
    type_table,
    worker_round_trip,
)
from benchmarks.bandwidth import BandwidthProbe
from benchmarks.flag_sets import NO_FLAGS, NUM_SETS, settings_for
from benchmarks.kernel_calls import available_sets, supported_formats
from benchmarks.proof.tables import page
from benchmarks.published_models import __main__ as published_models
from benchmarks.routing_source import routing_of
from benchmarks.sides import LlamaChild, LlamaSettings, Work, every_setting, llama_python
from benchmarks.synthetic_blocks import DRAWABLE
from thermocline.calibration import calibrate
from thermocline.demo import DEMO_MODEL_PATH

PYTHON = llama_python(None)
LONG = pytest.mark.skipif(
    "THERMOCLINE_BENCHMARKS" not in os.environ, reason="seconds each: make check-benchmarks"
)


def rows_of(path):
    """The CSV's rows; each has a finite, positive median and says where it was taken."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    for row in rows:
        values = [float(value) for value in row["values"].split()]
        assert math.isfinite(float(row["median"])), row
        assert math.isclose(statistics.median(values), float(row["median"]), rel_tol=1e-4), row
        assert row["cpu"], row
        assert row["commit"], row
        assert row["foreign_cores"], row
    return rows


@pytest.mark.slow
def test_a_model_is_written(tmp_path, capsys):
    """The generator's command writes the file and says how large it is."""
    path = tmp_path / "tiny.gguf"
    assert synthetic_model.main([str(path), "--quick"]) == 0
    assert f"{path.stat().st_size} bytes" in capsys.readouterr().out


@pytest.mark.slow
def test_a_layer_is_timed_and_right(tmp_path, capsys):
    """Every case is timed, and the layer's result is that of dequantised weights."""
    out = tmp_path / "layer.csv"
    assert moe_layer.main(["--quick", "--out", str(out)]) == 0
    rows = rows_of(out)
    assert {row["case"] for row in rows} == {"1 tokens", "4 tokens", "16 tokens"}
    assert {row["side"] for row in rows} == {"1 threads", "2 threads"}
    errors = [float(row["median"]) for row in rows if row["metric"] == "relative error"]
    assert max(errors) < 0.02
    assert "pass  relative error" in capsys.readouterr().out


def test_a_broken_promise_of_a_layer_is_told():
    """Falling time, a slower second thread and a large error each fail their check."""
    fine = {(1, 1): [4.0], (1, 2): [2.0], (8, 1): [8.0], (8, 2): [4.0]}
    error = {1: 0.001, 8: 0.001}
    assert all(passed for _, passed in moe_layer.checks(fine, error, [1, 2]))
    falling = fine | {(8, 2): [1.0]}
    assert [p for _, p in moe_layer.checks(falling, error, [1, 2])] == [True, False, True, True]
    slower = fine | {(1, 2): [5.0], (8, 2): [8.0]}
    assert [p for _, p in moe_layer.checks(slower, error, [1, 2])] == [True, True, False, True]
    wrong = {1: 0.013, 8: 0.013}
    assert [p for _, p in moe_layer.checks(fine, wrong, [1, 2])] == [True, True, True, False]


@pytest.mark.slow
def test_every_type_is_in_the_table(tmp_path):
    """Each supported type has both speeds and small errors, in the CSV and on the page."""
    out, page = tmp_path / "types.csv", tmp_path / "types.md"
    assert type_table.main(["--quick", "--out", str(out), "--markdown", str(page)]) == 0
    rows = rows_of(out)
    assert {row["case"] for row in rows} == set(supported_formats()) & set(DRAWABLE)
    named = [f"| {name} {isa}" for name in DRAWABLE for isa in available_sets()]
    assert all(name in page.read_text() for name in named)
    assert max(float(row["median"]) for row in rows if row["metric"].endswith("error")) < 0.02


@pytest.mark.slow
def test_lag_and_idle_time_are_measured(tmp_path, capsys):
    """The loop's lag has ticks, and both requirements get a verdict."""
    out = tmp_path / "lag.csv"
    assert loop_lag.main(["--quick", "--out", str(out)]) == 0
    assert {row["metric"] for row in rows_of(out)} == {
        "lag p50",
        "lag p99",
        "lag max",
        "speed",
        "idle",
    }
    text = capsys.readouterr().out
    assert "event-loop lag p99" in text
    assert "idle after the last token" in text


@pytest.mark.slow
def test_memory_is_measured_in_a_child(tmp_path, capsys):
    """The child's opening time, peak of anonymous memory and speeds arrive here."""
    out = tmp_path / "memory.csv"
    assert memory.main(["--quick", "--out", str(out)]) == 0
    found = {row["metric"]: float(row["median"]) for row in rows_of(out)}
    assert 1 << 20 < found["anonymous memory, opened"] <= found["anonymous memory, peak"] * 1.01
    assert found["prefill 55"] > 0
    assert found["decode 8"] > 0
    assert "anonymous memory under 1.5 GiB" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="no interpreter here can import llama_cpp")
def test_both_sides_run_in_turn(tmp_path, capsys):
    """Every setting is tried, weights are really repacked, the best meets thermocline; a ratio for each pair."""
    out = tmp_path / "llama.csv"
    assert against_llama.main(["--quick", "--cpu-isa", "portable", "--out", str(out)]) == 0
    rows = rows_of(out)
    pairs = [row for row in rows if row["side"] == "ratio"]
    assert {row["case"] for row in pairs} == {"prefill 16", "decode at 0", "decode at 32"}
    assert all(len(row["values"].split()) == 2 for row in pairs)
    ours = [row for row in rows if (row["side"], row["metric"]) == ("thermocline", "speed")]
    assert [row["note"] for row in ours] == ["--cpu-isa portable"] * 3
    tried = {row["note"] for row in rows if row["metric"] == "speed, tuning"}
    assert tried == {str(setting) for setting in every_setting((False, True), (512,))}
    assert float(rows[0]["repacked_mib"]) > 0.5
    assert "thermocline keeps" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="no interpreter here can import llama_cpp")
def test_llama_computes_as_it_was_asked(tmp_path):
    """Prompts of one micro-batch are run as one, repacked weights are told, and a kept prompt goes to the other child."""
    model = synthetic_model.write_model(tmp_path / "tiny.gguf", "tiny")
    asked = LlamaSettings(False, True, 600), LlamaSettings(True, True, 600)
    with LlamaChild(PYTHON, model, 1, repack=False) as plain:
        assert plain.facts["repacked_mib"] == 0
        assert plain.run(Work(600, 0), asked[0]).prefill > 0
        assert plain.run(Work(600, 4, 2), asked[0], keep_prompt=True, states=tmp_path).prefill > 0
        assert plain.run(Work(600, 4, 2), asked[0], keep_prompt=True, states=tmp_path).prefill == 0
    with LlamaChild(PYTHON, model, 1, repack=True) as repacked:
        assert repacked.facts["repacked_mib"] > 0.5
        found = repacked.run(Work(600, 4, 2), asked[1], keep_prompt=True, states=tmp_path)
        assert found.prefill == 0
        assert found.decode > 0


class FakeFleet:
    """Answers with a speed by setting and length, and notes what was asked."""

    def __init__(self):
        self.asked = []

    def run(self, phase, settings):
        """Repacked weights are twice as slow; large batches are faster on long prompts."""
        self.asked.append((phase.name, settings))
        return (50.0 if settings.repack else 100.0) + settings.ubatch / 100


def test_every_setting_that_can_matter_is_tried():
    """Repacked and not, flash attention on and off, both batches where the prompt is that long; the slow ones once."""
    fleet = FakeFleet()
    phases = [
        against_llama.Phase("prefill 512", Work(512, 0), False),
        against_llama.Phase("prefill 2048", Work(2048, 0), False),
        against_llama.Phase("decode at 0", Work(1, 8), True),
        against_llama.Phase("decode at 8192", Work(8192, 8), True),
    ]
    settings = every_setting((False, True), (512, 2048))
    tuned = against_llama.tune(fleet, phases, settings, 3)
    assert {name: set(speeds) for name, speeds in tuned.items()} == {
        "prefill 512": {setting for setting in settings if setting.ubatch == 512},
        "prefill 2048": set(settings),
        "decode at 0": {setting for setting in settings if setting.ubatch == 512},
        "decode at 8192": {setting for setting in settings if setting.ubatch == 512},
    }
    for speeds in tuned.values():
        for setting, values in speeds.items():
            assert len(values) == (1 if setting.repack else 3), setting
    assert len(fleet.asked) == 3 * 8 + 16
    assert against_llama.best_settings(tuned)["prefill 2048"].ubatch == 2048


def test_every_tried_setting_is_a_row(capsys):
    """With all its runs and its name, the best one marked in the table; slow ones are not left out."""
    fast, slow = LlamaSettings(False, True, 2048), LlamaSettings(True, False, 512)
    tuned = {"prefill 2048": {slow: [50.0], fast: [90.0, 100.0, 95.0]}}
    rows = against_llama.show_tuning(tuned, against_llama.best_settings(tuned))
    assert {(row.note, row.values) for row in rows} == {
        ("repacked, no flash attention, ubatch 512", (50.0,)),
        ("not repacked, flash attention, ubatch 2048", (90.0, 100.0, 95.0)),
    }
    (best,) = [line for line in capsys.readouterr().out.splitlines() if "best" in line]
    assert "not repacked, flash attention, ubatch 2048" in best


def test_the_fastest_setting_is_chosen():
    """One undisturbed run decides: others only ever make a run slower."""
    first, second = LlamaSettings(False, False, 512), LlamaSettings(True, True, 512)
    tuned = {"prefill 16": {first: [5.0, 5.0, 5.0], second: [1.0, 9.0, 1.0]}}
    assert against_llama.best_settings(tuned) == {"prefill 16": second}


def test_the_bandwidth_probe_gives_a_plausible_rate():
    """Gigabytes per second, not bytes and not zero."""
    assert 0.1 < BandwidthProbe(1, 32 << 20).measure() < 10_000


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", [many_requests, overlap, pipeline_overhead, shared_step])
def test_the_pipeline_s_benchmarks_run(benchmark, tmp_path, capsys):
    """Each has its rows, all of them numbers above zero, and a verdict for each requirement."""
    out = tmp_path / "rows.csv"
    assert benchmark.main(["--quick", "--out", str(out)]) == 0
    assert all(float(row["median"]) > 0 for row in rows_of(out))
    text = capsys.readouterr().out
    assert sum(text.count(word) for word in ("pass  ", "FAIL  ", "BROKEN  ")) in (1, 2, 3, 4, 6)


def test_the_ring_has_a_limit_of_its_own(monkeypatch, tmp_path, capsys):
    """A ring that takes more than 100 us is BROKEN and the status 1, and so is a split step of 80 us more than a fused one."""

    def spent(ring, step):
        return dict.fromkeys(pipeline_overhead.MAX_US, 10.0) | {
            "prompts, the ring with a hot lane": ring,
            "decode, the ring with a hot lane": step,
        }

    def run(ring, step=90.0):
        cases = {name: lambda _, us=us: us for name, us in spent(ring, step).items()}
        monkeypatch.setattr(pipeline_overhead, "_cases", lambda _: cases)
        return pipeline_overhead.main(["--out", str(tmp_path / "rows.csv")])

    assert run(100.0) == 0
    assert "BROKEN" not in capsys.readouterr().out
    assert run(101.0) == 1
    text = capsys.readouterr().out
    assert (
        "BROKEN  prompts, the ring with a hot lane: 101.0 us per chunk and layer, at most 100"
        in text
    )
    assert "prompts, the ring with a hot lane  recorder off   101.0 us per chunk and layer" in text
    assert run(100.0, step=91.0) == 1
    assert "BROKEN  decode, the ring with a hot lane: 81.0 us more" in capsys.readouterr().out


@LONG
def test_predictions_are_held_against_runs(tmp_path, capsys, monkeypatch):
    """Both phases have a predicted and a real speed, and their ratio; the verdict is printed."""
    out = tmp_path / "predictions.csv"
    monkeypatch.setattr(calibrate, "_STEP_ROUNDS", 1)
    monkeypatch.setattr(calibrate, "_STEP_TOKENS", 8)
    assert predictions.main(["--quick", "--threads", "1", "--out", str(out)]) == 0
    rows = rows_of(out)
    assert {row["side"] for row in rows} == {"predicted", "real", "predicted/real"}
    assert {row["metric"] for row in rows} == {"prefill 16", "decode 4"}
    assert {row["routing"] for row in rows} == {"uniform"}
    assert "within 15 %" in capsys.readouterr().out


@LONG
def test_published_models_are_looked_at(tmp_path, capsys):
    """Each look at the smallest model has its seconds and its memory, within what is required of memory."""
    out = tmp_path / "published.csv"
    assert published_models.main(["--quick", "--out", str(out)]) == 0
    rows = rows_of(out)
    assert len({row["case"] for row in rows}) == 3
    memory = [float(row["median"]) for row in rows if row["unit"] == "bytes"]
    assert len(memory) == 6
    assert all(1 << 20 < value < 300 << 20 for value in memory)
    assert capsys.readouterr().out.count("OLMoE-1B-7B") == 3


@LONG
def test_the_expert_cache_is_replayed(tmp_path, capsys):
    """On three routings, each named in its rows: faster than LRU and the best fixed set where there is something to
    know, and never worse than the CPU alone."""
    out, routing = tmp_path / "rows.csv", tmp_path / "routing.npz"
    assert expert_cache.main(["--quick", "--out", str(out), "--keep", str(routing)]) == 0
    rows = rows_of(out)
    for name in ("demo model", "uniform", "generated skewed"):
        mine = [row for row in rows if row["routing"] == name]
        assert {row["side"] for row in mine} >= {"expert cache", "plain LRU", "offline optimum"}
    assert {row["clock"] for row in rows} == {"virtual"}
    text = capsys.readouterr().out
    assert (text.count("pass  "), text.count("FAIL  ")) == (13, 0)
    assert text.count("0 experts, and says: nothing is copied") == 3


@LONG
def test_foresight_is_counted_by_routing(tmp_path, capsys):
    """Each routing has shares by layer (a busy machine scores not all), and the optimum finds what recency does."""
    out = tmp_path / "rows.csv"
    assert expert_foresight.main(["--quick", "--out", str(out)]) == 0
    rows = rows_of(out)
    for name in ("demo model", "uniform", "generated skewed"):
        mine = {(row["side"], row["metric"]): row for row in rows if row["routing"] == name}
        recall = [float(value) for value in mine["router, ahead", "recall"]["values"].split()]
        assert 1 <= len(recall) <= 4
        assert all(0 <= value <= 1 for value in recall)
        best, recent = (mine[side, "hits"] for side in ("offline optimum", "least recently used"))
        assert float(best["median"]) >= float(recent["median"])
    assert "| generated skewed |" in capsys.readouterr().out


def test_a_file_says_what_routing_it_gives(tmp_path):
    """The demo model is trained; the generator's files are uniform, or skewed where the router is; others have a name."""
    even = synthetic_model.write_model(tmp_path / "even.gguf", "tiny")
    skewed = synthetic_model.write_model(tmp_path / "skewed.gguf", "tiny", skew=0.5)
    found = [routing_of(path) for path in (DEMO_MODEL_PATH, even, skewed)]
    assert found == ["demo model", "uniform", "generated skewed"]
    copy = shutil.copy(DEMO_MODEL_PATH, tmp_path / "other.gguf")
    assert routing_of(copy) == "thermocline demo"


@pytest.mark.slow
def test_settings_compares_no_flags_with_sets_of_flags(tmp_path, capsys):
    """Two sets on two machines: shares of the best, speeds without flags, and the same as JSON."""
    out, as_json = tmp_path / "settings.csv", tmp_path / "settings.json"
    assert settings.main(["--quick", "--out", str(out), "--json", str(as_json)]) == 0
    rows = rows_of(out)
    assert {row["metric"] for row in rows} == {"share of the best", "no flags"}
    found = json.loads(as_json.read_text())["outcomes"]
    assert [one["phase"] for one in found] == ["prompt", "answer"] * 2
    assert all(0 < one["share"] <= 1 and one["num_sets"] == 2 for one in found)
    assert "share of the best" in capsys.readouterr().out


def test_each_setting_has_twenty_sets_of_flags():
    """All differ, parse as the command line does, and change no answer: no other KV type."""
    for setting in settings_for(1 << 30, 1 << 31).values():
        sets = setting.flag_sets(2)
        assert len(set(sets)) == NUM_SETS == 20
        plain = setting.config(NO_FLAGS)
        assert (plain.placement.hot_device == "simulated") is (setting.device_bytes > 0)
        for flags in sets:
            config = setting.config(flags)
            assert config.memory.kv_type == plain.memory.kv_type
            assert config != plain, flags


@pytest.mark.slow
def test_a_link_is_measured_with_its_routing(tmp_path, capsys):
    """Each side's time against the CPU alone, on the routing that the file gives."""
    out = tmp_path / "link.csv"
    assert expert_link.main(["--quick", "--out", str(out)]) == 0
    rows = rows_of(out)
    assert {row["routing"] for row in rows} == {"uniform"}
    assert sum(row["metric"] == "of cpu alone" for row in rows) == 5


@pytest.mark.slow
def test_speculation_is_measured(tmp_path):
    """Each side's speed for scripted drafts, and lookup's for texts; every side gives the same answer."""
    out = tmp_path / "speculation.csv"
    assert speculation.main(["--quick", "--out", str(out)]) == 0
    rows = rows_of(out)
    sides = [(row["case"], row["side"]) for row in rows if row["metric"] == "decode"]
    names = ("off", "auto", "auto, trees", "2 drafted", "tree of 3")
    scripted = [("acceptance 0.5", side) for side in names]
    texts = [(case, side) for case in ("code edit", "prose") for side in ("off", "lookup")]
    assert list(dict.fromkeys(sides)) == scripted + texts


@pytest.mark.slow
def test_copies_ahead_are_measured(tmp_path):
    """Each side's prompts, and their times against those whose experts are copied when the layer is routed."""
    out = tmp_path / "streaming.csv"
    assert prompt_streaming.main(["--quick", "--out", str(out)]) == 0
    rows = rows_of(out)
    assert len({row["side"] for row in rows}) == 3
    assert sum(row["metric"] == "of copies when routed" for row in rows) == 3


@pytest.mark.slow
def test_the_proofs_run(tmp_path, capsys):
    """Nothing fails; every stage ended by itself; the page is made from the file, and neither tells the machine."""
    assert proof_cpu.main(["--quick", "--out", str(tmp_path)]) == 0
    assert gpu_proof.main(["--quick", "--device", "torch-cpu", "--out", str(tmp_path)]) == 0
    assert "FAIL" not in capsys.readouterr().out
    files = sorted(tmp_path.glob("*.json"))
    assert len(files) == 2
    for path in files:
        proof, text = json.loads(path.read_text()), path.with_suffix(".md").read_text()
        assert text == page(proof)
        stages = {row["stage"] for row in proof["rows"]}
        ended = [row for row in proof["rows"] if row["name"] == "stage"]
        assert {row["stage"] for row in ended} == stages
        assert all(row["ok"] for row in ended)
        assert platform.node() not in text or len(platform.node()) < 3
    names = {row["name"] for path in files for row in json.loads(path.read_text())["rows"]}
    assert {"decode, 1 threads, layer", "memory read, 1 threads", "pinned to device"} <= names


@LONG
def test_a_session_waits_for_its_new_tokens(tmp_path, capsys):
    """Kernels with one arithmetic compute what is new and the rest of a block; each turn has its figures."""
    out = tmp_path / "agent.csv"
    assert agent.main(["--quick", "--cpu-isa", "portable", "--out", str(out)]) == 0
    metrics = {row["metric"]: row for row in rows_of(out)}
    assert len(metrics["computed/new"]["values"].split()) == 4
    assert len(metrics["turn/alone"]["values"].split()) == 2
    said = [
        line for line in capsys.readouterr().out.splitlines() if "a turn computes at most" in line
    ]
    assert len(said) == 6, said
    assert all(line.startswith("pass  ") for line in said), said


@LONG
def test_workers_are_measured(tmp_path, capsys):
    """Round trips of each case, and every side of workers with both speeds; requirements get a verdict."""
    out = tmp_path / "trips.csv"
    assert worker_round_trip.main(["--quick", "--out", str(out)]) == 0
    cases = {row["case"] for row in rows_of(out)}
    assert {"echo", "shared, empty", "stream, one token", "shared, empty, client"} <= cases
    out = tmp_path / "workers.csv"
    assert expert_workers.main(["--quick", "--out", str(out)]) == 0
    assert {row["side"] for row in rows_of(out)} == set(expert_workers.sides_of("local"))
    text = capsys.readouterr().out
    assert "empty over shared memory" in text
    assert "best of the fixed ones" in text
