"""Opens the drafter of --draft-model: a small model, or a drafter that was trained for the model. A part of the assembly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from thermocline.errors import ConfigError
from thermocline.kernels.guarded_model import open_guarded_model
from thermocline.models.dflash import DFlashModel, is_dflash
from thermocline.models.draft_model import DraftModel
from thermocline.models.eagle3 import Eagle3Model, is_eagle3
from thermocline.models.gemma4_assistant import AssistantModel, is_assistant
from thermocline.speculation.assistant import AssistantDrafter
from thermocline.speculation.dflash import DFlashDrafter
from thermocline.speculation.eagle3 import Eagle3Drafter
from thermocline.speculation.next_token import NextTokenDrafter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.engine.build_context import BuildContext
    from thermocline.modelfile.reader import ModelFile
    from thermocline.speculation.contract import Drafter

FILE_DRAFTERS: Final = ("model", "dflash", "ddtree", "assistant", "eagle3")
"""Drafters that need a file of their own."""


def open_file_drafters(context: BuildContext, names: Sequence[str] | None) -> list[Drafter]:
    """Return the drafter of the draft model, if it is among `names`; None are all.

    Raises ConfigError where there is no such file, or it can not draft by these names, and ModelError.
    """
    path = context.config.speculation.draft_model
    wanted = [name for name in FILE_DRAFTERS if names is None or name in names]
    if path is None:
        if names is not None and wanted:
            raise ConfigError(
                f"--speculate {wanted[0]} drafts with a file of its own: give --draft-model FILE"
            )
        return []
    if not wanted:
        return []
    file = context.owned.enter_context(open_guarded_model(path))
    there = _names_of(file)
    chosen = [name for name in wanted if name in there]
    if not chosen or (names is not None and len(chosen) < len(wanted)):
        wrong = next(name for name in wanted if name not in there)
        raise ConfigError(
            f"--speculate {wrong}: the file {path} of architecture {file.architecture} drafts as {' or '.join(there)}"
        )
    if names is not None and len(chosen) > 1:
        raise ConfigError(
            "--speculate names dflash and ddtree, which are one file: choose one of them"
        )
    match chosen[-1]:
        case "model":
            return [_small_model(context, file)]
        case "assistant":
            return [_assistant(context, file)]
        case "eagle3":
            return [_eagle3(context, file)]
        case name:
            return [_block_drafter(context, file, is_tree=name == "ddtree")]


def _names_of(file: ModelFile) -> tuple[str, ...]:
    """Return the drafters that a file can be."""
    if is_dflash(file):
        return ("dflash", "ddtree")
    if is_eagle3(file):
        return ("eagle3",)
    return ("assistant",) if is_assistant(file) else ("model",)


def _small_model(context: BuildContext, file: ModelFile) -> Drafter:
    cache = context.devices.cache
    return NextTokenDrafter(
        [DraftModel(file, context.file, context.kernels)],
        context.model.final_norm,
        cache.type,
        cache.num_blocks,
        cache.block_tokens,
        max_requests=context.config.scheduler.max_requests,
        name="model",
    )


def _block_drafter(context: BuildContext, file: ModelFile, *, is_tree: bool) -> Drafter:
    cache = context.devices.cache
    return DFlashDrafter(
        DFlashModel(file, context.file, context.model.spec, context.kernels),
        cache.type,
        cache.num_blocks,
        cache.block_tokens,
        max_requests=context.config.scheduler.max_requests,
        is_tree=is_tree,
    )


def _assistant(context: BuildContext, file: ModelFile) -> Drafter:
    model = AssistantModel(file, context.file, context.model.spec, context.kernels)
    return AssistantDrafter(model, context.model.final_norm, context.cache.kv)


def _eagle3(context: BuildContext, file: ModelFile) -> Drafter:
    cache = context.devices.cache
    return Eagle3Drafter(
        Eagle3Model(file, context.file, context.model.spec, context.kernels),
        cache.type,
        cache.num_blocks,
        cache.block_tokens,
        max_requests=context.config.scheduler.max_requests,
    )
