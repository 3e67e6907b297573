"""`thermocline tokenize`: a model's token ids of a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from thermocline.cli.console import echo_json
from thermocline.cli.model_name import hub_model
from thermocline.cli.options import json_option, model_argument
from thermocline.cli.session import read_line_text

if TYPE_CHECKING:
    from thermocline.text.tokenizer import Tokenizer


@click.command()
@model_argument(required=True, before="text")
@hub_model(header_is_enough=True)
@click.argument("text", required=False, metavar="TEXT")
@click.option(
    "--special/--no-special",
    default=True,
    show_default=True,
    help="Names of special tokens in the text count as those tokens.",
)
@json_option
def tokenize(model: str, text: str, special: bool, as_json: bool) -> None:
    """Show the token ids of TEXT ("-" reads stdin), one per line.

    \b
    Examples:
      thermocline tokenize model.gguf "Hello, world"
      thermocline tokenize model.gguf - --json < story.txt
      thermocline tokenize -hf Qwen/Qwen3-30B-A3B-GGUF "Hello, world"

    Opens only the header of the file.
    """
    tokenizer = _open_tokenizer(model)
    ids = tokenizer.encode(read_line_text(text), parse_special=special)
    pieces = [tokenizer.token_bytes(token_id) for token_id in ids]
    if as_json:
        tokens = [
            {"id": i, "text": piece.decode("utf-8", "replace")}
            for i, piece in zip(ids, pieces, strict=True)
        ]
        echo_json({"token_ids": ids, "num_tokens": len(ids), "tokens": tokens})
        return
    width = len(str(tokenizer.vocab_size))
    for token_id, piece in zip(ids, pieces, strict=True):
        click.echo(f"{token_id:{width}}  {_quoted(piece)}")


def _quoted(piece: bytes) -> str:
    """Return the token as a Python string, or as bytes where it is only a part of a character."""
    try:
        return repr(piece.decode())
    except UnicodeDecodeError:
        return repr(piece)


def _open_tokenizer(path: str) -> Tokenizer:
    from thermocline.modelfile.reader import open_model_file
    from thermocline.text.tokenizer import Tokenizer
    from thermocline.text.vocabulary import TokenizerData

    with open_model_file(path) as file:
        return Tokenizer(TokenizerData.from_metadata(file.metadata, path=path))
