"""`thermocline demo`: the built-in model on the split pipeline, with everything it can show."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from thermocline.cli.console import AnswerWriter, show
from thermocline.cli.session import (
    CollectedAnswer,
    TraceFile,
    model_path,
    open_engine,
    run_until_done,
    stream_answer,
)
from thermocline.config import (
    CpuConfig,
    EngineConfig,
    PlacementConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from thermocline.demo import DEMO_HELD_TEXT_PATH, DEMO_QUESTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from thermocline.engine.api import Engine
    from thermocline.messages import Timings
    from thermocline.models.footprint import Footprint

_TRACE_NAME = "thermocline-demo-trace.json.gz"
_QUESTIONS = (DEMO_QUESTIONS[1], DEMO_QUESTIONS[2])
_MAX_TOKENS = 200
_PAGE_TOKENS = 512
_DRAFT_TOKENS = 2
_NEXT = """
next: thermocline trace html FILE                   look at the timeline
      thermocline chat                              talk with this model
      thermocline info model.gguf                   look into a model of yours
      thermocline run model.gguf --chat "Hello"     let it answer"""


@click.command()
@click.option(
    "--trace",
    metavar="FILE",
    help=f"Write the timeline there (default: {_TRACE_NAME} in the current folder).",
)
def demo(trace: str | None) -> None:
    """Watch the built-in model answer, and see what every lane did.

    \b
    Example:
      thermocline demo

    Needs no download and no GPU: the model of a few MiB is part of the package. Half of its experts
    are computed on a second CPU lane, so that the timeline shows work side by side.
    """
    target = (
        TraceFile(Path(_TRACE_NAME), may_move=True) if trace is None else TraceFile(Path(trace))
    )
    run_until_done(_run(target))


async def _run(trace: TraceFile) -> None:
    from thermocline.cli.render import placement_table
    from thermocline.kernels.cpu_topology import default_threads

    trace.check()
    path = model_path(None)
    footprint = _footprint(path)
    # A device beside the CPU, so that there is something to overlap; it takes one of the processors.
    config = EngineConfig(
        placement=PlacementConfig(hot_device="simulated", hot_fraction=0.5, expert_cache="static"),
        scheduler=SchedulerConfig(prefill_chunk_tokens=128),
        # Whether it pays or not: steps of so small a model cost next to nothing anyway.
        speculation=SpeculationConfig(drafters="mtp", fixed_tokens=_DRAFT_TOKENS),
        cpu=CpuConfig(threads=max(default_threads() - 1, 1)),
    )
    async with open_engine(path, config, trace) as engine:
        click.echo(f"{engine.spec.name}: a mixture of experts that is part of this package")
        show("", placement_table(footprint, engine.placement, config.placement.hot_device))
        answers = [await _ask(engine, question) for question in _QUESTIONS]
        page = await _read_page(engine)
        show(*_report(engine, page, answers))
        await engine.measure_limits()  # the timeline tells how near to them it came
    click.echo(_NEXT)


def _footprint(path: str) -> Footprint:
    from thermocline.modelfile.reader import open_model_file
    from thermocline.models.footprint import decoder_tensors, measure_footprint
    from thermocline.models.registry import read_spec

    with open_model_file(path) as file:
        spec = read_spec(file)
        tensors = decoder_tensors(file.tensors.values(), spec.num_layers)
        return measure_footprint(tensors, spec.router)


async def _ask(engine: Engine, question: str) -> Timings:
    from thermocline.sampling.params import SamplingParams

    prompt = await engine.encode_chat([{"role": "user", "content": question}])
    _headline(f"> {question}")
    answer = CollectedAnswer()
    with AnswerWriter() as writer:
        params = SamplingParams(max_tokens=_MAX_TOKENS)
        await stream_answer(engine, prompt, params, writer.write, answer)
    click.echo()
    return cast("Timings", answer.timings)  # the stream has ended


async def _read_page(engine: Engine) -> Timings:
    """Let the model read a longer text, the work in which lanes overlap most."""
    from thermocline.sampling.params import SamplingParams

    text = DEMO_HELD_TEXT_PATH.read_text("utf-8")
    prompt = (await engine.encode(text, parse_special=False))[:_PAGE_TOKENS]
    _headline(f"> (reads a page of {len(prompt)} tokens)")
    answer = CollectedAnswer()
    params = SamplingParams(max_tokens=1)
    await stream_answer(engine, prompt, params, lambda _: None, answer)
    click.echo()
    return cast("Timings", answer.timings)  # the stream has ended


def _report(engine: Engine, page: Timings, answers: Sequence[Timings]) -> list[RenderableType]:
    from thermocline.cli.render import lanes_table, overlap_table
    from thermocline.traces.overlap import summarize

    summary = summarize(engine.trace_events())
    num_decoded = sum(timing.num_output_tokens - 1 for timing in answers)
    decode_s = sum(timing.decode_s for timing in answers)
    facts = [f"{page.prompt_tokens_per_s:.0f} tokens/s reading"]
    if num_decoded:
        facts.append(f"{num_decoded / decode_s:.0f} tokens/s answering")
    facts.append(f"{engine.statistics().hot_share:.0%} of the expert choices were hot")
    num_drafted = sum(timing.drafts.num_drafted for timing in answers)
    num_right = sum(timing.drafts.num_accepted for timing in answers)
    drafts = (
        f"{num_drafted} tokens were drafted by the model's own block, {num_right} of them right"
    )
    return [
        ", ".join(facts),
        drafts,
        "",
        lanes_table(summary),
        overlap_table(summary),
        f"{summary.overlapped_share:.0%} of the working time, at least two resources worked at once",
        "",
    ]


def _headline(text: str) -> None:
    from rich.text import Text

    show(Text(text, style="bold"))
