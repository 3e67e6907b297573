"""`thermocline logits`: the raw output of a model for given tokens, as a NumPy file."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from thermocline.cli.console import Progress, note
from thermocline.cli.model_name import hub_model
from thermocline.cli.options import engine_options, model_argument, parse_token_ids
from thermocline.cli.session import open_engine, read_line_text, run_until_done
from thermocline.errors import ConfigError
from thermocline.whole_files import whole_file

if TYPE_CHECKING:
    from thermocline.config import EngineConfig
    from thermocline.engine.api import Engine


@click.command()
@model_argument()
@hub_model(required=True)
@click.option(
    "--tokens", required=True, metavar="IDS", help="Token ids, such as 1,2,3; - reads stdin."
)
@click.option("--out", required=True, metavar="FILE", help="The .npy file to write.")
@engine_options()
def logits(model: str, tokens: str, out: str, config: EngineConfig) -> None:
    """Write the logits after every given token as a NumPy file.

    \b
    Example:
      thermocline logits model.gguf --tokens 9707,11,1879 --out logits.npy

    For comparing with other programs: float32 [tokens, vocabulary], where row i holds what the model says about the token after the
    i-th. The file appears when it is complete.
    """
    ids = parse_token_ids(read_line_text(tokens), "--tokens")
    target = Path(out)
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no such folder; create it, or name another")
    run_until_done(_run(model, ids, target, config))


async def _run(path: str, ids: tuple[int, ...], target: Path, config: EngineConfig) -> None:
    async with open_engine(path, config) as engine:
        try:
            with whole_file(target) as file:
                await _write(engine, ids, file)
        except OSError as error:
            raise ConfigError(
                f"--out {target}: {error.strerror or error}; name another file"
            ) from error
        note(f"wrote {target}: float32 [{len(ids)}, {engine.spec.vocab_size}]")


async def _write(engine: Engine, ids: tuple[int, ...], file: IO[bytes]) -> None:
    import numpy as np

    shape = (len(ids), engine.spec.vocab_size)
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    with Progress() as progress:
        async for chunk in engine.score(ids):  # in order
            if chunk.start == 0:  # not before the engine has accepted the tokens
                np.lib.format.write_array_header_1_0(file, header)
            file.write(chunk.logits.astype("<f4").tobytes())
            progress.say(f"computed {chunk.start + len(chunk.logits)} of {len(ids)} tokens")
