"""`thermocline serve`: a model behind OpenAI's, Anthropic's and Ollama's HTTP interfaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from thermocline.cli.options import PLACE_FLAGS, engine_options, explain_option, model_argument
from thermocline.cli.server_options import server_options
from thermocline.cli.session import explain as print_choices
from thermocline.cli.session import model_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.config import EngineConfig
    from thermocline.engine.api import Engine
    from thermocline.server.core.settings import ServerConfig


@click.command()
@model_argument()
@server_options
@explain_option
@engine_options(
    "--ctx",
    "--kv-type",
    "--max-requests",
    "--max-queue",
    "--prefill-chunk",
    "--prompt-chunks",
    "--decode-slowdown",
    "--prefix-cache/--no-prefix-cache",
    "--chat-template-file",
    *PLACE_FLAGS,
)
def serve(
    model: str | None, listen: Callable[[], ServerConfig], config: EngineConfig, explain: bool
) -> None:
    """Serve a model to OpenAI, Anthropic and Ollama clients.

    \b
    Examples:
      thermocline serve
      thermocline serve model.gguf --port 0
      curl http://127.0.0.1:7717/v1/chat/completions --json \\
        '{"messages": [{"role": "user", "content": "Hello"}]}'
      THERMOCLINE_API_KEY=secret thermocline serve --host 0.0.0.0

    It ends with Ctrl-C. The address is printed once it can be reached, and again once the model is open; a browser finds a page there. Until then /health says 503. A second
    Ctrl-C does not wait for running answers.
    """
    import asyncio

    server_config = listen()
    path = model_path(model)

    from thermocline.server.core.model_card import model_card

    card = model_card(path)

    from thermocline.engine.thread import fastest_loop
    from thermocline.server import app

    urls: list[str] = []

    def say_listening(url: str) -> None:
        urls.append(url)
        click.echo(f"thermocline is opening {card.id} at {url}")

    def say_opened(engine: Engine) -> None:
        click.echo(f"thermocline is serving {card.id} at {urls[0]}")
        if explain:
            print_choices(engine)

    with asyncio.Runner(loop_factory=fastest_loop()) as runner:
        runner.run(app.serve(path, config, server_config, card, say_listening, say_opened))
