"""`thermocline doctor`: what this machine reaches with a model file, and what bounds it there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from thermocline.cli.console import Progress, echo_json, show
from thermocline.cli.model_name import hub_model
from thermocline.cli.options import json_option, model_argument
from thermocline.cli.session import model_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thermocline.costmodel.cost_model import Estimate
    from thermocline.costmodel.machine_speeds import MachineSpeeds
    from thermocline.costmodel.roofline import PhaseLoad
    from thermocline.machine import MachineFacts
    from thermocline.models.footprint import Footprint

_PROMPT_TOKENS = 512


@click.command()
@model_argument()
@hub_model()
@click.option("--again", is_flag=True, help="Measure again, whatever was measured before.")
@json_option
def doctor(model: str | None, again: bool, as_json: bool) -> None:
    """Show how fast this machine is with a model, and why.

    \b
    Examples:
      thermocline doctor
      thermocline doctor model.gguf
      thermocline doctor model.gguf --again --json

    Measures for some seconds the first time, and keeps what it found for this machine and this file.
    Close other programs first: what they take is missing here. The estimates are for the CPU, with the
    whole file in memory; `thermocline plan` knows of devices and of less memory.
    """
    from thermocline.calibration.calibrate import machine_speeds
    from thermocline.config import CpuConfig
    from thermocline.costmodel.cost_model import Phase, Workload, estimate
    from thermocline.kernels.cache_format import CacheType
    from thermocline.machine import machine_facts
    from thermocline.modelfile.reader import open_model_file
    from thermocline.models.footprint import decoder_tensors, measure_footprint
    from thermocline.models.registry import read_spec
    from thermocline.models.sizes import measure_sizes

    path = model_path(model)
    with Progress() as progress:
        progress.say("measuring this machine with this file")
        speeds = machine_speeds(path, CpuConfig(), again=again)
    with open_model_file(path) as file:
        spec = read_spec(file)
        sizes = measure_sizes(file.tensors.values(), spec, CacheType.F16)
        tensors = decoder_tensors(file.tensors.values(), spec.num_layers)
        footprint = measure_footprint(tensors, spec.router)
    works = (Workload(Phase.PREFILL, _PROMPT_TOKENS), Workload(Phase.DECODE, 1))
    estimates = tuple(estimate(sizes, speeds, None, work) for work in works)
    loads = _loads(speeds, footprint, estimates)
    machine = machine_facts()
    if as_json:
        echo_json(_as_json(spec.name, speeds, estimates, loads, machine))
    else:
        _show(spec.name, speeds, estimates, loads, machine)


def _loads(
    speeds: MachineSpeeds, footprint: Footprint, estimates: tuple[Estimate, ...]
) -> tuple[PhaseLoad, ...]:
    from thermocline.costmodel.roofline import decode_load, prefill_load
    from thermocline.kernels.machine_limits import MachineLimits

    limits = MachineLimits(speeds.read_bytes_per_s, speeds.multiply_adds_per_s, sample_bytes=0)
    prefill, decode = (each.tokens_per_s for each in estimates)
    return (
        prefill_load(footprint, limits, prefill, _PROMPT_TOKENS, _PROMPT_TOKENS),
        decode_load(footprint, limits, decode),
    )


def _as_json(
    name: str,
    speeds: MachineSpeeds,
    estimates: tuple[Estimate, ...],
    loads: tuple[PhaseLoad, ...],
    machine: MachineFacts,
) -> dict[str, object]:
    from dataclasses import asdict

    return {
        "model": name,
        "speeds": json.loads(speeds.to_json()),
        "estimates": {each.phase.value: asdict(each) for each in estimates},
        "roofline": [asdict(load) | {"bound": load.bound} for load in loads],
        "machine": machine.as_dict(),
    }


def _show(
    name: str,
    speeds: MachineSpeeds,
    estimates: tuple[Estimate, ...],
    loads: tuple[PhaseLoad, ...],
    machine: MachineFacts,
) -> None:
    from thermocline.cli.render import facts_table, speeds_table

    show(speeds_table(f"What this machine reaches with {name}", speeds))
    rows = [(f"{each.phase.value} estimate", str(each)) for each in estimates]
    rows += [(f"{load.phase} roofline", str(load)) for load in loads]
    rows += list(_facts(speeds, machine))
    show(facts_table("What that means", rows))


def _facts(speeds: MachineSpeeds, machine: MachineFacts) -> Iterator[tuple[str, str]]:
    from thermocline.units import format_bytes

    yield (
        "limits",
        f"{speeds.read_bytes_per_s / 1e9:.1f} GB/s from memory, "
        f"{speeds.multiply_adds_per_s / 1e9:.0f} G multiply-adds/s",
    )
    if speeds.disk is None:
        yield "disk", "not measured: the file's pages stay in memory"
    else:
        disk = speeds.disk
        yield (
            "disk",
            f"{disk.sequential_bytes_per_s / 1e9:.2f} GB/s in order, "
            f"{disk.expert_bytes_per_s / 1e9:.2f} by a token's experts",
        )
    device = speeds.device
    if device is None:
        yield "device", "none"
    else:
        yield (
            device.name,
            f"{device.read_bytes_per_s / 1e9:.0f} GB/s from its memory, copies to it "
            f"{device.pinned_to_device_bytes_per_s / 1e9:.1f} GB/s from pinned memory, "
            f"{device.pageable_to_device_bytes_per_s / 1e9:.1f} from other",
        )
    yield "bookkeeping", f"{speeds.step_s * 1e3:.2f} ms per step"
    yield "processor", f"{machine.cpu}, {speeds.threads} threads"
    yield "memory", format_bytes(machine.memory_bytes)
