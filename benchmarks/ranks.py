"""Where do several ranks beat one? A simulation. Usage `python -m benchmarks.ranks [--quick]`.

No rank runs: routing with the statistics of trained routers is replayed by a virtual clock on described machines and
links, which are printed. The same work goes to one rank and to several: decode steps of some requests, and chunks of
prompts. "spread" divides requests among all ranks, which exchange rows in each layer; "workers" leaves
them to one rank, and the others compute experts alone. What is printed is the best way and where the best way changes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from benchmarks.measure import RESULTS, table
from thermocline.models.sizes import LayerSizes
from thermocline.parallel.balance import RankLayout, balance
from thermocline.parallel.expert_map import ExpertMap, linear_map
from thermocline.simulation.described_machine import other_device
from thermocline.simulation.described_ranks import describe_rank
from thermocline.simulation.exchange import Exchange, Link
from thermocline.simulation.generated_routing import GeneratedKind, generate_routing
from thermocline.simulation.ranks import Dispatch, RankSetup, simulate_step
from thermocline.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thermocline.costmodel.machine_speeds import DeviceSpeeds
    from thermocline.messages import ExpertIds
    from thermocline.simulation.ranks import RankCosts

# Of 4-bit weights with some at 6, as files of Q4_K_M have them.
_BITS: Final = 4.85
_SIMULATED_LAYERS: Final = 4
# Simulated, and repeated where there are more; as many others are counted for the balanced map.
_TOKENS: Final = 4096
_RANKS: Final = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Model:
    """Dimensions of a published model; all its layers have routed experts."""

    name: str
    num_layers: int
    hidden: int
    query_width: int
    kv_width: int
    num_experts: int
    num_used: int
    expert_width: int

    @property
    def layer(self) -> LayerSizes:
        """Bytes of one layer."""
        attention = self.hidden * (2 * self.query_width + 2 * self.kv_width)
        expert = 3 * self.hidden * self.expert_width
        return LayerSizes(
            round(attention * _BITS / 8),
            2 * 2 * self.kv_width,
            round(expert * _BITS / 8),
            "Q4_K",
        )

    @property
    def expert_bytes(self) -> int:
        """All routed experts."""
        return self.num_layers * self.num_experts * self.layer.expert


class Machine(NamedTuple):
    """What computes on each rank, and its memory for experts. disk_bytes_per_s: where the others are read."""

    name: str
    speeds: DeviceSpeeds
    memory_bytes: float
    disk_bytes_per_s: float


class Work(NamedTuple):
    """Requests that are computed at once. tokens: of each in this step; num_seen: that each token sees, on average."""

    name: str
    tokens: int
    num_seen: int
    counts: tuple[int, ...]
    """How many requests are tried."""
    shown: tuple[int, ...]
    """How many of them are in the table."""

    def amount(self, count: int) -> str:
        """Return so many of them in words."""
        return f"{count} {self.name if count > 1 else self.name.removesuffix('s')}"

    @property
    def is_prompt(self) -> bool:
        """Whether a request's tokens see the same keys and values."""
        return self.tokens > 1


class Way(NamedTuple):
    """One way to use ranks. is_spread: whether all of them have requests."""

    name: str
    tp: int
    is_spread: bool
    dispatch: Dispatch
    exchange: Exchange
    num_chunks: int


_LEGEND: Final = """Written by `make bench-ranks`. No rank ran: routing with the statistics of trained routers was replayed by a virtual
clock on these machines and links. Figures are speedups over one such machine alone with the same requests. Requests
have 1,024 tokens each and decode one; prompts have 512 tokens each. Ways: "workers" leaves the requests to one rank,
and the others compute experts, by single messages; "single" divides requests among all ranks, with single messages;
"together" does so with collectives; "two chunks" computes one half while the other's rows travel. "Pays from" is the
number of requests from which on the ranks beat one machine, "together from" that from which on collectives beat
single messages; "-" is never."""
_CHOICES_LEGEND: Final = """Eight ranks. Sequence and naive: time of replicas of two ranks each, as a multiple of the leader's. Linear map: time
with neighbouring experts on each rank, as a multiple of that with balanced ones and a copy more per rank."""
SMALL: Final = Model("Qwen3-30B-A3B", 48, 2048, 4096, 512, 128, 8, 768)
LARGE: Final = Model("Qwen3-235B-A22B", 94, 4096, 8192, 512, 128, 8, 1536)
# Reads, multiply-adds, host link (not used), start of a kernel or of the threads.
CPU: Final = Machine("CPU", other_device(60e9, 0.6e12, 60e9, 5e-6), 56e9, 5e9)
GPU: Final = Machine("GPU", other_device(3e12, 300e12, 50e9, 4e-6), 70e9, 50e9)
DECODE: Final = Work("requests", 1, 1024, tuple(2**n for n in range(11)), (1, 8, 64, 512))
PROMPTS: Final = Work("prompts", 512, 256, tuple(2**n for n in range(7)), (1, 8, 64))
LINKS: Final = (
    # By the system's TCP, whose processor time counts.
    Link("10 GbE", 1.15e9, 30e-6, 8e-6, 60e-6),
    # By remote memory access.
    Link("100 GbE", 11.5e9, 5e-6, 2e-6, 20e-6),
    # By kernels on the devices.
    Link("NVLink", 400e9, 2e-6, 0.5e-6, 10e-6),
)
_LEADER, _SEQUENCE, _NAIVE = Dispatch.LEADER, Dispatch.SEQUENCE, Dispatch.NAIVE
_TOGETHER, _SINGLY = Exchange.COLLECTIVE, Exchange.POINT_TO_POINT
SINGLE: Final = (
    Way("workers", 1, False, _LEADER, _SINGLY, 1),
    Way("single", 1, True, _LEADER, _SINGLY, 1),
)
TOGETHER: Final = (
    Way("together", 1, True, _LEADER, _TOGETHER, 1),
    Way("two chunks", 1, True, _LEADER, _TOGETHER, 2),
)
PAIRED: Final = tuple(
    Way(f"tp 2, {dispatch}", 2, True, dispatch, _TOGETHER, 1)
    for dispatch in (_LEADER, _SEQUENCE, _NAIVE)
)
PAIRS: Final = (
    (SMALL, CPU, LINKS[:2]),
    (LARGE, CPU, LINKS[:2]),
    (SMALL, GPU, LINKS[1:]),
    (LARGE, GPU, LINKS[1:]),
)


@cache
def routing(model: Model, num_tokens: int) -> ExpertIds:
    """Return the choices of some tokens, int16 [tokens, layers, K]."""
    trace = generate_routing(
        GeneratedKind.SKEWED,
        num_layers=_SIMULATED_LAYERS,
        num_experts=model.num_experts,
        num_used=model.num_used,
        lengths=[(num_tokens, num_tokens)],
    )
    return trace.requests[0].experts


@cache
def owners(model: Model, num_ranks: int, *, is_balanced: bool) -> ExpertMap:
    """Return the ranks of experts. Balanced: by other tokens of the same routers, with one copy more per rank."""
    if not is_balanced:
        return linear_map(_SIMULATED_LAYERS, model.num_experts, num_ranks)
    seen = routing(model, 2 * _TOKENS)[_TOKENS:]
    layers = range(seen.shape[1])
    counts = [np.bincount(seen[:, n].ravel(), minlength=model.num_experts) for n in layers]
    num_slots = num_ranks * (ceil_div(model.num_experts, num_ranks) + 1)
    placed = balance(np.array(counts, np.float64), RankLayout(num_slots, num_ranks))
    return placed.expert_map(model.num_experts)


def costs(model: Model, machine: Machine, num_ranks: int, *, is_prompt: bool) -> RankCosts:
    """Return what each of so many ranks computes; what their memory together does not hold waits for a disk."""
    absent = max(0.0, 1.0 - num_ranks * machine.memory_bytes / model.expert_bytes)
    wait_s = absent * model.layer.expert / machine.disk_bytes_per_s
    return describe_rank(model.layer, machine.speeds, is_prompt=is_prompt, expert_wait_s=wait_s)


@dataclass(frozen=True, slots=True)
class Case:
    """A model on ranks of one kind. num_ranks 1 is one machine alone."""

    model: Model
    machine: Machine
    link: Link
    num_ranks: int
    is_balanced: bool = True

    def seconds(self, work: Work, count: int, way: Way) -> float:
        """Return what all layers take for so many requests, without embedding and head."""
        model, dp = self.model, self.num_ranks // way.tp
        chosen = np.resize(
            routing(model, 2 * _TOKENS)[:_TOKENS], (count * work.tokens, *_shape(model))
        )
        even = [n * count // dp for n in range(dp + 1)]
        bounds = even if way.is_spread else [0, *[count] * dp]
        parts = [
            chosen[begin * work.tokens : end * work.tokens]
            for begin, end in itertools.pairwise(bounds)
        ]
        setup = RankSetup(
            dp,
            way.tp,
            owners(model, self.num_ranks, is_balanced=self.is_balanced).owner,
            self.link,
            way.dispatch,
            way.exchange,
            model.hidden,
            num_chunks=way.num_chunks,
        )
        priced = costs(model, self.machine, self.num_ranks, is_prompt=work.is_prompt)
        figures = simulate_step(parts, work.num_seen, setup, priced)
        return figures.seconds * model.num_layers / _SIMULATED_LAYERS

    def speedups(self, work: Work, count: int, ways: Sequence[Way]) -> dict[str, float]:
        """Return how many times as fast as one rank alone each way is."""
        alone = replace(self, num_ranks=1).seconds(work, count, TOGETHER[0])
        return {way.name: alone / self.seconds(work, count, way) for way in ways}


def _shape(model: Model) -> tuple[int, int]:
    return _SIMULATED_LAYERS, model.num_used


def best(speedups: Mapping[str, float]) -> tuple[str, float]:
    """Return the fastest way and its speedup."""
    return max(speedups.items(), key=lambda pair: pair[1])


def first(counts: Sequence[int], is_won: Sequence[bool]) -> str:
    """Return the first count from which on all are won, as text; "-" where the last is not."""
    num_won = len(list(itertools.takewhile(bool, reversed(is_won))))
    return f"{counts[-num_won]:,}" if num_won else "-"


def row(case: Case, work: Work) -> list[str]:
    """Return a line of the table: speedups with their way, and from how many requests on which one wins."""
    single = [case.speedups(work, count, SINGLE) for count in work.counts]
    together = [case.speedups(work, count, TOGETHER) for count in work.counts]
    found = {
        count: best(one | other)
        for count, one, other in zip(work.counts, single, together, strict=True)
    }
    cells = [f"{found[count][1]:.2f} {found[count][0]}" for count in work.shown]
    pays = [found[count][1] > 1.0 for count in work.counts]
    is_together = [
        best(other)[1] > best(one)[1] for one, other in zip(single, together, strict=True)
    ]
    return [
        case.link.name,
        str(case.num_ranks),
        *cells,
        first(work.counts, pays),
        first(work.counts, is_together),
    ]


def work_table(model: Model, machine: Machine, links: Sequence[Link], work: Work) -> str:
    """Return the table of one model on one kind of machine."""
    heads = ("link", "ranks", *(work.amount(count) for count in work.shown))
    rows = [
        row(Case(model, machine, link, num_ranks), work) for link in links for num_ranks in _RANKS
    ]
    return table((*heads, "pays from", "together from"), rows)


def choices_table(pairs: Sequence[tuple[Model, Machine, Sequence[Link]]]) -> str:
    """Return what the dispatch, and the map of experts, change: multiples of the leader's time, and of the balanced map's."""
    rows = []
    for model, machine, links in pairs:
        for link in links:
            case = Case(model, machine, link, 8)
            for work, count in ((DECODE, 64), (PROMPTS, 8)):
                leader, sequence, naive = (case.seconds(work, count, way) for way in PAIRED)
                even = replace(case, is_balanced=False).seconds(work, count, TOGETHER[0])
                balanced = case.seconds(work, count, TOGETHER[0])
                cells = (f"{ratio:.2f}" for ratio in (sequence / leader, naive / leader))
                what = f"{model.name}, {machine.name}, {link.name}", work.amount(count)
                rows.append([*what, *cells, f"{even / balanced:.2f}"])
    return table(("", "at once", "sequence", "naive", "linear map"), rows)


def page(pairs: Sequence[tuple[Model, Machine, Sequence[Link]]]) -> str:
    """Return what is assumed, and the tables, as a page."""
    parts = [f"# Simulated ranks\n\n{_LEGEND}", "## What is assumed"]
    rows = [
        [link.name, f"{link.bytes_per_s / 1e9:g} GB/s"]
        + [f"{each * 1e6:g} us" for each in (link.latency_s, link.message_s, link.collective_s)]
        for link in LINKS
    ]
    heads = ("link", "each way", "latency", "sender, per message", "until a collective has begun")
    parts.append(table(heads, rows))
    machines = [
        [
            each.name,
            f"{each.speeds.read_bytes_per_s / 1e9:g} GB/s",
            f"{each.speeds.multiply_adds_per_s / 1e12:g} T/s",
            f"{each.memory_bytes / 1e9:g} GB",
            f"{each.disk_bytes_per_s / 1e9:g} GB/s",
        ]
        for each in (CPU, GPU)
    ]
    heads = ("machine", "reads", "multiply-adds", "room for experts", "reads of other experts")
    parts.append(table(heads, machines))
    for model, machine, links in pairs:
        for work in (DECODE, PROMPTS):
            size = f"{model.expert_bytes / 1e9:.1f} GB of experts"
            parts.append(f"## {model.name} ({size}), {machine.name}, {work.name}")
            parts.append(work_table(model, machine, links, work))
    parts += ["## Dispatch and map", _CHOICES_LEGEND, choices_table(pairs)]
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one model, to try it out")
    parser.add_argument("--out", type=Path, default=RESULTS / "ranks.md")
    options = parser.parse_args(arguments)
    text = page(PAIRS[:1] if options.quick else PAIRS)
    options.out.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
