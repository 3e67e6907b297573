"""The flag -hf of every command that takes a MODEL: a model by its name on the hub, downloaded once.

Turns names into paths, and says on stderr what it waits for. Knows neither the hub's protocol nor its cache.
"""

from __future__ import annotations

import os
import sys
import time
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from thermocline.cli.console import Progress, note
from thermocline.cli.waiting import time_left
from thermocline.errors import ConfigError, HubError, HubUnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.hub.cache import CachedModel
    from thermocline.hub.names import HubName
    from thermocline.hub.variants import Variant

_HEADER_ALONE = f"{__name__}.header_alone"

Command = TypeVar("Command", bound="Callable[..., Any]")


def hub_model(
    *, required: bool = False, header_is_enough: bool = False
) -> Callable[[Command], Command]:
    """Return a decorator that adds -hf, and hands the command as `model` the path of what it names.

    It stands below the decorator of the argument MODEL. required: the built-in model does not stand in for a missing one.
    header_is_enough: of a model that is not here only the header is fetched, since the command reads nothing else.
    """
    how = "its header is read without downloading it" if header_is_enough else "downloaded once"

    def decorate(command: Command) -> Command:
        @wraps(command)
        def wrapper(
            *args: Any,  # noqa: ANN401 - whatever the command takes
            model: str | None,
            hf_repo: str | None,
            **values: Any,  # noqa: ANN401
        ) -> Any:  # noqa: ANN401
            if model is not None and hf_repo is not None:
                raise click.UsageError(f"MODEL ({model}) and -hf {hf_repo}: leave one of them out")
            if model is None and hf_repo is None and required:
                raise click.UsageError("Missing argument 'MODEL', or -hf ORG/REPO.")
            if hf_repo is None:
                return command(*args, **values, model=check_path(model))
            path = os.fspath(find_model(hf_repo, header_is_enough=header_is_enough))
            return command(*args, **values, model=path)

        option: Any = click.option(
            "-hf",
            "-hfr",
            "--hf-repo",
            "hf_repo",
            metavar="ORG/REPO[:QUANT]",
            help=f"A model of the Hugging Face hub in place of MODEL: taken from the cache, or {how}. QUANT is a quantisation "
            "(default: Q4_K_M, or the only one) or a file's name.",
        )
        return option(wrapper)  # type: ignore[no-any-return] # click's decorators return what they got

    return decorate


def check_path(model: str | None) -> str | None:
    """Return MODEL as it is. Raises ConfigError if it is no file, but could be a name on the hub."""
    from thermocline.hub.names import looks_like_name, parse_name

    if model is None or Path(model).exists() or not looks_like_name(model):
        return model
    name = parse_name(model)
    context = click.get_current_context(silent=True)
    command = "run" if context is None or context.info_name is None else context.info_name
    raise ConfigError(
        f"{model} is no file. If it is a model of the Hugging Face hub, type thermocline {command} -hf {name}, or "
        f"thermocline pull {name} (downloads it and prints the path of its file)"
    )


def find_model(text: str, *, asks_hub: bool = False, header_is_enough: bool = False) -> Path:
    """Return the path of the model that a name says: out of the cache if it is there, else downloaded now.

    asks_hub: ask the hub for a newer one first. header_is_enough: in place of a download, an empty file with the model's
    header, which is gone when the command ends. Raises HubError.
    """
    from thermocline.hub.cache import cached_models, require_library
    from thermocline.hub.names import parse_name
    from thermocline.hub.variants import DEFAULT_QUANT

    name = parse_name(text)
    require_library()
    cached = cached_models(name.repo)
    if not asks_hub:
        known = _among(cached, name, name.quant or DEFAULT_QUANT)
        if known is not None:
            return known.path
    try:
        variant = _chosen(name)
        return _header(name, variant, cached) if header_is_enough else _download(name, variant)
    except HubUnreachableError as error:
        # Without a quantisation, of those that are here.
        known = _among(cached, name, name.quant)
        if known is None:
            raise
        note(f"{error.what}; {known.name} is taken from the cache as it is")
        return known.path


def _header(name: HubName, variant: Variant, cached: tuple[CachedModel, ...]) -> Path:
    from tempfile import TemporaryDirectory

    from thermocline.hub.headers import fetch_headers

    for model in cached:
        if model.variant.files[0].path == variant.files[0].path:
            return model.path
    context = click.get_current_context()
    context.meta[_HEADER_ALONE] = True
    folder = context.with_resource(TemporaryDirectory(prefix="thermocline-"))
    with Progress() as progress:
        progress.say(f"reading the header of {variant} of {name.repo}")
        path = fetch_headers(name, variant, Path(folder), lambda _, __: None)
    note(f"{variant} of {name.repo} is not here; this is by its header on the hub")
    return path


def has_header_alone() -> bool:
    """Whether the running command's model has a header and no weights."""
    return _HEADER_ALONE in click.get_current_context().meta


def _among(cached: tuple[CachedModel, ...], name: HubName, quant: str) -> CachedModel | None:
    from thermocline.hub.variants import choose

    by_variant = {model.variant: model for model in cached}
    try:
        return by_variant[choose(str(name), tuple(by_variant), quant)]
    except HubError:
        return None


def _chosen(name: HubName) -> Variant:
    """Return what a name means on the hub now; shows what there is where it does not say. Raises HubError."""
    from thermocline.hub.client import hub_files
    from thermocline.hub.variants import choose, group_variants

    with Progress() as progress:
        progress.say(f"asking the hub for {name}")
        variants = group_variants(hub_files(name))
    try:
        return choose(str(name), variants, name.quant)
    except HubError:
        if variants and sys.stderr.isatty():
            from thermocline.cli.model_tables import quants_table, show_on_stderr

            show_on_stderr(quants_table(name.repo, variants))
        raise


def _download(name: HubName, variant: Variant) -> Path:
    from thermocline.hub.client import download

    with Progress() as progress:
        transfer = _Transfer(f"{variant} of {name.repo}", variant.nbytes, progress)
        return download(name, variant, transfer.advance)


class _Transfer:
    """What a download says of itself: a line where somebody watches, else that it began."""

    def __init__(self, what: str, total_bytes: int, progress: Progress) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._progress = progress
        self._done: dict[str, int] = {}
        self._began_s = 0.0

    def advance(self, step: str, num_bytes: int) -> None:
        """Take note of further bytes of a step."""
        from thermocline.units import format_bytes

        if not self._done:
            self._began_s = time.monotonic()
            note(f"downloading {self._what}")
        done = self._done[step] = self._done.get(step, 0) + num_bytes
        elapsed_s = time.monotonic() - self._began_s
        line = f"{step}: {format_bytes(done)} of {format_bytes(self._total_bytes)}"
        if elapsed_s > 1 and len(self._done) == 1:
            rate = max(1.0, done / elapsed_s)
            left_s = max(0, self._total_bytes - done) / rate
            line += f", {format_bytes(rate)}/s, {time_left(left_s)}"
        self._progress.say(line)
