"""Which experts could have been known beforehand: predictions of runs, beside recency and the offline optimum.

A run is what `cold_side` answers. Knows no engine.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.measure import Row, table

if TYPE_CHECKING:
    from collections.abc import Sequence


def foresight(
    benchmark: str, case: str, runs: Sequence[dict[str, Any]], room: int, routing: str
) -> list[Row]:
    """Print how well decoding was predicted; return it as rows, for each layer the median of the runs.

    runs: of one model and prompt. room: experts that a cache of the two bounds holds. A layer whose selections came too
    late to be scored is left out.
    """
    layers = _medians(runs)
    if not layers:
        print(f"{case}, {routing}: nothing was scored, since this machine was too busy")
        return []
    lines = [
        (str(number), routing, f"{selected:.0f}", *(f"{value:.0%}" for value in values))
        for number, (selected, *values) in layers.items()
    ]
    header = ("layer", "routing", "selected", "recall", "precision", "recency alone")
    print("", table(header, lines), sep="\n")
    last = runs[-1]
    hits, late, misses = last["found"]
    selected = sum(len(experts) for _, experts in last["selections"])
    best = 1 - offline_misses(last["selections"], room) / selected
    recent = 1 - recent_misses(last["selections"], room) / selected
    print(
        f"selected experts: {hits} in memory, {late} on their way, {misses} unasked; "
        f"{last['wasted_bytes'] / 1e9:.2f} GB read in vain\n"
        f"of decode's {selected}, from nothing and with room for {room}: the offline optimum finds {best:.0%} there, "
        f"least recently used {recent:.0%}\n"
    )
    _, recall, precision, recency = (tuple(each) for each in zip(*layers.values(), strict=True))
    note = f"room for {room} experts"
    by_layer = f"{case}, by layer"
    return [
        Row(benchmark, by_layer, "router, ahead", "recall", "share", recall, "", routing),
        Row(benchmark, by_layer, "router, ahead", "precision", "share", precision, "", routing),
        Row(benchmark, by_layer, "recently used", "recall", "share", recency, "", routing),
        Row(benchmark, case, "offline optimum", "hits", "share", (best,), note, routing),
        Row(benchmark, case, "least recently used", "hits", "share", (recent,), note, routing),
    ]


def _medians(runs: Sequence[dict[str, Any]]) -> dict[int, tuple[float, ...]]:
    """Return selected, recall, precision and the recall of recency of each layer that selects."""
    found = {}
    for number, of_runs in enumerate(zip(*(run["layers"] for run in runs), strict=True)):
        values = tuple(statistics.median(each) for each in zip(*of_runs, strict=True))
        if values[0]:
            found[number] = values
    return found


def offline_misses(selections: Sequence[tuple[int, Sequence[int]]], room: int) -> int:
    """Return how many experts must be read by one who knows the future, with room for `room` experts.

    Belady's rule from an empty cache: what is wanted furthest in the future goes. Experts of one layer and
    token are wanted at once.
    """
    uses: dict[tuple[int, int], list[int]] = {}
    for step, (layer, experts) in enumerate(selections):
        for expert in experts:
            uses.setdefault((layer, expert), []).append(step)
    held: dict[tuple[int, int], None] = {}
    misses = 0

    def next_use(key: tuple[int, int], step: int) -> float:
        return next((use for use in uses[key] if use > step), float("inf"))

    for step, (layer, experts) in enumerate(selections):
        wanted = {(layer, expert) for expert in experts}
        new = wanted - held.keys()
        misses += len(new)
        while held.keys() - wanted and len(held) + len(new) > room:
            del held[max(held.keys() - wanted, key=lambda key: next_use(key, step))]
        held.update(dict.fromkeys(new))
    return misses


def recent_misses(selections: Sequence[tuple[int, Sequence[int]]], room: int) -> int:
    """Return how many experts a least-recently-used cache reads, from an empty one."""
    held: dict[tuple[int, int], None] = {}
    misses = 0
    for layer, experts in selections:
        for expert in experts:
            if (layer, expert) in held:
                del held[layer, expert]
            else:
                misses += 1
            held[layer, expert] = None
        while len(held) > room:
            del held[next(iter(held))]
    return misses
