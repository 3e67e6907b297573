"""`thermocline doctor`, and the estimates of `thermocline plan` that come from what it measured."""

from __future__ import annotations

import json

import pytest

from tests.support.planning import plan_of
from tests.support.speeds import DEVICE, DISK, speeds
from thermocline.calibration import calibrate as calibration
from thermocline.cli.estimates import make_estimates
from thermocline.cli.expert_use import KnownUse
from thermocline.costmodel.machine_speeds import RowCosts, parse_speeds
from thermocline.models.sizes import LayerSizes, ModelSizes

GB = 10**9
SIZES = ModelSizes((LayerSizes(GB // 10, 8, GB // 100, "q4"),) * 2, 10, GB // 10, 8, 2, 64)


def refuse(*args, **flags):
    raise AssertionError("measured again")


@pytest.mark.slow
def test_doctor_measures_once_and_plan_uses_it(toy, invoke, measuring, monkeypatch):
    """The first call measures, later ones and plans find it; --again does not."""
    found = json.loads(invoke("doctor", toy, "--json").stdout)
    measured = parse_speeds(json.dumps(found["speeds"]))
    assert measured.read_bytes_per_s > 0
    assert found["estimates"]["decode"]["tokens_per_s"] > 0
    assert {load["phase"] for load in found["roofline"]} == {"prefill", "decode"}
    assert found["machine"]["num_usable_cores"] >= 1
    monkeypatch.setattr(calibration, "calibrate", refuse)
    again = json.loads(invoke("doctor", toy, "--json").stdout)
    assert again["speeds"] == found["speeds"]
    plan = json.loads(invoke("plan", toy, "--json", "--vram", "0B").stdout)
    assert plan["estimates"]["prefill"]["tokens_per_s"] > 0
    assert not plan["estimates"]["on_cpu_alone"]
    with pytest.raises(AssertionError, match="measured again"):
        invoke("doctor", toy, "--again")


def test_doctor_shows_speeds_limits_and_estimates(toy, invoke, measuring, monkeypatch):
    """People get a row for each part, what bounds the machine, and what was not measured."""
    costs = RowCosts((1, 16), (1e-10, 2e-10))
    layout = "ffn_down_exps:F32 ffn_gate_exps:F32 ffn_up_exps:F32"
    for device, disk, says in ((None, None, "not measured"), (DEVICE, DISK, "1.00 GB/s in order")):
        known = speeds(experts={layout: costs}, device=device, disk=disk)
        monkeypatch.setattr(calibration, "calibrate", lambda *args, known=known: known)
        page = " ".join(invoke("doctor", toy, "--again").stdout.split())
        parts = ("trunk (attention)", "head", "10.0 GB/s from memory", "bound by", says)
        assert all(part in page for part in parts), page


@pytest.mark.slow
def test_a_plan_without_measuring_has_no_estimates(toy, invoke, measuring, monkeypatch):
    """Nothing is known yet, and --no-measure leaves it so."""
    monkeypatch.setattr(calibration, "calibrate", refuse)
    plan = json.loads(invoke("plan", toy, "--json", "--no-measure").stdout)
    assert plan["estimates"] is None
    with pytest.raises(AssertionError, match="measured again"):
        invoke("plan", toy, "--json")


def estimates(known, vram, ram):
    plan = plan_of(SIZES, vram, num_tokens=64)
    return make_estimates(SIZES, known, plan, ram_bytes=ram, chunk_tokens=16, use=KnownUse())


def test_estimates_say_what_they_leave_out():
    """A device of unknown speed, and a disk that was not measured."""
    known = speeds()
    assert estimates(known, 0, 9 * GB).lines()[0].startswith("estimate: prefill")
    assert "CPU alone" in estimates(known, 9 * GB, 9 * GB).lines()[1]
    assert "reads from disk" in estimates(known, 0, GB // 10).lines()[1]


def test_less_memory_and_a_device_change_the_estimates():
    """Experts on disk are slower than in memory, and on a device faster."""
    known = speeds(disk=DISK, device=DEVICE)
    on_disk, on_cpu, on_device = (
        estimates(known, vram, ram).decode.tokens_per_s
        for vram, ram in ((0, GB // 3), (0, 9 * GB), (9 * GB, 9 * GB))
    )
    assert on_disk < on_cpu < on_device
    assert estimates(known, 9 * GB, 9 * GB).as_dict()["decode"]["bound"] == "device"
