"""Tables for people: what a model consists of, where its experts are, how busy each lane was and how
good the schedule.

Turns facts into rich tables; computes nothing but sums, and reads nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from rich import box
from rich.table import Table
from rich.text import Text

from thermocline.cli.console import without_controls
from thermocline.traces.lanes import WORK_LANES
from thermocline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from thermocline.config import HotDevice
    from thermocline.costmodel.machine_speeds import MachineSpeeds, RowCosts
    from thermocline.experts.heat import LayerUse
    from thermocline.experts.placement.placement import Placement
    from thermocline.experts.placement.planner import Plan
    from thermocline.models.footprint import Footprint, FormatShare
    from thermocline.models.sizes import ModelSizes
    from thermocline.traces.overlap import OverlapSummary
    from thermocline.traces.schedule import PartBound, Schedule

# What fits on a screen.
_MAX_ROWS: Final = 12
_MAX_PARTS: Final = 5


def facts_table(title: str, facts: Iterable[tuple[str, str]]) -> Table:
    """Return names and values in two columns."""
    table = Table(title=_plain(title), title_justify="left", title_style="bold", box=None)
    table.show_header = False
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, _plain(value))
    return table


def formats_table(formats: Iterable[FormatShare]) -> Table:
    """Return which tensors are stored how."""
    table = _table("What is stored how")
    table.add_column("role")
    table.add_column("format")
    table.add_column("tensors", justify="right")
    table.add_column("size", justify="right")
    for share in formats:
        row = (share.role, share.format, str(share.num_tensors), format_bytes(share.total_bytes))
        table.add_row(*row)
    return table


def placement_table(footprint: Footprint, placement: Placement, hot_device: HotDevice) -> Table:
    """Return what lies and computes where, and why."""
    hot_bytes = sum(
        len(hot) * nbytes for hot, nbytes in zip(placement.hot, footprint.expert_bytes, strict=True)
    )
    table = _table("Where everything is")
    table.add_column("part")
    table.add_column("experts", justify="right")
    table.add_column("size", justify="right")
    table.add_column("where", overflow="fold")
    table.add_column("why", overflow="fold")
    trunk_size = format_bytes(footprint.trunk_bytes)
    table.add_row("trunk", "", trunk_size, "CPU", "every token needs it")
    if hot_device != "none":
        where = "CPU" if hot_device == "cpu" else f"{hot_device} device"
        why = f"--hot-device {hot_device}"
        count = str(placement.num_hot)
        table.add_row("hot experts", count, format_bytes(hot_bytes), where, why)
    cold_size = format_bytes(footprint.experts_bytes - hot_bytes)
    table.add_row(
        "cold experts",
        str(placement.num_cold),
        cold_size,
        "CPU",
        "from the mapped file",
    )
    return table


def simulation_table(rows: Iterable[Sequence[str]]) -> Table:
    """Return what replayed routing takes; rows: routing, name, prompt and answer speed, hits, bytes."""
    table = _table("Routing, replayed")
    table.add_column("routing", no_wrap=True)
    table.add_column("experts", no_wrap=True)
    for name in ("prompt tok/s", "answer tok/s", "found there", "copied"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def plan_table(name: str, sizes: ModelSizes, plan: Plan) -> Table:
    """Return what would lie on the device and what on the host."""
    table = _table(f"Where {name} would be")
    table.add_column("part")
    table.add_column("device", justify="right")
    table.add_column("host", justify="right")
    table.add_column("of which on the device", justify="right")
    experts = plan.hot_expert_bytes
    num_routed = sizes.num_experts * sum(layer.expert > 0 for layer in sizes.layers)
    kv = plan.kv_bytes + plan.host_kv_bytes
    lent = plan.expert_bytes_kv_empty - plan.expert_bytes_kv_full
    more = f", {format_bytes(lent)} more while the cache is empty" if lent else ""
    rows = (
        (
            "trunk",
            plan.trunk_bytes,
            plan.trunk_bytes + sizes.non_expert - sizes.non_expert_of(plan.part),
            f"{plan.trunk_layers_on_gpu} of {plan.trunk_layers} layers{' and the head' * plan.head_on_device}",
        ),
        ("embedding table", 0, sizes.embedding, ""),
        *(
            [
                (
                    "table of n-grams",
                    0,
                    sizes.ngrams,
                    "a few rows per token",
                )
            ]
            if sizes.ngrams
            else []
        ),
        (
            "keys, values, states"
            if any(layer.state for layer in sizes.layers)
            else "keys and values",
            plan.kv_bytes,
            kv,
            f"{plan.kv_contexts} full contexts" if plan.kv_contexts != 1 else "1 full context",
        ),
        *(
            (
                (
                    "routed experts",
                    experts,
                    sizes.routed,
                    f"{plan.placement.num_hot} of {num_routed} experts{more}",
                ),
                ("slots for uploads", plan.staging_bytes, plan.staging_bytes, ""),
            )
            if num_routed
            else ()
        ),
        ("left free for steps", plan.workspace_bytes, plan.workspace_bytes, ""),
    )
    for part, on_device, total, what in rows:
        table.add_row(part, _size(on_device), _size(total - on_device), what)
    limit = f"of {format_bytes(plan.device_bytes_limit)}"
    table.add_row("in all", _size(plan.device_bytes), _size(plan.host_bytes), limit)
    return table


def speeds_table(title: str, speeds: MachineSpeeds) -> Table:
    """Return each part's speed by the number of rows: bytes of weights per second, times rows."""
    table = _table(title)
    table.add_column("part", overflow="fold")
    rows = sorted({n for costs in _costs(speeds).values() for n in costs.rows})
    for count in rows:
        table.add_column(f"{count} row" + ("s" if count > 1 else ""), justify="right")
    for name, costs in _costs(speeds).items():
        rates = dict(zip(costs.rows, costs.seconds_per_byte, strict=True))
        cells = (f"{n / rates[n] / 1e9:.1f}" if n in rates else "" for n in rows)
        table.add_row(_plain(name), *cells)
    table.caption = "GB of weights per second, times the rows that each is multiplied with"
    return table


def _costs(speeds: MachineSpeeds) -> dict[str, RowCosts]:
    experts = {f"experts ({layout})": costs for layout, costs in speeds.experts.items()}
    trunk = {f"trunk ({kind})": costs for kind, costs in speeds.trunk.items()}
    return experts | trunk | {"head": speeds.head}


def reasons_list(reasons: Iterable[str]) -> Table:
    """Return one reason after the other, longer ones in several lines."""
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(overflow="fold")
    for reason in reasons:
        table.add_row("-", _plain(reason))
    return table


def heat_table(title: str, uses: Sequence[LayerUse | None], num_experts: int) -> Table:
    """Return each layer's most used experts, and how uneven its use is."""
    even_bits = math.log2(num_experts) if num_experts else 0.0
    table = _table(title)
    table.add_column("layer", justify="right")
    table.add_column("most used experts, with their share", overflow="fold")
    table.add_column("top quarter", justify="right", no_wrap=True)
    table.add_column(f"bits of {even_bits:.2f}", justify="right", no_wrap=True)
    for layer, use in enumerate(uses):
        if use is None:
            continue
        top = "  ".join(f"{expert} {share:.1%}" for expert, share in use.top)
        table.add_row(str(layer), top, f"{use.top_quarter_share:.0%}", f"{use.entropy_bits:.2f}")
    return table


def lanes_table(summary: OverlapSummary) -> Table:
    """Return how busy each lane was, threads apart; work lanes have a bar."""
    table = _table("What each lane did")
    table.add_column("lane")
    table.add_column("spans", justify="right")
    table.add_column("busy", justify="right")
    table.add_column("of the time", justify="right")
    table.add_column("", no_wrap=True)
    for busy in summary.tracks:
        bar = Text("=" * round(busy.busy_share * 30), style="cyan")
        table.add_row(
            busy.track.label,
            str(busy.num_spans),
            _milliseconds(busy.busy_ns),
            f"{busy.busy_share:.0%}",
            bar if busy.track.lane in WORK_LANES else "",
        )
    return table


def overlap_table(summary: OverlapSummary) -> Table:
    """Return which work lanes were busy at the same time, the longest first."""
    table = _table("What ran at the same time")
    table.add_column("lanes")
    table.add_column("together", justify="right")
    table.add_column("of the time", justify="right")
    pairs = [
        pair
        for pair in summary.pairs
        if pair.overlap_ns and {pair.first.lane, pair.second.lane} <= WORK_LANES
    ]
    for pair in sorted(pairs, key=lambda pair: -pair.overlap_ns)[:_MAX_ROWS]:
        share = pair.overlap_ns / summary.wall_ns
        names = f"{pair.first.label} + {pair.second.label}"
        table.add_row(names, _milliseconds(pair.overlap_ns), f"{share:.0%}")
    return table


def schedule_table(schedule: Schedule) -> Table:
    """Return how near the run came to the best schedule; of many parts, those that took longest."""
    table = _table("How near to the best schedule")
    table.add_column("of")
    for name in ("took", "busiest", "chain", "efficiency"):
        table.add_column(name, justify="right")
    rows = [("whole trace", schedule.total)]
    rows += [(f"request {part.number}", part.bound) for part in _longest(schedule.requests)]
    rows += [(_chunk_name(schedule, part), part.bound) for part in _longest(schedule.chunks)]
    rows += [(f"layer {part.number}", part.bound) for part in _longest(schedule.layers)]
    for name, bound in rows:
        table.add_row(
            _plain(name),
            _milliseconds(bound.makespan_ns),
            _milliseconds(bound.busiest_ns),
            _milliseconds(bound.chain_ns),
            f"{bound.efficiency:.0%}",
        )
    return table


def path_table(schedule: Schedule) -> Table:
    """Return what the critical path consists of."""
    table = _table("The longest chain of jobs that wait for each other")
    table.add_column("stage")
    for name in ("jobs", "time", "of the chain"):
        table.add_column(name, justify="right")
    for stage in schedule.path_stages:
        share = f"{stage.total_ns / schedule.total.chain_ns:.0%}"
        table.add_row(stage.name, str(stage.num_jobs), _milliseconds(stage.total_ns), share)
    return table


def _longest(parts: Sequence[PartBound]) -> list[PartBound]:
    """Return the parts that took longest, by number; a table of hundreds tells nobody anything."""
    longest = sorted(parts, key=lambda part: -part.bound.makespan_ns)[:_MAX_PARTS]
    return sorted(longest, key=lambda part: part.number)


def _chunk_name(schedule: Schedule, part: PartBound) -> str:
    plan = schedule.plans.get(part.number)
    what = f" ({plan.kind}, {plan.tokens} tokens)" if plan else ""
    return f"chunk {part.number}{what}"


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def _plain(text: str) -> Text:
    return Text(without_controls(text))


def _milliseconds(duration_ns: int) -> str:
    return f"{duration_ns * 1e-6:.1f} ms"
