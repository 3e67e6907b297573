"""`thermocline plan`: what would lie on the device and on the CPU, and why, from a file's header alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from thermocline.cli.console import echo_json, show
from thermocline.cli.device_plan import plan_device, planned_device, plans_device
from thermocline.cli.drafting_cost import DraftingCost, drafting_cost
from thermocline.cli.llama_flags import names
from thermocline.cli.model_name import has_header_alone, hub_model
from thermocline.cli.options import (
    checked_size,
    engine_option,
    heat_file_option,
    json_option,
    model_argument,
)
from thermocline.cli.rank_plan import plan_ranks
from thermocline.cli.session import model_path
from thermocline.cli.sources import SettingOption
from thermocline.cli.worker_plan import held_by_workers, in_words
from thermocline.config import (
    CacheChoice,
    EngineConfig,
    ExpertExchange,
    ExpertMapKind,
    HotDevice,
    MemoryConfig,
    ParallelConfig,
    PlacementConfig,
    RemoteConfig,
    SchedulerConfig,
    SpeculationConfig,
    TrunkDevice,
    WorkerPayload,
)
from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from thermocline.cli.estimates import Estimates
    from thermocline.cli.rank_plan import RankPlan
    from thermocline.cli.simulation import Simulation
    from thermocline.experts.placement.planner import DeviceMemory, Plan
    from thermocline.models.prompt_limits import PromptLimits
    from thermocline.models.sizes import ModelSizes
    from thermocline.models.spec import ModelSpec

_MAX_SPREAD = 4


@click.command()
@model_argument()
@hub_model(header_is_enough=True)
@click.option(
    "--vram",
    callback=checked_size,
    metavar="SIZE",
    help="Device memory, as 12GiB (default: what is free there).",
)
@click.option(
    "--device-memory",
    cls=SettingOption,
    callback=checked_size,
    metavar="SIZE",
    help="Memory that may be taken of the device, as for serve (default: all that is free).",
)
@click.option(
    "--trunk-device",
    cls=SettingOption,
    type=click.Choice(get_args(TrunkDevice)),
    default="auto",
    show_default=True,
    help="Where non-expert weights would be, as for serve.",
)
@click.option(
    "--hot-device",
    cls=SettingOption,
    type=click.Choice(["auto", "none", "cuda", "torch-cpu"]),
    default="auto",
    show_default=True,
    help="Where hot experts would be, as for serve.",
)
@click.option(
    "--max-requests",
    cls=SettingOption,
    type=click.IntRange(1),
    default=SchedulerConfig().max_requests,
    show_default=True,
    help="Requests that are accepted at a time, as for serve.",
)
@click.option(
    "--ram",
    callback=checked_size,
    metavar="SIZE",
    help="Memory for the rest (default: what is free).",
)
@click.option(
    *names("--ctx"),
    "ctx",
    type=click.IntRange(1),
    help="Tokens of context (default: as run has it).",
)
@click.option(
    *names("--kv-type"),
    "--kv-dtype",
    "kv_type",
    cls=SettingOption,
    type=click.Choice(["f32", "f16", "bf16", "q8_0"]),
    default="f16",
    show_default=True,
    help="What a cached number is.",
)
@engine_option("--cache-spill")
@engine_option("--prefill-chunk")
@engine_option("--prompt-chunks")
@click.option(
    "--auto/--no-auto",
    "is_auto",
    default=True,
    show_default=True,
    help="Choose what no flag decides; without it only what flags ask for goes to the device.",
)
@engine_option("--speculate")
@engine_option("--draft-model")
@engine_option("--gpu-layers")
@engine_option("--override-tensor")
@click.option(
    "--expert-budget",
    cls=SettingOption,
    callback=checked_size,
    metavar="SIZE",
    help="Device memory for experts, at most.",
)
@engine_option("--cpu-moe")
@engine_option("--n-cpu-moe")
@click.option(
    "--hot",
    cls=SettingOption,
    multiple=True,
    metavar="EXPERTS",
    help="Experts that go to the device: 3:17 is expert 17 of layer 3, 3:16-31 a range, 3 or 3-7 whole layers.",
)
@click.option(
    "--cold",
    cls=SettingOption,
    multiple=True,
    metavar="EXPERTS",
    help="Experts that stay on the CPU, likewise.",
)
@click.option(
    "--expert-worker",
    "workers",
    cls=SettingOption,
    multiple=True,
    metavar="WORKER",
    help="A worker that would compute experts, as for run; may be given several times.",
)
@click.option(
    "--worker-share",
    cls=SettingOption,
    type=click.FloatRange(0.0, 1.0),
    help="Share of each layer's experts, of those not on the device, that workers hold (default: all).",
)
@click.option(
    "--on-worker-failure",
    "on_failure",
    cls=SettingOption,
    type=click.Choice(["cpu", "error"]),
    default="cpu",
    show_default=True,
    help="What becomes of what a worker does not answer.",
)
@click.option(
    "--ep",
    "ranks",
    metavar="DP|DPxTP",
    help="Show what each rank would have under torchrun, with its workspace term by term.",
)
@engine_option("--expert-exchange")
@engine_option("--expert-payload")
@engine_option("--expert-map")
@click.option(
    "--heat",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="How often experts are used: a timeline of --trace, or what `thermocline heat --export` wrote "
    "(default: what is known of the model).",
)
@heat_file_option
@click.option("--no-heat", is_flag=True, help="Plan as if nothing were known of the experts' use.")
@click.option(
    "--measure/--no-measure",
    "may_measure",
    default=True,
    show_default=True,
    help="Measure this machine with this file for the estimates, if that was not done before.",
)
@click.option(
    "--simulate",
    "routing",
    metavar="FILE|uniform|skewed",
    help="Replay the routing that run --routing recorded there, or generated one, and show what an expert cache would "
    "bring.",
)
@click.option(
    "--pcie", default="16GB/s", show_default=True, metavar="RATE", help="Its link to the device."
)
@click.option("--ram-speed", metavar="RATE", help="Its memory (default: as measured here).")
@click.option(
    "--vram-speed",
    default="400GB/s",
    show_default=True,
    metavar="RATE",
    help="The memory of its device.",
)
@json_option
def plan(  # noqa: PLR0913 - one per flag
    model: str | None,
    vram: str | None,
    device_memory: str | None,
    trunk_device: TrunkDevice,
    hot_device: HotDevice,
    max_requests: int,
    ram: str | None,
    ctx: int | None,
    kv_type: CacheChoice,
    memory_spill_bytes: int | None,
    scheduler_prefill_chunk_tokens: int,
    scheduler_max_prompt_chunks: int,
    is_auto: bool,
    speculation_drafters: str,
    speculation_draft_model: str | None,
    placement_gpu_layers: int | None,
    placement_override_tensor: tuple[str, ...],
    expert_budget: str | None,
    placement_cpu_moe: bool,
    placement_n_cpu_moe: int,
    hot: tuple[str, ...],
    cold: tuple[str, ...],
    workers: tuple[str, ...],
    worker_share: float | None,
    on_failure: str,
    ranks: str | None,
    parallel_exchange: ExpertExchange,
    parallel_payload: WorkerPayload,
    parallel_expert_map: ExpertMapKind,
    heat: Path | None,
    heat_file: str | None,
    no_heat: bool,
    may_measure: bool,
    routing: str | None,
    pcie: str,
    ram_speed: str | None,
    vram_speed: str,
    as_json: bool,
) -> None:
    """Show what would lie on a device and what on the CPU, and why.

    \b
    Examples:
      thermocline plan model.gguf --vram 12GiB
      thermocline plan -hf Qwen/Qwen3-30B-A3B-GGUF --vram 12GiB     before it is downloaded
      thermocline plan model.gguf --vram 8GiB --ctx 16384 --kv-type q8_0
      thermocline plan model.gguf --vram 24GiB --n-cpu-moe 4 --cold 40-47 --json
      thermocline plan model.gguf --vram 6GiB --gpu-layers 20 -ot 'ffn_.*_exps=CPU'
      thermocline plan model.gguf --vram 8GiB --simulate routing.npz --pcie 12GB/s --ram-speed 60GB/s

    Where things go follows from the header of the file, by the rule that serve and run follow: --vram 12GiB is the plan
    of serve --device-memory 12GiB on a GPU. How fast that would be is estimated from what
    `thermocline doctor` measures, once, in some seconds; --no-measure leaves that out. A plan is for any machine: give
    --vram and --ram for another one than this. Flags compose: what they ask for comes first, the rest
    is chosen, and what does not fit stays on the CPU, with a reason.
    """
    from thermocline.cli.estimates import make_estimates, speeds_for
    from thermocline.cli.expert_use import expert_use
    from thermocline.cli.simulation import DescribedSpeeds, simulate
    from thermocline.experts.placement.wish import device_needs
    from thermocline.modelfile.reader import open_model_file
    from thermocline.models.cache_size import cache_spec
    from thermocline.models.registry import read_spec
    from thermocline.models.sizes import lasting_bytes

    path, ram_bytes = model_path(model), _host_memory(ram)
    config = EngineConfig(
        memory=MemoryConfig(max_context_tokens=ctx, kv_type=kv_type),
        placement=PlacementConfig(
            trunk_device=trunk_device,
            hot_device=hot_device,
            gpu_layers=placement_gpu_layers,
            override_tensor=placement_override_tensor,
            cpu_moe=placement_cpu_moe,
            n_cpu_moe=placement_n_cpu_moe,
            hot=hot,
            cold=cold,
            expert_budget_bytes=_size(expert_budget),
            device_memory_bytes=_size(device_memory),
        ),
        scheduler=SchedulerConfig(
            prefill_chunk_tokens=scheduler_prefill_chunk_tokens,
            max_prompt_chunks=scheduler_max_prompt_chunks,
            max_requests=max_requests,
        ),
        remote=RemoteConfig(workers=workers),
        speculation=SpeculationConfig(
            drafters=speculation_drafters, draft_model=speculation_draft_model
        ),
        parallel=ParallelConfig(
            exchange=parallel_exchange, payload=parallel_payload, expert_map=parallel_expert_map
        ),
    )
    with open_model_file(path) as file:
        spec = read_spec(file)
        device = planned_device(config.placement, vram)
        limits = _limits(
            config, spec, lasting_bytes(file.tensors.values(), spec), ram_bytes, device
        )
        cache = cache_spec(config, spec, limits)
        needs = device_needs(
            *(file.tensors.values(), spec, cache, limits),
            speculates=config.speculation.drafters != "off",
        )
        files, use = file.paths, expert_use(file, spec, heat, heat_file, no_heat=no_heat)
        drafting = drafting_cost(config, file, spec, cache)
    sizes, num_tokens = needs.sizes, limits.max_context_tokens
    found = _with_spill(
        plan_device(config.placement, needs, device, use.heat, is_auto=is_auto), memory_spill_bytes
    )
    drafting = drafting.beside(found.device_layers)
    held = held_by_workers(sizes, found, workers, worker_share)
    shared = None if ranks is None else plan_ranks(ranks, config, spec, sizes, limits, use.heat)
    speeds = speeds_for(path, files, kv_type, may_measure=may_measure and _has_weights(routing))
    speed = (
        None
        if speeds is None
        else make_estimates(
            sizes, speeds, found, ram_bytes=ram_bytes, chunk_tokens=limits.chunk_tokens, use=use
        )
    )
    simulation = None
    if routing is not None:
        if speeds is None:
            raise ConfigError("--simulate needs this machine's speeds: leave out --no-measure")
        simulation = simulate(
            *(routing, sizes, found, speeds, DescribedSpeeds(pcie, vram_speed, ram_speed)),
            chunk_tokens=limits.chunk_tokens,
            heat=use.heat,
        )
    if as_json:
        fields = _as_json(spec, found, num_tokens, kv_type, ram_bytes) | {
            "estimates": None if speed is None else speed.as_dict(),
            "workers": held and {**asdict(held), "on_failure": on_failure},
            **drafting.described(),
            "ranks": shared and shared.as_dict(),
        }
        if simulation is not None:
            fields["simulation"] = simulation.as_dict()
        echo_json(fields)
        return
    notes = (*in_words(held, on_failure), *_all_lines(shared, speed))
    _show(spec, sizes, found, ram_bytes, drafting, notes)
    if simulation is not None:
        _show_simulation(simulation)


def _limits(
    config: EngineConfig, spec: ModelSpec, tensor_bytes: int, ram_bytes: int, device: DeviceMemory
) -> PromptLimits:
    """Return what the engine would choose here, or on a machine with so much memory."""
    from thermocline.engine.cpu import multiplies_on_tiles
    from thermocline.models.prompt_limits import prompt_limits

    return prompt_limits(
        *(config, spec, tensor_bytes, ram_bytes),
        on_device=plans_device(config.placement, device),
        on_tiles=multiplies_on_tiles(config),
    )


def _with_spill(plan: Plan, num_bytes: int | None) -> Plan:
    """Return the plan of a cache whose second tier has so many bytes of memory. Raises ConfigError."""
    from thermocline.units import format_bytes

    MemoryConfig(spill_bytes=num_bytes)
    if not num_bytes:
        return plan
    return replace(
        plan,
        host_bytes=plan.host_bytes + num_bytes,
        host_kv_bytes=plan.host_kv_bytes + num_bytes,
        reasons=(
            *plan.reasons,
            f"{format_bytes(num_bytes)} of the host's keys and values are for --cache-spill",
        ),
    )


def _all_lines(ranks: RankPlan | None, speed: Estimates | None) -> Iterator[str]:
    """Yield the lines of what was planned of them."""
    for each in (ranks, speed):
        if each is not None:
            yield from each.lines()


def _has_weights(routing: str | None) -> bool:
    """Whether there is more than a header. Raises ConfigError where --simulate, with `routing`, needs it."""
    if has_header_alone() and routing is not None:
        raise ConfigError("--simulate needs the model itself: thermocline pull downloads it")
    return not has_header_alone()


def _size(text: str | None) -> int | None:
    from thermocline.units import parse_bytes

    return None if text is None else parse_bytes(text)


def _host_memory(ram: str | None) -> int:
    from thermocline.prefetch.memory import page_cache_room_bytes

    given = _size(ram)
    return page_cache_room_bytes() if given is None else given


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


def _show(
    spec: ModelSpec,
    sizes: ModelSizes,
    plan: Plan,
    ram_bytes: int,
    drafting: DraftingCost,
    speed: Iterable[str],
) -> None:
    from thermocline.cli.render import plan_table, reasons_list
    from thermocline.units import format_bytes

    needed = plan.host_bytes + drafting.total_bytes
    fits = needed <= ram_bytes
    host = f"{format_bytes(needed)} of {format_bytes(ram_bytes)} free memory"
    reasons = [
        *plan.reasons,
        *drafting.lines(),
        f"the host has {host}"
        + ("" if fits else ": what does not fit is read from disk each time"),
        *speed,
    ]
    spread = f"experts on the device by layer: {_spread(plan)}" if spec.has_experts else ""
    show(plan_table(spec.name, sizes, plan), spread, "")
    show(reasons_list(reasons))


def _show_simulation(simulation: Simulation) -> None:
    from thermocline.cli.render import reasons_list, simulation_table

    show("", simulation_table(simulation.rows()))
    if simulation.reason:
        show(reasons_list([simulation.reason]))


def _spread(plan: Plan) -> str:
    """Return how many experts of how many layers."""
    placement = plan.placement
    counts = Counter(
        len(hot) for layer, hot in enumerate(placement.hot) if layer not in placement.dense_layers
    )
    if len(counts) > _MAX_SPREAD:
        return f"{min(counts)} to {max(counts)}"
    return ", ".join(
        f"{number} in {layers} {'layer' if layers == 1 else 'layers'}"
        for number, layers in sorted(counts.items())
    )
