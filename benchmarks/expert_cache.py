"""What is the expert cache worth, by routing? Usage `python -m benchmarks.expert_cache`.

Three routings of as many tokens: the demo model's real one (questions, prose, pages and programs, in turns), generated
skewed and uniform ones for the same layers and experts. Each is replayed on a described machine by a virtual clock, with
half of the experts' bytes as the device's capacity and links from thin to fast. Beside it plain LRU, the fixed set that
is best in hindsight, and Belady's optimum. No figure depends on how busy this machine is.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from benchmarks.measure import (
    RESULTS,
    ForeignLoad,
    Row,
    describe_machine,
    table,
    verdict,
    write_rows,
)
from benchmarks.routing_source import DEMO
from thermocline import Engine, EngineConfig
from thermocline.config import MemoryConfig, SpeculationConfig
from thermocline.costmodel.expert_costs import ExpertCosts
from thermocline.demo import DEMO_HELD_TEXT_PATH, DEMO_MODEL_PATH
from thermocline.experts.cache.policy import SegmentedLruPolicy
from thermocline.kernels.cache_format import CacheType
from thermocline.messages import RequestOptions, TokenEvent
from thermocline.modelfile.reader import open_model_file
from thermocline.models.registry import read_spec
from thermocline.models.sizes import measure_sizes
from thermocline.sampling.params import SamplingParams
from thermocline.simulation.cache_baselines import (
    PlainLru,
    best_static_set,
    optimal_hit_shares,
)
from thermocline.simulation.generated_routing import GeneratedKind, generate_routing
from thermocline.simulation.replay import DescribedMachine, replay, steps_of
from thermocline.simulation.routing_trace import RoutedRequest, RoutingTrace, read_routing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.models.sizes import LayerSizes, ModelSizes
    from thermocline.simulation.replay import ReplayFigures, ReplayStep

_NAME: Final = "expert_cache"
_ROOT: Final = Path(__file__).parents[1]
_QUESTIONS: Final = _ROOT / "scripts" / "demo_model" / "corpus.txt"
# Texts that stay as they are: figures of today and of next year are of the same routing.
_TEXTS: Final = (
    DEMO_HELD_TEXT_PATH,
    _ROOT / "LICENSE",
    _ROOT / "docs" / "decisions" / "0007-int8-activations.md",
    _ROOT / "docs" / "decisions" / "0008-prompt-arithmetic-in-tiles.md",
)
_CHUNK_TOKENS: Final = 512
# The described machine: a CPU whose kernels read half of what its memory gives, and a device of ten times that
# memory's speed. What is paid per layer is in proportion to the demo's experts, a twentieth of a large model's.
_CPU_BYTES_PER_S: Final = 10e9
_MEMORY_BYTES_PER_S: Final = 20e9
_CPU_WEIGHTS_PER_S: Final = 60e9
_DEVICE_BYTES_PER_S: Final = 200e9
_DEVICE_WEIGHTS_PER_S: Final = 5e12
_LAUNCH_S: Final = 1e-6
_LAYER_S: Final = 20e-6
_WEIGHTS_PER_BYTE: Final = 8 / 4.5
_ROWS: Final = (1, 4, 16, 64, 256)
_LINKS: Final = (1e6, 1e7, 1e8, 3e8, 1e9, 4e9, 12e9, 50e9)
_MAX_LOSS: Final = 1.02
_FAST_LINK: Final = 12e9

_CPU_ONLY: Final = "CPU only"
_STATIC: Final = "best fixed set"
_STATIC_UPLOADS: Final = "best fixed set, with uploads"
_LRU: Final = "plain LRU"
_CACHE: Final = "expert cache"


class Prompt(NamedTuple):
    """What is asked, and how many tokens the answer may have."""

    text: str
    is_question: bool
    max_tokens: int


def prompts(num_rounds: int) -> list[Prompt]:
    """Return rounds of thirty questions, then four beginnings from each text; the same ones every time."""
    draw = random.Random(7)
    lines = _QUESTIONS.read_text("utf-8").splitlines()
    questions = [line[2:] for line in lines if line.startswith("? ") and "{" not in line]
    found = []
    for _ in range(num_rounds):
        found += [Prompt(question, True, 128) for question in draw.sample(questions, 30)]
        for path in _TEXTS:
            text = path.read_text("utf-8")
            starts = [draw.randrange(len(text) - 300) for _ in range(4)]
            found += [Prompt(text[start : start + 250], False, 200) for start in starts]
    return found


async def record(asked: Sequence[Prompt]) -> RoutingTrace:
    """Return the demo model's routing of each prompt and its answer, one request after another."""
    # Rows of wrong guesses choose experts, too.
    config = EngineConfig(
        memory=MemoryConfig(max_full_contexts=1), speculation=SpeculationConfig(drafters="off")
    )
    requests = []
    async with Engine.open(DEMO_MODEL_PATH, config) as engine:
        for number, prompt in enumerate(asked):
            if prompt.is_question:
                ids = await engine.encode_chat([{"role": "user", "content": prompt.text}])
                params = SamplingParams(max_tokens=prompt.max_tokens)
            else:
                ids = await engine.encode(prompt.text)
                params = SamplingParams(max_tokens=prompt.max_tokens, temperature=0.7, seed=number)
            events = engine.events(ids, params, RequestOptions(wants_routing=True))
            requests += [
                RoutedRequest(len(ids), event.routing)
                async for event in events
                if isinstance(event, TokenEvent) and event.routing is not None
            ]
        return RoutingTrace(engine.spec.name, engine.spec.router.num_experts, tuple(requests))


def routings(recorded: RoutingTrace, num_requests: int) -> dict[str, RoutingTrace]:
    """Return the recorded routing, and generated ones of the same layers, experts and first requests' lengths."""
    lengths = [
        (each.num_prompt_tokens, len(each.experts)) for each in recorded.requests[:num_requests]
    ]
    made = {
        kind.value: generate_routing(
            kind,
            num_layers=recorded.num_layers,
            num_experts=recorded.num_experts,
            num_used=recorded.requests[0].experts.shape[2],
            lengths=lengths,
        )
        for kind in GeneratedKind
    }
    return {DEMO: recorded} | made


def demo_sizes() -> ModelSizes:
    """Return the bytes of the demo model's parts."""
    with open_model_file(DEMO_MODEL_PATH) as file:
        return measure_sizes(file.tensors.values(), read_spec(file), CacheType.F16)


def machine(sizes: ModelSizes, link_bytes_per_s: float) -> DescribedMachine:
    """Return the described machine with such a link."""
    row_bytes = 2 * 4 * sizes.hidden_size  # there and back
    taken = _CPU_BYTES_PER_S + link_bytes_per_s - _MEMORY_BYTES_PER_S

    def costs(layer: LayerSizes) -> ExpertCosts:
        weights = layer.expert * _WEIGHTS_PER_BYTE
        return ExpertCosts(
            layer.expert,
            layer.layout,
            _ROWS,
            tuple(
                max(layer.expert / _CPU_BYTES_PER_S, weights * rows / _CPU_WEIGHTS_PER_S)
                for rows in _ROWS
            ),
            tuple(
                max(layer.expert / _DEVICE_BYTES_PER_S, weights * rows / _DEVICE_WEIGHTS_PER_S)
                + rows * row_bytes / link_bytes_per_s
                for rows in _ROWS
            ),
            copy_s=layer.expert / link_bytes_per_s + _LAUNCH_S,
            launch_overhead_s=_LAUNCH_S,
            copy_slowdown=min(0.95, max(0.0, taken) / _CPU_BYTES_PER_S),
        )

    layers = tuple(costs(layer) if layer.expert else None for layer in sizes.layers)
    return DescribedMachine(layers, lambda num_tokens, _: _LAYER_S * max(1.0, num_tokens / 8))


def sides(
    steps: Sequence[ReplayStep], described: DescribedMachine, sizes: ModelSizes, capacity: int
) -> dict[str, ReplayFigures]:
    """Return what each way to use the device gives; the cache and LRU begin with an empty device."""
    layers = described.layers
    best = best_static_set(steps, layers, capacity)
    cache = SegmentedLruPolicy(layers, sizes.num_experts, capacity, num_used=sizes.num_used)
    return {
        _CPU_ONLY: replay(steps, described, None, may_upload=False),
        _STATIC: replay(steps, described, None, placed=best, may_upload=False),
        _STATIC_UPLOADS: replay(steps, described, None, placed=best),
        _LRU: replay(steps, described, PlainLru(layers, capacity)),
        _CACHE: replay(steps, described, cache),
    }


def rows_of(routing: str, link: float, found: dict[str, ReplayFigures]) -> list[Row]:
    """Return each side's speeds and shares as rows of the CSV."""
    case = f"link {link / 1e9:g} GB/s"
    rows = []
    for side, figures in found.items():
        decode = figures.decode
        rows += [
            Row(_NAME, case, side, metric, unit, (value,), figures.reason, routing)
            for metric, unit, value in (
                ("prefill", "tokens/s", figures.prefill.tokens_per_s),
                ("decode", "tokens/s", decode.tokens_per_s),
                ("all", "s", figures.seconds),
                ("decode hits", "share", decode.hit_share),
                ("decode uploads", "share", decode.num_uploads / decode.num_uses),
                ("promotions", "experts", figures.num_promotions),
            )
        ]
    return rows


def checks(
    routing: str, found: dict[float, dict[str, ReplayFigures]], optimum: float
) -> list[tuple[str, bool]]:
    """Return each requirement in words, and whether it holds.

    That the cache is faster than LRU and a fixed set is required where experts are unequal and return; uniform routing
    has nothing that a cache could know. More hits than the best fixed set are required of real routing alone: the
    popularity of generated routing never changes, so that a set known from its end is hard to beat.
    """
    fast = found[_FAST_LINK]
    cache, lru, static = fast[_CACHE], fast[_LRU], fast[_STATIC]
    worst = max(link[_CACHE].seconds / link[_CPU_ONLY].seconds for link in found.values())
    thinnest = found[min(found)][_CACHE]
    gap = optimum - cache.decode.hit_share
    always = [
        (f"the optimum hits {optimum:.1%}: {100 * gap:.1f} points more", gap >= 0),
        (
            f"over any link it takes at most {worst:.4f} of the time of the CPU alone (limit {_MAX_LOSS})",
            worst <= _MAX_LOSS,
        ),
        (
            f"over the thinnest link it copies {thinnest.num_promotions} experts, and says: {thinnest.reason}",
            thinnest.num_promotions == 0 and thinnest.reason != "",
        ),
    ]
    if routing == GeneratedKind.UNIFORM:
        return always
    return [
        (
            f"over 12 GB/s the cache takes {cache.seconds / lru.seconds:.3f} of plain LRU's time, and hits "
            f"{cache.decode.hit_share:.1%} to its {lru.decode.hit_share:.1%}",
            cache.seconds < lru.seconds and cache.decode.hit_share > lru.decode.hit_share,
        ),
        (
            f"it takes {cache.seconds / static.seconds:.3f} of the time of the best fixed set, and hits "
            f"{cache.decode.hit_share:.1%} to its {static.decode.hit_share:.1%}",
            cache.seconds < static.seconds
            and (routing != DEMO or cache.decode.hit_share >= static.decode.hit_share),
        ),
        *always,
    ]


def replay_all(
    routing: str, trace: RoutingTrace, links: Sequence[float]
) -> tuple[list[Row], list[tuple[str, bool]]]:
    """Replay one routing over every link and print its table; return rows and requirements."""
    sizes = demo_sizes()
    capacity = sizes.routed // 2
    steps = list(steps_of(trace, _CHUNK_TOKENS))
    found = {link: sides(steps, machine(sizes, link), sizes, capacity) for link in links}
    _, optimum = optimal_hit_shares(steps, machine(sizes, _FAST_LINK).layers, capacity)
    lines = [
        [
            f"{link / 1e9:g} GB/s",
            routing,
            *(f"{figures.decode.tokens_per_s:.0f}" for figures in of.values()),
            str(of[_CACHE].num_promotions),
            f"{of[_CACHE].decode.hit_share:.1%}",
        ]
        for link, of in found.items()
    ]
    print(table(["link", "routing", *found[links[0]], "promotions", "hits"], lines), end="\n\n")
    rows = [row for link, of in found.items() for row in rows_of(routing, link, of)]
    rows.append(
        Row(_NAME, "any link", "offline optimum", "decode hits", "share", (optimum,), "", routing)
    )
    return rows, checks(routing, found, optimum)


def main(argv: Sequence[str] | None = None) -> int:
    """Replay every routing over every link, append CSV rows. Returns 1 if a requirement is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--trace", type=Path, help="routing recorded before, instead of recording it"
    )
    parser.add_argument("--keep", type=Path, help="where to write the routing that was recorded")
    parser.add_argument("--quick", action="store_true", help="a few requests, two links")
    parser.add_argument("--out", type=Path, default=RESULTS / "expert-cache.csv")
    options = parser.parse_args(argv)
    asked = prompts(1)[24:36] if options.quick else prompts(2)
    trace = read_routing(options.trace) if options.trace else asyncio.run(record(asked))
    if options.keep:
        trace.write(options.keep)
    links = (_LINKS[0], _FAST_LINK) if options.quick else _LINKS
    num_requests = 4 if options.quick else len(trace.requests)
    num_decoded = sum(len(each.experts) - each.num_prompt_tokens for each in trace.requests)
    print(f"{len(trace.requests)} requests, {num_decoded} decoded tokens\n")
    rows, judged = [], []
    facts = describe_machine(1)
    with ForeignLoad() as load:
        for routing, of in routings(trace, num_requests).items():
            more, required = replay_all(routing, of, links)
            rows += more
            judged += [(f"{routing}: {text}", holds) for text, holds in required]
    write_rows(
        options.out, rows, facts | {"foreign_cores": f"{load.cores:.2f}", "clock": "virtual"}
    )
    for text, passed in judged:
        print(f"{verdict(passed)}  {text}")
    return 0 if all(passed for _, passed in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
