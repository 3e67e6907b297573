"""`thermocline serve`: a model behind OpenAI's, Anthropic's and Ollama's HTTP interfaces."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from thermocline.cli.console import say
from thermocline.cli.llama_flags import names
from thermocline.cli.logs import log_options, logging_to_stderr
from thermocline.cli.model_name import hub_model
from thermocline.cli.options import (
    PLACE_FLAGS,
    RANK_FLAGS,
    SPILL_FLAGS,
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
    from collections.abc import Callable, Coroutine
    from typing import Any

    from thermocline.cli.logs import LogFormat
    from thermocline.config import EngineConfig
    from thermocline.engine.api import Engine
    from thermocline.server.core.settings import ServerConfig

    Work = Callable[[Callable[[str], None], Callable[[Engine], None]], Coroutine[Any, Any, None]]


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
    *SPILL_FLAGS,
    "--speculate",
    "--draft-model",
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
      thermocline serve --models ~/models --keep-alive 10m
      curl http://127.0.0.1:7717/v1/chat/completions --json \\
        '{"messages": [{"role": "user", "content": "Hello"}]}'
      THERMOCLINE_API_KEY=secret thermocline serve --host 0.0.0.0

    It ends with Ctrl-C. The address is printed once it can be reached, and again once the model is open; a browser finds a page there. Until then /health says 503. A second
    Ctrl-C does not wait for running answers.
    """
    import asyncio

    server_config = listen()
    config = as_rank(config)
    if server_config.models or server_config.allows_model_changes:
        if config.parallel.num_ranks > 1:
            raise click.UsageError("--models is for one process: serve one MODEL on ranks")
        work, what = _serve_several(model, alias, config, server_config)
        is_opening = False
    else:
        if has_followed(model_path(model), config):
            return
        work, what = _serve_one(model, alias, config, server_config)
        is_opening = server_config.keep_alive_s is None

    from thermocline.engine.thread import fastest_loop

    urls: list[str] = []

    def say_listening(url: str) -> None:
        urls.append(url)
        say(f"thermocline is {'opening' if is_opening else 'serving'} {what} at {url}")

    def say_opened(engine: Engine) -> None:
        say(f"thermocline is serving {what} at {urls[0]}")
        if is_verbose:
            print_choices(engine)

    with (
        logging_to_stderr(log_format, logs_access=logs_access),
        asyncio.Runner(loop_factory=fastest_loop()) as runner,
    ):
        runner.run(work(say_listening, say_opened))


def _serve_one(
    model: str | None, alias: str | None, config: EngineConfig, server_config: ServerConfig
) -> tuple[Work, str]:
    """Return what serves the one model, and what that is called."""
    from thermocline.server import app
    from thermocline.server.core.model_card import model_card

    path = model_path(model)
    card = model_card(path)
    card = replace(card, id=alias) if alias else card
    return partial(app.serve, path, config, server_config, card), card.id


def _serve_several(
    model: str | None, alias: str | None, config: EngineConfig, server_config: ServerConfig
) -> tuple[Work, str]:
    """Return what serves the models of folders and lists, and of the hub's cache where clients may change it."""
    from thermocline.hub.cache import require_library
    from thermocline.server import app
    from thermocline.server.core.catalogue import open_catalogue

    _check_several(model, alias, server_config)
    if server_config.allows_model_changes:
        require_library()
    places = tuple(map(Path, server_config.models))
    catalogue = open_catalogue(places, config, with_cache=server_config.allows_model_changes)
    number = len(catalogue.read())
    what = f"{number} model{'s' * (number != 1)}"
    return partial(app.serve_models, catalogue, server_config), what


def _check_several(model: str | None, alias: str | None, config: ServerConfig) -> None:
    given = {"MODEL": model, "--alias": alias, "--any-model": config.any_model or None}
    for name, value in given.items():
        if value is not None:
            raise click.UsageError(
                f"{name} is for one model, and --models or --allow-model-changes serves several: leave it out"
            )
