"""Which figures README.md and docs/benchmarks.md quote: one entry per table or sentence, one line per row of a table.

An entry says which file, which rows of a run, and how they are shown. Knows neither how runs are chosen nor the pages
around the figures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from benchmarks.result_rows import NOT_MEASURED, Over, Pick
from benchmarks.sides import every_setting

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a table. file: below docs/results; cells: format strings over `picks`, whose rows are all of one run.

    needs: rows that the run has to have besides, or it is not quoted.
    """

    label: str
    file: str
    picks: Mapping[str, Pick | Over]
    cells: tuple[str, ...]
    needs: tuple[Pick, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """A table, and below it the machines that its lines were taken on."""

    header: tuple[str, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence of one run, with the machine behind it. otherwise: what is said where nothing was measured."""

    label: str
    file: str
    picks: Mapping[str, Pick | Over]
    text: str
    needs: tuple[Pick, ...] = ()
    otherwise: str = field(default=f"{NOT_MEASURED}.")


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting that was tried in the run that `line` is quoted from, by case."""

    header: str
    metric: str
    line: Line


Entry = Table | Sentence | Settings

_LLAMA: Final = "against-llama"
_TUNING: Final = "speed, tuning"
_PREFILL_512, _PREFILL_2048, _DECODE, _DEEP = (
    "prefill 512", "prefill 2048", "decode at 0", "decode at 8192",
)  # fmt: skip


def _tried(case: str, ubatches: tuple[int, ...] = (512,)) -> tuple[Pick, ...]:
    """Every setting of llama.cpp, repacked or not: without all of them its best is not known."""
    settings = every_setting((False, True), ubatches)
    return tuple(Pick(case, "llama.cpp", _TUNING, note=str(setting)) for setting in settings)


_ALL_TRIED: Final = (
    *_tried(_PREFILL_512),
    *_tried(_PREFILL_2048, (512, 2048)),
    *_tried(_DECODE),
)


def _against(label: str, case: str, file: str = _LLAMA) -> Line:
    """Return a comparison of both sides, with the share of the read bandwidth where tokens are decoded."""
    is_decode = case.startswith("decode")
    picks: dict[str, Pick | Over] = {
        "ours": Pick(case, "thermocline", "speed"),
        "theirs": Pick(case, "llama.cpp", "speed"),
        "ratio": Pick(case, "ratio", "speed"),
    }
    share = ""
    if is_decode:
        picks["reached"] = Pick(case, "thermocline", "bandwidth reached")
        share = ", {reached:.0} % of the read bandwidth"
    ubatches = (512, 2048) if case == _PREFILL_2048 else (512,)
    cells = ("{ours:.1s}" + share, "{theirs:.1s}; {theirs:note}", "{ratio:.2s}")
    return Line(label, file, picks, cells, _tried(case, ubatches))


_SIDES: Final = ("", "thermocline, tokens/s", "llama.cpp, tokens/s; its best setting", "of each pair")  # fmt: skip


def _against_all(file: str) -> Table:
    lines = [
        _against("prompt of 512", _PREFILL_512, file),
        _against("prompt of 2048", _PREFILL_2048, file),
        _against("answer", _DECODE, file),
    ]
    if file == _LLAMA:
        lines.append(_against("answer behind 8192 tokens", _DEEP, file))
    return Table(_SIDES, tuple(lines))


def _ratios(name: str, file: str) -> Sentence:
    """Return what the README says of one model."""
    deep = "; {deep:.2} times behind 8192 tokens" if file == _LLAMA else ""
    picks = {
        "short": Pick(_PREFILL_512, "ratio", "speed"),
        "long": Pick(_PREFILL_2048, "ratio", "speed"),
        "answer": Pick(_DECODE, "ratio", "speed"),
    }
    needs = _ALL_TRIED
    if file == _LLAMA:
        picks["deep"] = Pick(_DEEP, "ratio", "speed")
        needs = (*needs, *_tried(_DEEP))
    return Sentence(
        f"{name} against llama.cpp",
        file,
        picks,
        f"{name}: prompts of 512 tokens at {{short:.2}} times its speed, of 2048 at {{long:.2}} times, "
        f"answers at {{answer:.2}} times{deep}",
        needs,
        otherwise=f"{name}: {NOT_MEASURED}.",
    )


def _absolute(name: str, file: str) -> Sentence:
    """Return what the README begins with: tokens per second of both sides."""
    cases = {"short": _PREFILL_512, "answer": _DECODE}
    picks = {
        f"{who}_{what}": Pick(case, side, "speed")
        for what, case in cases.items()
        for who, side in (("our", "thermocline"), ("their", "llama.cpp"))
    }
    return Sentence(
        f"{name}, tokens per second",
        file,
        picks,
        f"{name}: {{our_short:.0}} tokens/s reading a prompt of 512, {{our_answer:.0}} tokens/s answering. llama.cpp with "
        "the best of its settings, in turns with it: {their_short:.0} and {their_answer:.0}",
        _ALL_TRIED,
        otherwise=f"{name}: {NOT_MEASURED}.",
    )


def _one(label: str, file: str, cell: str, **picks: Pick | Over) -> Line:
    return Line(label, file, picks, (cell,))


def _layer(tokens: int, threads: int = 2) -> Pick:
    return Pick(f"{tokens} tokens", f"{threads} threads", "time")


_BESIDE: Final = "prompt 4096 beside four answers"
_MEMORY: Final = "18.6 GB, context 4096"
_SIMULATED: Final = "hot device simulated, prompt 1024 by 256"
_ON_CPU: Final = "hot device cpu, prompt 1024 by 256"

_REST: Final = Table(
    ("", "median"),
    (
        _one("one layer of 128 experts, 512, 64, 1 tokens", "moe-layer", "{a:.0s}, {b:.0s}, {c:.1s} ms", a=_layer(512), b=_layer(64), c=_layer(1)),
        _one("one thread and two, 512 tokens in that layer", "moe-layer", "{a:.0s} and {b:.0s} ms", a=_layer(512, 1), b=_layer(512)),
        _one("error of that layer, 512 tokens and 1", "moe-layer", "{a:.4} and {b:.4}", a=Pick("512 tokens", "2 threads", "relative error"), b=Pick("1 tokens", "2 threads", "relative error")),
        _one("event-loop lag beside a prompt of 2048", "loop-lag", "p99 {a:.1s} ms", a=Pick("prompt 2048", "thermocline", "lag p99")),
        _one("processor time 0.1 s after the last token", "loop-lag", "{a:.2s} % of a core", a=Pick("after the last token", "thermocline", "idle")),
        _one("all 48 layers, 18.6 GB: opens in, memory of its own at a context of 4096", "memory", "{a:.2} s, {b:.0} MiB", a=Pick(_MEMORY, "thermocline", "open"), b=Pick(_MEMORY, "thermocline", "anonymous memory, peak", scale=2**-20)),
        _one("the same: prompt of 4063, then answer", "memory", "{a:.0} and {b:.1} tokens/s", a=Pick(_MEMORY, "thermocline", "prefill 4063"), b=Pick(_MEMORY, "thermocline", "decode 32")),
        _one("eight answers at a time against one", "many-requests", "{a:.2s} times the tokens", a=Pick("eight answers", "thermocline", "eight/one")),
        _one("an answer's token beside a prompt of 4096 and three other answers", "many-requests", "{a:.2s} times as long; the prompt {b:.0} s", a=Pick(_BESIDE, "thermocline", "slowdown"), b=Pick(_BESIDE, "thermocline", "prompt")),
        _one("the same 2000 tokens again", "many-requests", "first token after {a:.1s} % of the time", a=Pick("prefix 2000", "thermocline", "second/first", scale=100)),
        _one("a prompt over a simulated device and the CPU, stages side by side, against one after another", "overlap", "{a:.2s} of the time", a=Pick(_SIMULATED, "both", "overlap/one at a time")),
        _one("the same with hot experts on the CPU itself", "overlap", "{a:.2s} of the time", a=Pick(_ON_CPU, "both", "overlap/one at a time")),
        _one("64 streams of the demo model: tokens, stall of the server's loop", "server-load", "{a:.0} tokens/s, p99 {b:.0} ms", a=Pick("64 streams", "thermocline", "speed"), b=Pick("64 streams", "thermocline", "stall p99", scale=1000)),
        _one("HTTP's part of a token, 16 streams of the 8-layer model", "http-overhead-large", "{a:.0s} us on the loop", a=Pick("16 at a time", "thermocline", "added on the loop", scale=1e6)),
        _one("an empty round trip to a worker: shared memory, socket", "worker-round-trip", "{a:.0} and {b:.0} us", a=Pick("shared, empty", "thermocline", "round trip"), b=Pick("stream, empty", "thermocline", "round trip")),
        _one("a prompt of 4000 with one worker of full speed, against none", "expert-workers", "{a:.2s} times the speed", a=Pick("full speed, prompt 4000", "auto", "prompt speed/alone")),
        _one("the same, a worker four times as slow", "expert-workers", "{a:.2s} times the speed", a=Pick("four times as slow, prompt 4000", "auto", "prompt speed/alone")),
    ),
)  # fmt: skip

_COSTS: Final = (
    "decode, a layer as one job",
    "decode, stage by stage",
    "prompts, a layer as one job",
    "prompts, stage by stage",
    "prompts, the ring with a hot lane",
    "decode, the ring with a hot lane",
)
LIMITS: Final = MappingProxyType(
    {_COSTS[0]: "15", _COSTS[1]: "45", _COSTS[2]: "20", _COSTS[3]: "45", _COSTS[4]: "100"}
)


def _cost(case: str, recorder: str = "off") -> Pick:
    return Pick(case, f"recorder {recorder}", "time per chunk and layer")


_OVERHEAD: Final = Table(
    ("us per chunk and layer", "recorder off", "recorder on", "limit"),
    (
        *(
            Line(
                case,
                "pipeline-overhead",
                {"off": _cost(case), "on": _cost(case, "on")},
                ("{off:.0s}", "{on:.0s}", LIMITS.get(case, "80 above one job")),
            )
            for case in _COSTS
        ),
        Line(
            "a decode step that device and CPU share",
            "shared-step",
            {"off": Pick("a shared decode step", "thermocline", "time per layer")},
            ("{off:.0s}", "", "40"),
        ),
    ),
)

ROUTINGS: Final = ("uniform", "demo model", "generated skewed")
_LINK: Final = "link 12 GB/s"


def _cache_line(routing: str) -> Line:
    def hits(side: str, case: str = _LINK) -> Pick:
        return Pick(case, side, "decode hits", routing=routing, scale=100)

    def seconds(side: str) -> Pick:
        return Pick(_LINK, side, "all", routing=routing)

    return Line(
        routing,
        "expert-cache",
        {
            "cache": hits("expert cache"),
            "lru": hits("plain LRU"),
            "fixed": hits("best fixed set"),
            "best": hits("offline optimum", "any link"),
            "of_cpu": Over(seconds("expert cache"), seconds("CPU only")),
            "of_lru": Over(seconds("expert cache"), seconds("plain LRU")),
        },
        (
            "{cache:.0} %", "{lru:.0} %", "{fixed:.0} %", "{best:.0} %", "{of_cpu:.2}", "{of_lru:.2}",
        ),
    )  # fmt: skip


_CACHE: Final = Table(
    (
        "routing", "cache hits", "plain LRU hits", "best fixed set hits", "optimum hits",
        "time against the CPU alone", "against plain LRU",
    ),
    tuple(_cache_line(routing) for routing in ROUTINGS),
)  # fmt: skip

_REQUEST: Final = "prompt 384, answer 64"


def _link_line(routing: str) -> Line:
    rates = (10, 100, 1000, 10000, 100000)
    return Line(
        routing,
        "expert-link",
        {
            f"at_{rate}": Pick(_REQUEST, f"link {rate} MB/s", "of cpu alone", routing=routing)
            for rate in rates
        },
        tuple(f"{{at_{rate}:.2}}" for rate in rates),
    )


_LINK_TABLE: Final = Table(
    ("routing", "10 MB/s", "100 MB/s", "1 GB/s", "10 GB/s", "100 GB/s"),
    tuple(_link_line(routing) for routing in ROUTINGS),
)

_DECODED: Final = "decode 128"


def _foresight_line(routing: str) -> Line:
    def share(metric: str) -> Pick:
        return Pick(f"{_DECODED}, by layer", "router, ahead", metric, routing=routing, scale=100)

    return Line(
        routing,
        "expert-foresight",
        {
            "recall": share("recall"),
            "precision": share("precision"),
            "recency": Pick(
                f"{_DECODED}, by layer", "recently used", "recall", routing=routing, scale=100
            ),
            "optimum": Pick(_DECODED, "offline optimum", "hits", routing=routing, scale=100),
            "lru": Pick(_DECODED, "least recently used", "hits", routing=routing, scale=100),
        },
        ("{recall:.0s} %", "{precision:.0s} %", "{recency:.0s} %", "{lru:.0} %", "{optimum:.0} %"),
    )


_FORESIGHT: Final = Table(
    ("routing", "recall", "precision", "recency alone", "LRU hits, half the experts", "optimum"),
    tuple(_foresight_line(routing) for routing in ROUTINGS),
)

_SMALL: Final = "prompt 2048, limit 2048 MiB"


def _larger(label: str, metric: str) -> Line:
    return _one(label, "larger-than-ram", "{a:.2s}", a=Pick(_SMALL, "ratio", metric))


_LARGER: Final = Table(
    ("a 3.5 GB file in 2 GiB of memory", "ratio"),
    (
        _larger("prefill over the larger of reading and compute, at most 1.15", "prefill over the larger of reading and compute"),
        _larger("prefill without prefetch over with", "prefill without prefetch over with"),
        _larger("decode without prefetch over with", "decode without prefetch over with"),
        _larger("prefill of llama.cpp over ours", "prefill of llama.cpp over ours"),
        _larger("decode of llama.cpp over ours", "decode of llama.cpp over ours"),
    ),
)  # fmt: skip


def _predicted(label: str, stem: str, place: str, routing: str) -> Line:
    case = f"{stem}, {place}"
    return Line(
        label,
        "predictions",
        {
            "prompt": Pick(case, "predicted/real", "prefill 256", routing=routing),
            "answer": Pick(case, "predicted/real", "decode 16", routing=routing),
        },
        (routing, place, "{prompt:.2s}", "{answer:.2s}"),
    )


_MODELS: Final = (
    ("Qwen3-30B-A3B, 8 layers", "qwen3-30b-a3b-8-layers", "uniform"),
    ("Qwen3-30B-A3B, 8 layers, skew 0.5", "qwen3-30b-a3b-8-layers-skew-0.5", "generated skewed"),
    ("Qwen3.6-35B-A3B, 8 layers", "qwen3.6-35b-a3b-8-layers", "uniform"),
    ("OLMoE, 16 layers", "olmoe-1b-7b-16-layers", "uniform"),
)
_PREDICTIONS: Final = Table(
    ("predicted over real speed", "routing", "file", "prompt of 256", "answer of 16"),
    tuple(
        _predicted(label, stem, place, routing)
        for label, stem, routing in _MODELS
        for place in ("in memory", "from disk, 60% in memory")
    ),
)

PAGES: Final[Mapping[str, Mapping[str, Entry]]] = MappingProxyType(
    {
        "README.md": {
            "absolute": _absolute("Qwen3-30B-A3B in Q4_K_M, 8 of its 48 layers", _LLAMA),
            "qwen3": _ratios("Qwen3-30B-A3B in Q4_K_M, 8 layers", _LLAMA),
            "qwen35": _ratios("Qwen3.6-35B-A3B, 8 layers", "against-llama-qwen35moe"),
            "olmoe": _ratios("OLMoE", "against-llama-olmoe"),
            "avx2": Sentence(
                "Q4_K with AVX2",
                "cpu-types",
                {"slow": Pick("Q4_K", "avx2", "1 row"), "fast": Pick("Q4_K", "avx512", "1 row")},
                "With AVX2 alone one row of Q4_K comes at {slow:.1} instead of {fast:.1} GB/s per thread",
                otherwise=f"Speed with AVX2 alone: {NOT_MEASURED}.",
            ),
            "beside": Sentence(
                "a prompt beside answers",
                "many-requests",
                {
                    "prompt": Pick(_BESIDE, "thermocline", "prompt"),
                    "slowdown": Pick(_BESIDE, "thermocline", "slowdown"),
                },
                "4096 tokens beside four answers took {prompt:.0} s, and a token of an answer {slowdown:.1} times as "
                "long as before",
                otherwise=f"How long 4096 tokens take beside four answers: {NOT_MEASURED}.",
            ),
            "ring": Sentence(
                "the ring's cost",
                "pipeline-overhead",
                {"ring": _cost(_COSTS[4])},
                "Bookkeeping of the ring of stages with a hot lane takes {ring:.0} us per chunk and layer; its limit is 100",
                otherwise=f"Bookkeeping of the ring of stages with a hot lane: {NOT_MEASURED}.",
            ),
        },
        "docs/benchmarks.md": {
            "against-llama": _against_all(_LLAMA),
            "against-llama-settings": Settings(
                "llama.cpp, tokens/s", _TUNING,
                Line("llama.cpp's settings", _LLAMA, {"any": Pick(_PREFILL_512, "ratio", "speed")}, (), _ALL_TRIED),
            ),
            "against-llama-qwen35moe": _against_all("against-llama-qwen35moe"),
            "against-llama-olmoe": _against_all("against-llama-olmoe"),
            "kept": Sentence(
                "speed kept behind 8192 tokens", _LLAMA,
                {
                    "ours": Over(Pick(_DEEP, "thermocline", "speed"), Pick(_DECODE, "thermocline", "speed"), 100),
                    "theirs": Over(Pick(_DEEP, "llama.cpp", "speed"), Pick(_DECODE, "llama.cpp", "speed"), 100),
                },
                "Behind 8192 tokens thermocline keeps {ours:.0} % of its speed, llama.cpp {theirs:.0} %",
                (*_tried(_DECODE), *_tried(_DEEP)),
                otherwise=f"What each side keeps of its speed behind 8192 tokens: {NOT_MEASURED}.",
            ),
            "rest": _REST,
            "overhead": _OVERHEAD,
            "cache": _CACHE,
            "link": _LINK_TABLE,
            "foresight": _FORESIGHT,
            "larger": _LARGER,
            "predictions": _PREDICTIONS,
        },
    }
)  # fmt: skip
