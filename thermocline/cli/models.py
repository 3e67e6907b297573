"""`thermocline pull`, `list` and `rm`: models by name, and what of them is on this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from thermocline.cli.console import echo_json, note, show
from thermocline.cli.model_name import find_model
from thermocline.cli.options import json_option
from thermocline.errors import HubError

if TYPE_CHECKING:
    from thermocline.cli.model_tables import ListedModel
    from thermocline.hub.cache import CachedModel
    from thermocline.hub.names import HubName


@click.command()
@click.argument("name", metavar="ORG/REPO[:QUANT]")
@click.option("--quants", is_flag=True, help="Only show which quantisations there are.")
def pull(name: str, quants: bool) -> None:
    """Download a model from the Hugging Face hub.

    \b
    Examples:
      thermocline pull Qwen/Qwen3-30B-A3B-GGUF --quants
      thermocline pull Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M
      thermocline tokenize "$(thermocline pull Qwen/Qwen3-30B-A3B-GGUF)" "Hello"

    Prints the path of its file. QUANT is a quantisation, or the name of a file in the repository. Without it Q4_K_M is taken, or the only one that there
    is. Files go into the cache that other tools of the hub share (HF_HOME); what is there is not downloaded again. HF_TOKEN or
    `hf auth login` gives access to gated and private models, HF_ENDPOINT names another hub.
    """
    if quants:
        from thermocline.cli.model_tables import quants_table
        from thermocline.hub.client import hub_files
        from thermocline.hub.names import parse_name
        from thermocline.hub.variants import choose, group_variants

        asked = parse_name(name)
        variants = group_variants(hub_files(asked))
        if not variants:
            choose(name, variants, asked.quant)
        show(quants_table(asked.repo, variants))
        return
    click.echo(os.fspath(find_model(name, asks_hub=True)))


@click.command("list")
@json_option
def list_models(as_json: bool) -> None:
    """Show the models on this machine.

    \b
    Examples:
      thermocline list
      thermocline list --json

    Those of the hub's cache, of Ollama and of LM Studio. A model of the hub's cache is run by its name (-hf), every other one by the path (MODEL), which is shown. Files that an
    unfinished download left out are not shown. Whether a model fits is judged by its size; `thermocline plan` says more.
    """
    from dataclasses import asdict

    from thermocline.hub.cache import unfinished_bytes
    from thermocline.units import format_bytes

    models = _on_this_machine()
    if as_json:
        echo_json({"models": [asdict(model) for model in models]})
    elif models:
        from thermocline.cli.model_tables import models_table

        show(models_table(models))
    else:
        note(
            "no models here; thermocline pull ORG/REPO downloads one, and the demo model is built in"
        )
    unfinished = unfinished_bytes()
    if unfinished:
        note(
            f"downloads that did not end, or still run, take {format_bytes(unfinished)}; hf cache prune removes them"
        )


@click.command()
@click.argument("names", metavar="ORG/REPO[:QUANT]...", nargs=-1, required=True)
@click.option("--all", "takes_all", is_flag=True, help="Remove every quantisation of a repository.")
def rm(names: tuple[str, ...], takes_all: bool) -> None:
    """Remove models from the hub's cache on this machine.

    \b
    Examples:
      thermocline rm Qwen/Qwen3-30B-A3B-GGUF:Q8_0
      thermocline rm Qwen/Qwen3-30B-A3B-GGUF --all

    Files of other programs are never removed.
    """
    from thermocline.hub.cache import remove, require_library
    from thermocline.hub.names import parse_name
    from thermocline.units import format_bytes

    require_library()
    doomed = [_doomed(parse_name(name), takes_all=takes_all) for name in names]
    for models in doomed:
        freed_bytes = remove(models)
        removed = ", ".join(model.name for model in models)
        note(f"removed {removed}: {format_bytes(freed_bytes)} are free again")


def _doomed(name: HubName, *, takes_all: bool) -> tuple[CachedModel, ...]:
    """Return what a name means for removing: never one of several that it does not name."""
    from thermocline.hub.cache import cached_models
    from thermocline.hub.variants import choose

    cached = cached_models(name.repo)
    if not cached:
        raise HubError(
            str(name),
            "the hub's cache has no such model",
            fix="thermocline list shows what there is; models of Ollama and LM Studio are removed by those",
        )
    if takes_all:
        if name.quant:
            raise HubError(str(name), "--all takes every quantisation", fix="leave out one of both")
        return cached
    if not name.quant and len(cached) > 1:
        there = ", ".join(model.name for model in cached)
        raise HubError(
            str(name), f"there are several ({there})", fix="name one of them, or give --all"
        )
    by_variant = {model.variant: model for model in cached}
    return (by_variant[choose(str(name), tuple(by_variant), name.quant)],)


def _on_this_machine() -> list[ListedModel]:
    from thermocline.cli.model_tables import HUB_CACHE, ListedModel
    from thermocline.environment import lm_studio_folders, ollama_folders
    from thermocline.hub.cache import cached_models
    from thermocline.hub.other_programs import lm_studio_models, ollama_models

    found = [
        ListedModel(model.name, HUB_CACHE, model.variant.nbytes, os.fspath(model.path))
        for model in cached_models()
    ]
    others = [model for folder in ollama_folders() for model in ollama_models(folder)]
    others += [model for folder in lm_studio_folders() for model in lm_studio_models(folder)]
    found += [
        ListedModel(model.name, model.program, model.nbytes, os.fspath(model.path))
        for model in others
    ]
    return found
