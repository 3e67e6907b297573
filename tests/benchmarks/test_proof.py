"""The runner of the proofs: whatever becomes of a stage, the next follows, and the file has all that was found."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from benchmarks import gpu_proof, proof_cpu
from benchmarks.proof import device_large
from benchmarks.proof.cpu import thread_counts
from benchmarks.proof.rows import ProofFile, read_samples, rows_of
from benchmarks.proof.runner import ROOT, Stage, run_stages, scratch_folder, without_place
from benchmarks.proof.tables import page
from tests.support.processes import disposition
from thermocline.experts.backends.streamed_device import StreamedDevice

FAKES = "tests.support.proof_stages:"


def fake(name: str, deadline_s: float = 60.0, **rest) -> Stage:
    return Stage(name, FAKES + name, deadline_s, **rest)


def run(folder, *stages: Stage, **rest) -> dict[tuple[str, str], dict]:
    """Run the stages, and return the rows that the file has at the end."""
    proof = ProofFile(folder / "proof.json", {"proof": "test"})
    run_stages(stages, proof, folder, **rest)
    written = json.loads(proof.path.read_text())
    assert written["facts"] == {"proof": "test"}
    return {(row["stage"], row["name"]): row for row in written["rows"]}


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_whatever_becomes_of_a_stage_the_next_follows(tmp_path, capsys):
    """One that raises, one that crashes and one that hangs are rows that say so; what they found before is kept."""
    rows = run(tmp_path, fake("raises"), fake("crashes"), fake("hangs", 1.5), fake("fine"))
    assert rows["raises", "before"]["value"] == rows["crashes", "before"]["value"] == 1.0
    raised, crashed, hung = (rows[name, "stage"] for name in ("raises", "crashes", "hangs"))
    assert [raised["ok"], crashed["ok"], hung["ok"]] == [False] * 3
    assert "ended with status 1" in raised["why"]
    assert "boom" in raised["why"]
    assert str(ROOT) not in raised["why"]
    assert "killed by SIGSEGV, at the deadly case" in crashed["why"]
    assert "killed after 2 s, at the endless case" in hung["why"]
    assert not is_alive(int(rows["hangs", "child"]["value"])), "a child was left behind"
    assert rows["fine", "stage"]["ok"] is True
    assert rows["fine", "figure"] | {"why": ""} == {
        "stage": "fine", "name": "figure", "ok": True, "value": 2.0, "unit": "us", "n": 3, "min": 1.0,
        "median": 2.0, "p90": 3.0, "why": "",
    }  # fmt: skip
    assert (rows["fine", "absent"]["ok"], rows["fine", "held"]["ok"]) == (None, True)
    assert capsys.readouterr().out.count("FAIL") == 3


def test_stages_without_time_are_not_begun(tmp_path):
    """They are rows as well: a run that ended early does not look like a whole one."""
    rows = run(tmp_path, fake("fine"), fake("hangs"), max_seconds=1.0)
    assert {row["ok"] for row in rows.values()} == {None}
    assert "not begun: 1 s were over" in rows["hangs", "stage"]["why"]


def test_checks_run_beside_each_other(tmp_path):
    """Shared stages at once: each of the two ends only beside the other."""
    names = [str(tmp_path / name) for name in "ab"]
    for name in names:
        os.mkfifo(name)
    stages = [
        Stage(f"meets {n}", FAKES + "meets", 60, {"mine": names[n], "theirs": names[1 - n]}, True)
        for n in range(2)
    ]
    rows = run(tmp_path, *stages, jobs=2)
    assert all(rows[stage.name, "met"]["ok"] for stage in stages)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_killed_keeps_what_it_had(tmp_path, number):
    """The file has the stages before; the stage that ran dies with the run; scratch goes where a signal can be taken."""
    fifo, out = tmp_path / "pipe", tmp_path / "proof.json"
    os.mkfifo(fifo)
    program = (
        "from pathlib import Path\n"
        "from benchmarks.proof.rows import ProofFile\n"
        "from benchmarks.proof.runner import Stage, run_stages, scratch_folder\n"
        f"stages = [Stage('fine', '{FAKES}fine', 60), Stage('waits', '{FAKES}waits', 60, {{'fifo': '{fifo}'}})]\n"
        f"with scratch_folder(Path('{tmp_path}')) as scratch:\n"
        f"    run_stages(stages, ProofFile(Path('{out}'), {{}}), scratch)\n"
    )
    with disposition(signal.SIGHUP, signal.SIG_DFL):
        started = subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.DEVNULL
        )
    with started as ran:
        with fifo.open() as pipe:
            assert pipe.readline() == "running\n"
            ran.send_signal(number)
            assert pipe.read() == "", "until the stage is dead"
        ran.wait(30)
    rows = json.loads(out.read_text())["rows"]
    assert {row["stage"] for row in rows} >= {"fine"}
    if number != signal.SIGKILL:
        last = rows[-1]
        assert (last["stage"], last["ok"], last["why"]) == (
            "waits",
            False,
            "the whole run was ended",
        )
        assert not list(tmp_path.glob("thermocline-proof-*"))


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    """A stage was killed while it wrote."""
    path = tmp_path / "samples"
    path.write_text('{"name": "a", "value": 1}\n[]\n{"name": "b", "va')
    assert [sample["name"] for sample in read_samples(path)] == ["a"]
    assert read_samples(tmp_path / "none") == []


def test_what_fails_is_seen_in_rows_and_on_the_page(tmp_path):
    """A figure that is no number fails; one failed case of several fails the row, with its reason."""
    rows = run(tmp_path, fake("broken"))
    assert rows["broken", "figure"]["ok"] is False
    assert rows["broken", "figure"]["value"] is None
    check = rows["broken", "check"]
    assert (check["ok"], check["value"], check["n"]) == (False, 1, 2)
    text = page({"facts": {"proof": "p", "title": "t", "cores": 2}, "rows": list(rows.values())})
    assert "# p: t" in text
    assert "- cores: 2" in text
    assert "case 7: other bits / here" in text
    assert text.count("FAIL") == 3  # the figure, all checks, and the one
    assert "2 failed" in text
    loud = rows["broken", "stage"] | {"name": "other programs", "value": 1.5, "why": "disturbed"}
    assert "up to 1.5 cores beside 1 stages" in page({"facts": {}, "rows": [loud]})


def test_the_ninetieth_percentile_is_one_of_the_samples():
    """Of ten the ninth, of one the one."""
    ten = rows_of("s", [{"name": "x", "value": value, "ok": True} for value in range(10)])[0]
    assert (ten["median"], ten["p90"], ten["n"]) == (4.5, 8.0, 10)
    one = rows_of("s", [{"name": "x", "value": 7, "ok": True}])[0]
    assert one["value"] == one["min"] == one["p90"] == 7.0


@pytest.mark.slow
def test_a_crash_of_the_suite_names_its_case(tmp_path):
    """Only the cases of the set are run, each test is a row, and the case that killed the process is named."""
    cases = tmp_path / "test_some.py"
    cases.write_text(
        "import os, pytest\n"
        "@pytest.mark.parametrize('isa', ['portable', 'avx2'])\n"
        "def test_one(isa): assert isa == 'portable'\n"
        "@pytest.mark.parametrize('isa', ['portable', 'avx2'])\n"
        "def test_two(isa): os.abort()\n"
    )
    given = {"paths": [str(cases)], "of": "portable"}
    rows = run(tmp_path, Stage("suite", "benchmarks.proof.suite:run_tests", 60, given))
    (name,) = (name for _, name in rows if name.endswith("test_one"))
    assert (rows["suite", name]["value"], rows["suite", name]["n"]) == (1, 1)
    why = rows["suite", "stage"]["why"]
    assert "killed by SIGABRT" in why
    assert "test_two[portable]" in why


@pytest.mark.slow
def test_no_gpu_is_one_line_and_a_status(monkeypatch, capsys, tmp_path):
    """The driver is asked in another process: none, a crash and a hang of it all end the command with 2."""
    monkeypatch.setattr(gpu_proof, "_ASK_S", 1)
    hang = "import threading; threading.Event().wait()"
    for program in ("import sys; sys.exit('no device here')", "import os; os.abort()", hang):
        monkeypatch.setattr(gpu_proof, "_ASK", program)
        assert gpu_proof.main(["--out", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "--device torch-cpu" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("quick", [False, True])
def test_every_stage_of_the_proofs_exists(tmp_path, quick):
    """Their functions, and the tests that they name; their arguments fit, after their way through JSON."""
    every = [
        *proof_cpu.stages(quick=quick, llama=None),
        *gpu_proof.stages(tmp_path, kind="cuda", quick=quick),
        *gpu_proof.stages(tmp_path, kind="torch-cpu", quick=quick),
    ]
    for stage in every:
        module, _, name = stage.run.partition(":")
        function = getattr(importlib.import_module(module), name)
        inspect.signature(function).bind(None, **json.loads(json.dumps(dict(stage.arguments))))
        for path in stage.arguments.get("paths", ()):
            assert (ROOT / path).exists()


def test_thread_counts_double_up_to_all():
    """1, 2, 4 and so on, and the number of processors whatever it is."""
    assert thread_counts(1) == [1]
    assert thread_counts(2) == [1, 2]
    assert thread_counts(6) == [1, 2, 4, 6]
    assert thread_counts(8) == [1, 2, 4, 8]


def test_reasons_do_not_tell_the_place(tmp_path):
    """Folders of the machine and of its user are left out."""
    assert without_place(f"at {ROOT}/benchmarks") == "at ./benchmarks"
    with scratch_folder(tmp_path) as folder:
        assert folder.is_dir()
    assert not folder.exists()


@pytest.mark.parametrize("way", device_large.WAYS)
@pytest.mark.parametrize("is_able", [True, False])
def test_prompts_are_streamed_in_one_way_alone(way, is_able):
    """Elsewhere they would be chosen over what is timed; and what can not be streamed is not counted."""
    device = SimpleNamespace(is_able=is_able)
    is_streamed = way == "streamed" and is_able
    with device_large._way(way) as num_streamed:
        assert StreamedDevice.takes(device, 16) == is_streamed
        assert num_streamed() == is_streamed
