"""The comparison with llama.cpp on a GPU: which experts it gets there, and what is made of llama-bench's lines.

A program stands in for llama-bench, and a function for the driver; thermocline is itself, without a GPU.
"""

from __future__ import annotations

import csv
import sys

import pytest

from benchmarks import against_llama_gpu
from benchmarks.against_llama_gpu import (
    LlamaBench,
    Settings,
    best_of,
    layers_on_cpu,
    main,
    settings_of,
    used_bytes,
)
from benchmarks.sides import Work
from benchmarks.synthetic_model import write_model

SIZES = {
    "token_embd.weight": 1000,
    "output.weight": 50,
    "blk.0.ffn_up_exps.weight": 100,
    "blk.0.ffn_down_exps.weight": 100,
    "blk.1.ffn_up_exps.weight": 100,
    "blk.1.ffn_down_exps.weight": 150,
    "blk.0.attn_q.weight": 10,
}
FAKE = """#!{python}
import json, pathlib, sys
calls = pathlib.Path(__file__).with_name("calls")
calls.write_text(calls.read_text("utf-8") + "x" if calls.exists() else "x", "utf-8")
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if given["-ub"] == "7" or len(calls.read_text("utf-8")) > {calls}:
    sys.exit("no such device")
for flash in given["-fa"].split(","):
    speed = 100.0 + (flash == "on") * 10
    about = dict(build_commit="abc", gpu_info="a GPU", flash_attn=int(flash == "on"), n_gen=0)
    for tokens in given["-p"].split(","):
        print(json.dumps(about | dict(n_prompt=int(tokens), samples_ts=[1.0, speed])))
    print(json.dumps(about | dict(n_prompt=0, n_gen=int(given["-n"]), samples_ts=[speed / 10])))
print("a line that is no JSON")
"""


@pytest.fixture
def program(tmp_path):
    """A program that answers as llama-bench does, four times; with micro-batches of 7 it fails."""
    path = tmp_path / "llama-bench"
    path.write_text(FAKE.format(python=sys.executable, calls=4), "utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("memory", "layers"), [(515, 0), (514, 1), (315, 1), (314, 2), (1, 2), (None, 0)]
)
def test_layers_leave_until_the_rest_fits(memory, layers):
    """All but the embedding is 510 and the work space 5; the first layers' experts go first, whole."""
    assert layers_on_cpu(SIZES, memory, 5) == layers


def test_every_combination_is_tried_with_the_layers_that_fit(tmp_path):
    """A larger micro-batch leaves less for experts."""
    model = write_model(tmp_path / "tiny.gguf", "tiny")
    found = settings_of(model, None, (512, 2048), 64)
    assert len(set(found)) == 8
    assert {one.cpu_layers for one in found} == {0}
    tight = settings_of(model, 1 << 30, (512,), 64)
    assert {one.cpu_layers for one in tight} == {2}


def test_the_fastest_repetition_counts_and_the_best_setting(program, tmp_path):
    """Other programs only ever slow one down."""
    llama = LlamaBench(program, tmp_path / "m.gguf", 2, [Work(16, 0), Work(1, 4)])
    plain, flash = Settings(True, False, 512, 1), Settings(True, True, 512, 1)
    tuned = llama.run([plain, flash])
    assert tuned[plain] == {"prefill 16": 100.0, "decode": 10.0}
    assert tuned[flash] == {"prefill 16": 110.0, "decode": 11.0}
    assert {one.flash for one in best_of(tuned, ["prefill 16", "decode"]).values()} == {True}
    assert (llama.build, llama.gpu) == ("abc", "a GPU")


def test_a_program_that_fails_says_why(program, tmp_path):
    """Its own words are in the message."""
    llama = LlamaBench(program, tmp_path / "m.gguf", 2, [Work(16, 0), Work(1, 4)])
    with pytest.raises(SystemExit, match="no such device"):
        llama.run([Settings(True, False, 7, 1)])


@pytest.fixture
def measured(program, tmp_path, monkeypatch):
    """Runs the benchmark with so many pairs; returns what it returned or ended with, and the rows of its file."""
    monkeypatch.setattr(against_llama_gpu, "used_bytes", lambda: 0)
    model = write_model(tmp_path / "tiny.gguf", "tiny")
    out = tmp_path / "out.csv"

    def run(pairs):
        given = [str(model), "--llama-bench", str(program), "--out", str(out), "--threads", "1"]
        given += ["--prefill", "16", "--decode", "3", "--ubatches", "512", "--repeats", str(pairs)]
        try:
            status = main(given)
        except SystemExit as ended:
            status = str(ended)
        with out.open(encoding="utf-8") as file:
            return status, list(csv.DictReader(file))

    return run


def test_both_sides_of_a_whole_run(measured, capsys):
    """Each phase has rows of both sides and their ratio, in words that say what was allowed."""
    status, rows = measured(2)
    assert status == 0
    speeds = {(row["case"], row["side"]) for row in rows if row["metric"] == "speed"}
    sides = {side for case, side in speeds if case == "prefill 16, 12GiB of the GPU"}
    assert sides == {"thermocline", "llama.cpp", "ratio"}
    assert any(case == "decode, 12GiB of the GPU" for case, _ in speeds)
    assert all(row["gpu"] == "a GPU" and float(row["foreign_cores"]) >= 0 for row in rows)
    assert "of each pair" in capsys.readouterr().out


def test_a_run_that_ends_early_keeps_its_pairs(measured):
    """llama.cpp fails in the third pair; the two before it are in the file."""
    status, rows = measured(5)
    assert "no such device" in status
    ratios = [row for row in rows if row["side"] == "ratio"]
    assert ratios
    assert all(len(row["values"].split()) == 2 for row in ratios)


def test_without_the_drivers_program_the_message_says_so(monkeypatch):
    """On a machine without an NVIDIA GPU."""
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="nvidia-smi does not tell"):
        used_bytes()
