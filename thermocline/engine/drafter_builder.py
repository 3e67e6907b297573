"""Builds the drafters of an engine, and what drives them. A part of the assembly."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from thermocline.engine.draft_file import FILE_DRAFTERS, open_file_drafters
from thermocline.errors import ConfigError, ModelError
from thermocline.models.registry import can_draft, open_next_blocks
from thermocline.speculation.contract import drafter_names
from thermocline.speculation.lookup import LookupDrafter
from thermocline.speculation.next_token import NextTokenDrafter
from thermocline.speculation.speculator import Speculator

if TYPE_CHECKING:
    from thermocline.engine.build_context import BuildContext
    from thermocline.engine.devices import Devices
    from thermocline.speculation.contract import Drafter, HiddenReader

DRAFTERS: Final = ("lookup", "mtp", *FILE_DRAFTERS)
"""The names of all."""


def why_unreadable(devices: Devices) -> str | None:
    """Return why no drafter can read what single layers get or keep; None where they can."""
    if devices.non_expert is None:
        return None
    return "it reads what single layers get or keep, and layers on a device have that to themselves"


def build_speculator(context: BuildContext) -> Speculator:
    """Return what asks the drafters of this model. Raises ConfigError for a drafter that there is not, and ModelError."""
    config = context.config.speculation
    there = ", ".join(("auto", "off", *DRAFTERS))
    try:
        names = drafter_names(config.drafters)
    except ValueError as error:
        raise ConfigError(f"--speculate: {error}; choose of {there}") from error
    unknown = [name for name in names or () if name not in DRAFTERS]
    if unknown:
        raise ConfigError(f"--speculate names {unknown[0]!r}: choose of {there}")
    drafters, why = open_drafters(context), why_unreadable(context.devices)
    absent: dict[str, str] = {}
    if why is not None:
        facts = [each.facts for each in drafters]
        absent = {of.name: why for of in facts if of.reads_layers or of.reads_cache}
    is_none = bool(names) and absent.keys() >= set(names or ())
    return Speculator(
        [each for each in drafters if each.facts.name not in absent],
        enabled=names,
        absent=absent,
        why_none=why if is_none else None,
        fixed_tokens=config.fixed_tokens,
    )


def hidden_readers(speculator: Speculator) -> tuple[HiddenReader, ...]:
    """Return the drafters that read what the last layer gives."""
    readers = [each for each in speculator.drafters if each.facts.reads_hidden]
    return tuple(cast("HiddenReader", reader) for reader in readers)


def open_drafters(context: BuildContext) -> list[Drafter]:
    """Return the drafters that this model can have. Of what is not asked for, nothing is opened that takes memory."""
    drafters: list[Drafter] = [LookupDrafter()]
    names, spec = drafter_names(context.config.speculation.drafters), context.model.spec
    if names is None and can_draft(context.file, spec):
        with suppress(ModelError):  # `info` says why it can not be used
            drafters.append(_next_token_drafter(context))
    elif names is not None and "mtp" in names:
        drafters.append(_next_token_drafter(context))
    return drafters + open_file_drafters(context, names)


def _next_token_drafter(context: BuildContext) -> NextTokenDrafter:
    blocks, cache = open_next_blocks(context.file, context.kernels), context.devices.cache
    model = context.model
    return NextTokenDrafter(
        blocks,
        np.array if model.spec.next_blocks_raw else model.final_norm,
        cache.type,
        cache.num_blocks,
        cache.block_tokens,
        max_requests=context.config.scheduler.max_requests,
    )
