"""Pre-tokenizer table: the name in `tokenizer.ggml.pre` -> how text is cut before byte-level BPE.

Owns the regular expressions and the two habits that go with a name (whether a whole word in the
vocabulary skips the merges, whether BOS is added when the file does not say). It knows no vocabulary.

Only names whose ids were compared with llama.cpp on thousands of random strings are here
(tests/oracle/test_tokenizer_llama.py); an unknown name is an error, never a silent default.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from thermocline.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How one pre-tokenizer name cuts text.

    `patterns` are Oniguruma expressions applied one after the other: each cuts every piece left by
    the one before into matches and the gaps between them, and drops nothing.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_CONTRACTION = r"'s|'t|'re|'ve|'m|'ll|'d"
_CONTRACTION_ANY_CASE = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LINE_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = _CONTRACTION + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    """One leading mark joins a word; digits as told; punctuation keeps the line ends after it."""
    return (
        _CONTRACTION_ANY_CASE
        + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        + _LINE_TAIL
    )


def _cased_words(digits: str, suffix: str) -> str:
    """A word also ends where ASCII lower case turns to upper: `fooBar` gives `foo`, `Bar`."""
    not_lower, not_upper = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{lead}{not_lower}*{not_upper}+{suffix}|{lead}{not_lower}+{not_upper}*{suffix}|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
        + _LINE_TAIL
    )


_QWEN2 = _words(r"\p{N}")
_QWEN35 = (
    _CONTRACTION_ANY_CASE
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    + _LINE_TAIL
)
_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        "default": PreTokenizer(
            (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
        ),
        "gpt-2": PreTokenizer((_GPT2,)),
        "gpt-4o": PreTokenizer(
            (_cased_words(r"\p{N}{1,3}", _CONTRACTION_ANY_CASE + "?"),),
        ),
        "laguna": PreTokenizer((r"[^\n]+|\n+", _QWEN2)),
        "llama-bpe": _LLAMA3,
        "llama-v3": _LLAMA3,
        "llama3": _LLAMA3,
        "olmo": PreTokenizer((_GPT2,)),
        "qwen2": PreTokenizer((_QWEN2,)),
        "qwen35": PreTokenizer((_QWEN35,)),
        "tekken": PreTokenizer((_cased_words(r"\p{N}", ""),), ignore_merges=True, add_bos=True),
    }
)


def find_pre_tokenizer(name: str, *, path: str) -> PreTokenizer:
    """The entry of `name`. Raises UnsupportedModelError, listing the known names, if there is none."""
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        raise UnsupportedModelError(
            path,
            f"unknown pre-tokenizer (known: {', '.join(sorted(PRE_TOKENIZERS))})",
            unsupported=(name or "(none named)",),
            fix="convert the model with a current converter that names a known pre-tokenizer "
            "in tokenizer.ggml.pre",
        )
    return found
