"""`thermocline heat`: how often a model's experts were used so far, on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from thermocline.cli.console import echo_json, note, show
from thermocline.cli.model_name import hub_model
from thermocline.cli.options import heat_file_option, json_option, model_argument
from thermocline.cli.session import model_path
from thermocline.errors import ConfigError

if TYPE_CHECKING:
    from thermocline.experts.heat import HeatRecord, LayerUse
    from thermocline.experts.heat_file import ModelIdentity

# What fits on a line of 80 characters, and what a program may want.
_NUM_SHOWN = 4
_NUM_TOP = 8


@click.command()
@model_argument()
@hub_model()
@json_option
@click.option(
    "--export",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write what is known to FILE, for `thermocline plan --heat FILE` elsewhere.",
)
@heat_file_option
@click.option("--reset", is_flag=True, help="Forget what is known of the model.")
def heat(
    model: str | None, as_json: bool, export: Path | None, heat_file: str | None, reset: bool
) -> None:
    """Show how often a model's experts were chosen, layer by layer.

    \b
    Examples:
      thermocline heat model.gguf
      thermocline heat model.gguf --export heat.json
      thermocline heat model.gguf --reset

    `run`, `chat` and `serve` remember it unless they have --no-heat: in ~/.cache/thermocline/heat (in
    thermocline/heat of XDG_CACHE_HOME, or heat of THERMOCLINE_CACHE, where those are set), or in the file of
    --heat-file. A MODEL.gguf.heat.json beside the model, which earlier versions wrote, is read while
    there is nothing else. Where nothing can be written nothing is remembered, and the command says so. Old
    choices fade. "top quarter" is the share that the most used quarter of a
    layer's experts takes, "bits" the entropy of its choices: the less, the better a small device serves. --json has by
    layer, too, which share of a token's experts the token before chose as well, in prompts.
    """
    from thermocline.experts.heat_file import (
        find_heat,
        heat_home,
        load_heat,
        reset_heat,
        write_heat,
    )
    from thermocline.modelfile.reader import open_model_file
    from thermocline.models.registry import read_spec

    path = model_path(model)
    with open_model_file(path) as file:
        spec = read_spec(file)
        if not spec.has_experts:
            raise ConfigError(f"{path} has no routed experts, so there is nothing to count")
        home = heat_home(file, spec, heat_file)
    if reset:
        deleted = reset_heat(home)
        note(f"deleted: {', '.join(map(str, deleted))}" if deleted else "nothing was kept of it")
        return
    place, known = find_heat(home), load_heat(home)
    if place is None or known is None:
        raise ConfigError(
            f"nothing is known of the experts of {path} yet: use it with run, chat or serve first"
        )
    if export is not None:
        write_heat(export, home.identity, known)
        note(f"written: {export}")
    elif as_json:
        echo_json(_as_json(home.identity, known, place))
    else:
        _show(home.identity, known, place)


def _uses(known: HeatRecord, num_top: int) -> list[LayerUse | None]:
    from thermocline.experts.heat import layer_use

    return [layer_use(row, num_top) for row in known.warmth]


def _as_json(identity: ModelIdentity, known: HeatRecord, place: Path) -> dict[str, object]:
    return {
        "model": identity.name,
        "file": str(place),
        "num_tokens": known.num_tokens,
        "half_life_tokens": known.half_life_tokens,
        "num_experts": identity.num_experts,
        "repeat_shares": known.repeat_shares(),
        "layers": [
            {"layer": layer}
            | asdict(use)
            | {"top": [{"expert": expert, "share": share} for expert, share in use.top]}
            for layer, use in enumerate(_uses(known, _NUM_TOP))
            if use is not None
        ],
    }


def _show(identity: ModelIdentity, known: HeatRecord, place: Path) -> None:
    from thermocline.cli.render import heat_table

    title = f"How the {identity.num_experts} experts of each layer were used"
    tokens = (
        f"{identity.name}: {known.num_tokens} tokens; a choice counts half after "
        f"{known.half_life_tokens}"
    )
    show(
        heat_table(title, _uses(known, _NUM_SHOWN), identity.num_experts),
        tokens,
        f"kept in {place}",
    )
