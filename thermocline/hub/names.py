"""Names of models on the hub, as people type them: ORG/REPO, ORG/REPO:QUANT, ORG/REPO:FILE.gguf. Pure text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from thermocline.errors import HubError

# The hub's own rule for each half. "--" stands for the slash in folder names of the cache.
_PART: Final = r"(?!.*(?:--|\.\.))[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPO: Final = re.compile(rf"{_PART}/{_PART}")
_QUANT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/+ -]{0,254}")
# What a browser shows, and what other programs want before the name.
_PREFIXES: Final = ("https://huggingface.co/", "huggingface.co/", "https://hf.co/", "hf.co/")
_HOW_TO_WRITE: Final = "write ORG/REPO, ORG/REPO:QUANT or ORG/REPO:FILE.gguf"


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository, and which of its models: a quantisation, a file, or "" where the name does not say."""

    repo: str
    quant: str = ""

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


def parse_name(text: str) -> HubName:
    """Return the name that `text` spells; the hub's address may stand before it. Raises HubError."""
    short = text
    for prefix in _PREFIXES:
        short = short.removeprefix(prefix)
    repo, colon, quant = short.partition(":")
    if not _REPO.fullmatch(repo):
        raise HubError(text, "this is no name of a model on the hub", fix=_HOW_TO_WRITE)
    if colon and not _QUANT.fullmatch(quant):
        raise HubError(
            text, "what follows the colon is no quantisation and no file", fix=_HOW_TO_WRITE
        )
    return HubName(repo, quant)


def looks_like_name(text: str) -> bool:
    """Whether `text` can be a name, and is hardly meant as a path."""
    if text.partition(":")[0].lower().endswith(".gguf"):
        return False
    try:
        parse_name(text)
    except HubError:
        return False
    return True
