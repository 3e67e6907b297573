"""`thermocline perplexity`: how well a model predicts a text."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from thermocline.cli.console import Progress, echo_json
from thermocline.cli.model_name import hub_model
from thermocline.cli.options import engine_options, json_option, model_argument
from thermocline.cli.session import open_engine, read_text, run_until_done

if TYPE_CHECKING:
    from thermocline.config import EngineConfig


@click.command()
@model_argument(required=True, before="textfile")
@hub_model()
@click.argument("textfile", required=False, metavar="TEXTFILE")
@click.option(
    "--window",
    type=click.IntRange(min=2),
    default=512,
    show_default=True,
    metavar="N",
    help="Tokens that are scored together.",
)
@json_option
@engine_options()
def perplexity(model: str, textfile: str, window: int, as_json: bool, config: EngineConfig) -> None:
    """Measure how well a model predicts TEXTFILE ("-" reads stdin). Lower is better.

    \b
    Examples:
      thermocline perplexity model.gguf wiki.test.raw
      thermocline perplexity model.gguf story.txt --window 256 --json
      thermocline perplexity -hf Qwen/Qwen3-30B-A3B-GGUF wiki.test.raw

    Numbers are comparable between files of one model (quantisations), with the same text and window.
    """
    run_until_done(_run(model, read_text(textfile), window, config, as_json))


async def _run(path: str, text: str, window: int, config: EngineConfig, as_json: bool) -> None:
    from thermocline.engine.scoring import perplexity as measure_perplexity

    async with open_engine(path, config) as engine:
        ids = await engine.encode(text, parse_special=False)
        with Progress() as progress:
            result = await measure_perplexity(
                engine,
                ids,
                window_tokens=window,
                on_progress=lambda done, total: progress.say(f"scored {done} of {total} tokens"),
            )
    if as_json:
        facts = asdict(result) | {"window_tokens": window, "num_tokens": len(ids)}
        if math.isinf(result.perplexity):
            facts["perplexity"] = None  # JSON has no infinity; nll_mean tells how bad it is
        echo_json(facts)
        return
    click.echo(f"perplexity {result.perplexity:.4f}")
    click.echo(
        f"{result.nll_mean:.4f} nats per token over {result.num_scored_tokens} tokens "
        f"in {result.num_windows} windows"
    )
