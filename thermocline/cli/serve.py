"""`thermocline serve`: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from thermocline.cli.options import engine_options, model_argument
from thermocline.cli.session import model_path
from thermocline.config import TraceConfig
from thermocline.server.settings import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    DEFAULT_SHUTDOWN_TIMEOUT_S,
    ModelCard,
    ServerConfig,
)

if TYPE_CHECKING:
    import os

    from thermocline.config import EngineConfig

# At most so many events of a window that /trace/start began; the oldest go first.
_MAX_TRACE_EVENTS = 1 << 18
_SHARD_OR_SUFFIX = re.compile(r"(-\d{5}-of-\d{5})?(\.gguf)?$", re.IGNORECASE)


@click.command()
@model_argument()
@click.option(
    "--host",
    default=DEFAULT_HOST,
    show_default=True,
    help="Address to listen at; this machine's own only.",
)
@click.option(
    "--port",
    type=int,
    default=DEFAULT_PORT,
    show_default=True,
    metavar="N",
    help="Port to listen at; 0 picks a free one.",
)
@click.option(
    "--shutdown-timeout",
    type=float,
    default=DEFAULT_SHUTDOWN_TIMEOUT_S,
    show_default=True,
    metavar="X",
    help="Seconds that running answers may go on after Ctrl-C or SIGTERM.",
)
@engine_options(
    "--ctx",
    "--kv-type",
    "--max-requests",
    "--prefill-chunk",
    "--prompt-chunks",
    "--decode-slowdown",
    "--prefix-cache/--no-prefix-cache",
    "--hot-device",
    "--hot-fraction",
    "--prefetch",
    "--kernels",
    "--cpu-isa",
    "--threads",
    "--pin-threads",
)
def serve(
    model: str | None, host: str, port: int, shutdown_timeout: float, config: EngineConfig
) -> None:
    """Serve a model to OpenAI clients, until Ctrl-C.

    \b
    Examples:
      thermocline serve
      thermocline serve model.gguf --port 0
      curl http://127.0.0.1:7717/v1/chat/completions --json \\
        '{"messages": [{"role": "user", "content": "Hello"}]}'

    The address is printed once it can be reached; until the model is open, /health says 503. A second
    Ctrl-C does not wait for running answers.
    """
    import asyncio

    listen = ServerConfig(host=host, port=port, shutdown_timeout_s=shutdown_timeout)
    # A window that was forgotten must not take hundreds of megabytes.
    config = replace(config, trace=TraceConfig(max_events=_MAX_TRACE_EVENTS))
    path = model_path(model)
    card = model_card(path)

    from thermocline.server import app

    def say(url: str) -> None:
        click.echo(f"thermocline is serving {card.id} at {url}")

    with asyncio.Runner(loop_factory=app.fastest_loop()) as runner:
        runner.run(app.serve(path, config, listen, card, say))


def model_card(path: str | os.PathLike[str]) -> ModelCard:
    """Return what clients are shown of a model, from its header. Raises ModelError."""
    from thermocline.modelfile.reader import open_model_file
    from thermocline.models.footprint import measure_footprint

    with open_model_file(path) as file:
        footprint = measure_footprint(file.tensors.values(), None)
    bytes_by_format: Counter[str] = Counter()
    for share in footprint.formats:
        bytes_by_format[share.format] += share.total_bytes
    return ModelCard(
        id=_SHARD_OR_SUFFIX.sub("", Path(path).name),
        num_parameters=footprint.num_parameters,
        total_bytes=footprint.total_bytes,
        quant=max(bytes_by_format, key=lambda name: bytes_by_format[name], default=""),
    )
