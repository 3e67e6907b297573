"""`thermocline plan`: what would lie where, and why, from a file's header alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from thermocline.cli.console import echo_json, show
from thermocline.cli.options import json_option, model_argument
from thermocline.cli.session import model_path
from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.experts.planner import DeviceMemory, Plan
    from thermocline.models.sizes import ModelSizes
    from thermocline.models.spec import ModelSpec

_DEFAULT_CONTEXT = 32768
_DEFAULT_CHUNK = 512


@click.command()
@model_argument()
@click.option(
    "--vram", metavar="SIZE", help="Device memory, as 12GiB (default: what is free there)."
)
@click.option("--ram", metavar="SIZE", help="Memory for the rest (default: what is free).")
@click.option("--ctx", type=click.IntRange(1), help="Tokens of context (default: as run has it).")
@click.option(
    "--kv-type",
    type=click.Choice(["f32", "f16", "bf16", "q8_0"]),
    default="f16",
    show_default=True,
    help="What a cached number is.",
)
@click.option(
    "--prefill-chunk",
    type=click.IntRange(1),
    default=_DEFAULT_CHUNK,
    show_default=True,
    help="Prompt tokens that walk through the layers together.",
)
@click.option(
    "--gpu-layers", type=click.IntRange(0), help="Layers whose trunk may be on the device, at most."
)
@click.option("--expert-budget", metavar="SIZE", help="Device memory for experts, at most.")
@click.option("--cpu-moe", is_flag=True, help="Keep every routed expert on the CPU.")
@click.option(
    "--n-cpu-moe",
    type=click.IntRange(0),
    default=0,
    help="Keep the routed experts of the first N layers on the CPU.",
)
@click.option("--hot", multiple=True, metavar="L:E", help="Expert E of layer L to the device.")
@click.option("--cold", multiple=True, metavar="L:E", help="Expert E of layer L to the CPU.")
@click.option(
    "--heat",
    type=click.Path(path_type=Path),
    metavar="TRACE",
    help="A timeline of --trace, whose expert choices say what is used most.",
)
@json_option
def plan(  # noqa: PLR0913 - one per flag
    model: str | None,
    vram: str | None,
    ram: str | None,
    ctx: int | None,
    kv_type: str,
    prefill_chunk: int,
    gpu_layers: int | None,
    expert_budget: str | None,
    cpu_moe: bool,
    n_cpu_moe: int,
    hot: tuple[str, ...],
    cold: tuple[str, ...],
    heat: Path | None,
    as_json: bool,
) -> None:
    """Show what would lie on a device and what on the CPU, and why.

    \b
    Examples:
      thermocline plan model.gguf --vram 12GiB
      thermocline plan model.gguf --vram 8GiB --ctx 16384 --kv-type q8_0
      thermocline plan model.gguf --vram 24GiB --n-cpu-moe 4 --json

    Reads the header of the file only, so that nothing is loaded. A plan is for any machine: give --vram and --ram for another one
    than this.
    """
    from thermocline.config import SchedulerConfig
    from thermocline.experts.planner import Wishes, make_plan
    from thermocline.kernels.cache_format import CacheType
    from thermocline.modelfile.reader import open_model_file
    from thermocline.models.registry import read_spec
    from thermocline.models.sizes import measure_sizes

    with open_model_file(model_path(model)) as file:
        spec = read_spec(file)
        sizes = measure_sizes(
            file.tensors.values(),
            spec,
            CacheType[kv_type.upper()],
            in_flight_tokens=SchedulerConfig().max_prompt_chunks * prefill_chunk,
        )
    num_tokens = _context(ctx, spec)
    wishes = Wishes(
        trunk_layers=gpu_layers,
        expert_bytes=0 if cpu_moe else _size(expert_budget),
        cpu_layers=n_cpu_moe,
        hot=_experts("--hot", hot, sizes),
        cold=_experts("--cold", cold, sizes),
    )
    found = make_plan(
        sizes,
        _device(vram),
        num_tokens=num_tokens,
        chunk_tokens=prefill_chunk,
        wishes=wishes,
        heat=None if heat is None else _heat(heat, sizes),
    )
    ram_bytes = _host_memory(ram)
    if as_json:
        echo_json(_as_json(spec, found, num_tokens, kv_type, ram_bytes))
    else:
        _show(spec, sizes, found, ram_bytes)


def _context(wanted: int | None, spec: ModelSpec) -> int:
    if wanted is None:
        return min(spec.context_length, _DEFAULT_CONTEXT)
    if wanted > spec.context_length:
        raise ConfigError(
            f"--ctx is {wanted}, but the model was trained for {spec.context_length}: choose at most that"
        )
    return wanted


def _size(text: str | None) -> int | None:
    from thermocline.units import parse_bytes

    return None if text is None else parse_bytes(text)


def _device(vram: str | None) -> DeviceMemory:
    from thermocline.experts.planner import DeviceMemory
    from thermocline.kernels.gpu.memory import device_memory

    given = _size(vram)
    if given is not None:
        return DeviceMemory(total=given, free=given)
    total, free = device_memory() or (0, 0)
    return DeviceMemory(total=total, free=free)


def _host_memory(ram: str | None) -> int:
    from thermocline.prefetch.memory import page_cache_room_bytes

    given = _size(ram)
    return page_cache_room_bytes() if given is None else given


def _experts(flag: str, texts: Sequence[str], sizes: ModelSizes) -> frozenset[tuple[int, int]]:
    keys = set()
    for text in texts:
        layer, _, expert = text.partition(":")
        if not (layer.isdecimal() and expert.isdecimal()):
            raise ConfigError(f"{flag} {text!r} is no expert: write layer:expert, as 3:17")
        key = int(layer), int(expert)
        if key[0] >= len(sizes.layers) or key[1] >= sizes.num_experts:
            raise ConfigError(
                f"{flag} {text}: the model has layers 0 to {len(sizes.layers) - 1} of experts 0 to "
                f"{sizes.num_experts - 1}"
            )
        keys.add(key)
    return frozenset(keys)


def _heat(path: Path, sizes: ModelSizes) -> tuple[tuple[int, ...], ...]:
    from thermocline.traces.chrome_reader import read_chrome

    use = read_chrome(path).expert_use
    if use is None:
        raise ConfigError(f"{path} says nothing of experts: record it with run --trace")
    shape = {len(row) for row in use.counts}
    if len(use.counts) != len(sizes.layers) or shape != {sizes.num_experts}:
        raise ConfigError(f"{path} was recorded with another model: its layers or experts differ")
    return use.counts


def _as_json(
    spec: ModelSpec, plan: Plan, num_tokens: int, kv_type: str, ram_bytes: int
) -> dict[str, object]:
    fields = asdict(plan)
    placement = fields.pop("placement")
    return {
        "model": spec.name,
        "architecture": spec.architecture,
        "context_tokens": num_tokens,
        "kv_type": kv_type,
        "host_bytes_limit": ram_bytes,
        "device_bytes": plan.device_bytes,
        **fields,
        "hot_experts": placement["hot"],
    }


def _show(spec: ModelSpec, sizes: ModelSizes, plan: Plan, ram_bytes: int) -> None:
    from thermocline.cli.render import plan_table
    from thermocline.units import format_bytes

    fits = plan.host_bytes <= ram_bytes
    host = f"{format_bytes(plan.host_bytes)} of {format_bytes(ram_bytes)} free memory"
    reasons = [
        *plan.reasons,
        f"the host has {host}"
        + ("" if fits else ": what does not fit is read from disk each time"),
    ]
    hot = Counter(len(layer) for layer in plan.placement.hot)
    spread = ", ".join(f"{count} x {num_hot}" for num_hot, count in sorted(hot.items()))
    show(plan_table(spec.name, sizes, plan), f"hot experts by layer: {spread}", "", *reasons)
