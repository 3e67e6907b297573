"""`thermocline serve`: a model behind OpenAI's, Anthropic's and Ollama's HTTP interfaces."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from thermocline.cli.console import say
from thermocline.cli.llama_flags import names
from thermocline.cli.logs import log_options, logging_to_stderr
from thermocline.cli.model_name import hub_model
from thermocline.cli.options import (
    PLACE_FLAGS,
    RANK_FLAGS,
    engine_options,
    model_argument,
    quiet_option,
    verbose_option,
)
from thermocline.cli.ranks import as_rank, has_followed
from thermocline.cli.server_options import server_options
from thermocline.cli.session import explain as print_choices
from thermocline.cli.session import model_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.cli.logs import LogFormat
    from thermocline.config import EngineConfig
    from thermocline.engine.api import Engine
    from thermocline.server.core.settings import ServerConfig


@click.command()
@model_argument()
@hub_model()
@click.option(
    *names("--alias"),
    "alias",
    metavar="TEXT",
    help="What the model is called in answers and lists (default: the file's name).",
)
@server_options
@log_options
@quiet_option
@verbose_option
@engine_options(
    "--ctx",
    "--kv-type",
    "--max-requests",
    "--max-queue",
    "--prefill-chunk",
    "--prompt-chunks",
    "--decode-slowdown",
    "--prefix-cache/--no-prefix-cache",
    "--speculate",
    "--chat-template-file",
    *PLACE_FLAGS,
    *RANK_FLAGS,
)
def serve(
    model: str | None,
    alias: str | None,
    listen: Callable[[], ServerConfig],
    config: EngineConfig,
    log_format: LogFormat,
    logs_access: bool,
    is_verbose: bool,
) -> None:
    """Serve a model to OpenAI, Anthropic and Ollama clients.

    \b
    Examples:
      thermocline serve
      thermocline serve model.gguf --port 0
      thermocline serve -hf Qwen/Qwen3-30B-A3B-GGUF
      curl http://127.0.0.1:7717/v1/chat/completions --json \\
        '{"messages": [{"role": "user", "content": "Hello"}]}'
      THERMOCLINE_API_KEY=secret thermocline serve --host 0.0.0.0

    It ends with Ctrl-C. The address is printed once it can be reached, and again once the model is open; a browser finds a page there. Until then /health says 503. A second
    Ctrl-C does not wait for running answers.
    """
    import asyncio

    server_config = listen()
    path, config = model_path(model), as_rank(config)
    if has_followed(path, config):
        return

    from thermocline.server.core.model_card import model_card

    card = model_card(path)
    card = replace(card, id=alias) if alias else card

    from thermocline.engine.thread import fastest_loop
    from thermocline.server import app

    urls: list[str] = []

    def say_listening(url: str) -> None:
        urls.append(url)
        say(f"thermocline is opening {card.id} at {url}")

    def say_opened(engine: Engine) -> None:
        say(f"thermocline is serving {card.id} at {urls[0]}")
        if is_verbose:
            print_choices(engine)

    with (
        logging_to_stderr(log_format, logs_access=logs_access),
        asyncio.Runner(loop_factory=fastest_loop()) as runner,
    ):
        runner.run(app.serve(path, config, server_config, card, say_listening, say_opened))
