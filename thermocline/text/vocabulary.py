"""The tokenizer half of a GGUF file as checked, typed data.

Owns `TokenizerData` and its validation. It knows no engine and not how the file was read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.modelfile.cursor import quoted
from thermocline.text.tokenization.pretokenizers import find_pre_tokenizer
from thermocline.text.tokenization.token_kinds import FIM_NAMES, TokenType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thermocline.modelfile.layout import Metadata

BYTE_BPE = "gpt2"
SENTENCEPIECE = "llama"
GEMMA4 = "gemma4"
SUPPORTED_MODELS = (BYTE_BPE, SENTENCEPIECE, GEMMA4)

_NO_IDS: Mapping[str, int] = MappingProxyType({})
# Older converters call three of the fill-in-the-middle ids by other names.
_OLD_FIM_NAMES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}


@dataclass(frozen=True, slots=True)
class TokenizerData:
    """Everything that a tokenizer is built from; checked at birth.

    `model` is "gpt2" (byte-level BPE, or BPE over characters where `pre` says so), "gemma4" (BPE over
    characters) or "llama" (SentencePiece). `tokens[i]` is the text of id i as the file writes it;
    `token_types[i]` is a `TokenType` value; `merges` are "left right", best first, none for "llama";
    `scores` are one per token for "llama", else not used. Ids are None where the model has no such
    token. `fim_ids` holds the fill-in-the-middle ids that the file names (keys fim_pre, fim_suf,
    fim_mid, fim_pad, fim_rep, fim_sep). `add_space_prefix`: a space goes before the text, and again
    after each special token ("llama" only). `never_ids`: tokens that no answer has, since they stand for something that is
    no text; ids beyond the vocabulary do not count. `swallows_blanks`: as Phi 3 does, see TokenRoles. An empty
    token text becomes "[EMPTY_<id>]", as in llama.cpp.

    Raises UnsupportedModelError for a tokenizer model or pre-tokenizer that is not known, and
    ModelFileError for data that contradicts itself.
    """

    model: str
    pre: str
    tokens: Sequence[str]
    token_types: Sequence[int]
    merges: Sequence[str] = ()
    scores: Sequence[float] = ()
    bos_id: int | None = None
    eos_id: int | None = None
    eot_id: int | None = None
    eom_id: int | None = None
    padding_id: int | None = None
    unknown_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False
    swallows_blanks: bool = False
    fim_ids: Mapping[str, int] = field(default_factory=lambda: _NO_IDS)
    never_ids: Sequence[int] = ()
    path: str = "(tokenizer data)"

    def __post_init__(self) -> None:
        if self.model not in SUPPORTED_MODELS:
            raise UnsupportedModelError(
                self.path,
                f"unknown tokenizer model (known: {', '.join(SUPPORTED_MODELS)})",
                unsupported=(self.model or "(none named)",),
                fix="use a model with a byte-level BPE or SentencePiece BPE vocabulary",
            )
        if self.model != SENTENCEPIECE:
            find_pre_tokenizer(self.pre, path=self.path)
        if not self.tokens:
            raise self._fault("tokenizer.ggml.tokens is empty")
        self._check_length("token_type", self.token_types)
        if self.model == SENTENCEPIECE:
            self._check_length("scores", self.scores)
        self._check_ids()
        for name, wanted, token_id in (
            ("BOS", self.add_bos, self.bos_id),
            ("EOS", self.add_eos, self.eos_id),
        ):
            if wanted and token_id is None:
                raise self._fault(
                    f"{'an' if name == 'EOS' else 'a'} {name} token is to be added, but "
                    f"tokenizer.ggml.{name.lower()}_token_id is missing"
                )

    def _check_length(self, key: str, values: Sequence[object]) -> None:
        if len(values) != len(self.tokens):
            raise self._fault(
                f"tokenizer.ggml.{key} has {len(values)} entries for {len(self.tokens)} tokens"
            )

    def _check_ids(self) -> None:
        named = {
            "bos": self.bos_id,
            "eos": self.eos_id,
            "eot": self.eot_id,
            "eom": self.eom_id,
            **self.fim_ids,
        }
        for name, token_id in named.items():
            if token_id is not None and not 0 <= token_id < len(self.tokens):
                raise self._fault(
                    f"tokenizer.ggml.{name}_token_id is {token_id}, but the vocabulary has "
                    f"{len(self.tokens)} tokens"
                )

    def _fault(self, what: str) -> ModelFileError:
        return ModelFileError(
            self.path, what, fix="convert the model again, its tokenizer metadata is inconsistent"
        )

    @classmethod
    def from_metadata(cls, metadata: Metadata, *, path: str = "model") -> TokenizerData:
        """Read the `tokenizer.ggml.*` keys; `path` names the file in errors.

        Keys that are not known are left alone. Raises as the class does, and ModelFileError from
        `metadata` for a missing or mistyped key.
        """
        model = metadata.get_str("tokenizer.ggml.model", "")
        pre = GEMMA4 if model == GEMMA4 else metadata.get_str("tokenizer.ggml.pre", "")
        if model not in SUPPORTED_MODELS:
            return cls(model=model, pre=pre, tokens=(), token_types=(), path=path)
        tokens = metadata.get_strings("tokenizer.ggml.tokens")
        normal = (int(TokenType.NORMAL),) * len(tokens)
        is_pieces = model == SENTENCEPIECE
        known = _KnownIds(metadata, len(tokens))
        # A vocabulary of SentencePiece has <unk>, <s> and </s> first unless the file says otherwise.
        first = (0, 1, 2) if is_pieces and len(tokens) > 2 else (None, None, None)
        adds_bos = is_pieces or find_pre_tokenizer(pre, path=path).add_bos
        says_bos = metadata.get_bool("tokenizer.ggml.add_bos_token", adds_bos)
        merges_default = () if pre == "kimi-k2" else None
        return cls(
            model=model,
            pre=pre,
            tokens=tokens,
            token_types=metadata.get_ints("tokenizer.ggml.token_type", normal),
            merges=() if is_pieces else _merges(metadata, merges_default),
            scores=metadata.get_floats("tokenizer.ggml.scores", (0.0,) * len(tokens))
            if is_pieces
            else (),
            bos_id=known.get("bos", first[1]),
            eos_id=known.get("eos", first[2]),
            eot_id=known.get("eot"),
            eom_id=known.get("eom"),
            padding_id=known.get_if_valid("padding"),
            unknown_id=known.get_if_valid("unknown", first[0]),
            # llama.cpp adds BOS for Gemma 4 whatever the file says.
            add_bos=says_bos or pre == GEMMA4,
            add_eos=metadata.get_bool("tokenizer.ggml.add_eos_token", False),
            add_space_prefix=is_pieces
            and metadata.get_bool("tokenizer.ggml.add_space_prefix", True),
            swallows_blanks=_is_phi3(metadata),
            fim_ids=known.fim_ids(),
            never_ids=metadata.get_ints("tokenizer.ggml.suppress_tokens", ()),
            path=path,
        )

    def token_texts(self) -> list[str]:
        """Texts by id, the empty ones named. Raises ModelFileError where two ids share a text."""
        texts = [text or f"[EMPTY_{index}]" for index, text in enumerate(self.tokens)]
        if len(set(texts)) != len(texts):
            first: dict[str, int] = {}
            for index, text in enumerate(texts):
                if first.setdefault(text, index) != index:
                    raise self._fault(f"tokens {first[text]} and {index} are both {quoted(text)}")
        return texts

    def merge_pairs(self) -> list[tuple[str, str]]:
        """Merges as pairs, best first, a repeated pair once.

        The pair is split at the first space after the first character, which itself may be a space.
        Raises ModelFileError for an entry without a second part.
        """
        pairs: dict[tuple[str, str], None] = {}
        for index, merge in enumerate(self.merges):
            left, space, right = merge[1:].partition(" ")
            if not space or not right:
                what = f"{quoted(merge)}, not two tokens"
                raise self._fault(f"tokenizer.ggml.merges[{index}] is {what}")
            pairs[merge[0] + left, right] = None
        return list(pairs)


class _KnownIds:
    """The `tokenizer.ggml.*_token_id` keys of one file."""

    def __init__(self, metadata: Metadata, num_tokens: int) -> None:
        self._metadata = metadata
        self._num_tokens = num_tokens

    def get(self, name: str, default: int | None = None) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        return self._metadata.get_int(key) if key in self._metadata else default

    def get_if_valid(self, name: str, default: int | None = None) -> int | None:
        """The id of a token that is not needed: many files name one past the end for padding."""
        token_id = self.get(name)
        return default if token_id is None or not 0 <= token_id < self._num_tokens else token_id

    def fim_ids(self) -> Mapping[str, int]:
        found = {}
        for name in FIM_NAMES:
            token_id = self.get(name, self.get(_OLD_FIM_NAMES.get(name, name)))
            if token_id is not None:
                found[name] = token_id
        return MappingProxyType(found)


def _merges(metadata: Metadata, default: tuple[str, ...] | None) -> Sequence[str]:
    key = "tokenizer.ggml.merges"
    return metadata.get_strings(key) if default is None else metadata.get_strings(key, default)


def _is_phi3(metadata: Metadata) -> bool:
    """Whether the file is a Phi 3, which only its name tells."""
    name = metadata.get_str("general.name", "").lower()
    return "phi-3" in name or "phi3" in name
