"""The tokenizer half of a GGUF file as checked, typed data.

Owns `TokenizerData` and its validation. It knows neither BPE nor how the file was read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from thermocline.errors import ModelFileError, UnsupportedModelError
from thermocline.text.pretokenizers import find_pre_tokenizer
from thermocline.text.token_kinds import END_NAMES, FIM_ENDING, FIM_NAMES, MESSAGE_ENDS, TokenType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thermocline.modelfile.layout import Metadata

SUPPORTED_MODELS = ("gpt2",)


@dataclass(frozen=True, slots=True)
class TokenizerData:
    """Everything that a tokenizer is built from; checked at birth.

    `tokens[i]` is the text of id i as the file writes it (bytes in the byte alphabet, except control
    and user-defined tokens, which are plain text); `token_types[i]` is a `TokenType` value; `merges`
    are "left right", best first. Ids are None where the model has no such token. `fim_ids` holds the
    fill-in-the-middle ids that the file names (keys fim_pre, fim_suf, fim_mid, fim_pad, fim_rep,
    fim_sep). An empty token text becomes "[EMPTY_<id>]", as in llama.cpp.

    Raises UnsupportedModelError for a tokenizer model or pre-tokenizer that is not known, and
    ModelFileError for data that contradicts itself.
    """

    model: str
    pre: str
    tokens: Sequence[str]
    token_types: Sequence[int]
    merges: Sequence[str]
    bos_id: int | None = None
    eos_id: int | None = None
    eot_id: int | None = None
    padding_id: int | None = None
    unknown_id: int | None = None
    add_bos: bool = False
    add_space_prefix: bool = False
    fim_ids: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    path: str = "(tokenizer data)"

    def __post_init__(self) -> None:
        if self.model not in SUPPORTED_MODELS:
            raise UnsupportedModelError(
                self.path,
                f"unknown tokenizer model (known: {', '.join(SUPPORTED_MODELS)})",
                unsupported=(self.model or "(none named)",),
                fix="use a model with a byte-level BPE vocabulary",
            )
        find_pre_tokenizer(self.pre, path=self.path)
        if not self.tokens:
            raise self._fault("tokenizer.ggml.tokens is empty")
        if len(self.token_types) != len(self.tokens):
            raise self._fault(
                f"tokenizer.ggml.token_type has {len(self.token_types)} entries for "
                f"{len(self.tokens)} tokens"
            )
        self._check_ids()
        if self.add_bos and self.bos_id is None:
            raise self._fault(
                "a BOS token is to be added, but tokenizer.ggml.bos_token_id is missing"
            )

    def _check_ids(self) -> None:
        named = {
            "bos": self.bos_id,
            "eos": self.eos_id,
            "eot": self.eot_id,
            "padding": self.padding_id,
            "unknown": self.unknown_id,
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

        Raises as the class does, and ModelFileError from `metadata` for a missing or mistyped key.
        """

        def token_id(name: str) -> int | None:
            key = f"tokenizer.ggml.{name}_token_id"
            return metadata.get_int(key) if key in metadata else None

        model = metadata.get_str("tokenizer.ggml.model", "")
        pre = metadata.get_str("tokenizer.ggml.pre", "")
        if model not in SUPPORTED_MODELS:
            return cls(model=model, pre=pre, tokens=(), token_types=(), merges=(), path=path)
        tokens = metadata.get_strings("tokenizer.ggml.tokens")
        normal = (int(TokenType.NORMAL),) * len(tokens)
        fim_ids = {name: found for name in FIM_NAMES if (found := token_id(name)) is not None}
        return cls(
            model=model,
            pre=pre,
            tokens=tokens,
            token_types=metadata.get_ints("tokenizer.ggml.token_type", normal),
            merges=metadata.get_strings("tokenizer.ggml.merges"),
            bos_id=token_id("bos"),
            eos_id=token_id("eos"),
            eot_id=token_id("eot"),
            padding_id=token_id("padding"),
            unknown_id=token_id("unknown"),
            add_bos=metadata.get_bool(
                "tokenizer.ggml.add_bos_token", find_pre_tokenizer(pre, path=path).add_bos
            ),
            add_space_prefix=metadata.get_bool("tokenizer.ggml.add_space_prefix", False),
            fim_ids=MappingProxyType(fim_ids),
            path=path,
        )

    def token_texts(self) -> list[str]:
        """Texts by id, the empty ones named. Raises ModelFileError where two ids share a text."""
        texts = [text or f"[EMPTY_{index}]" for index, text in enumerate(self.tokens)]
        if len(set(texts)) != len(texts):
            first: dict[str, int] = {}
            for index, text in enumerate(texts):
                if first.setdefault(text, index) != index:
                    raise self._fault(f"tokens {first[text]} and {index} are both {text!r}")
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
                raise self._fault(f"tokenizer.ggml.merges[{index}] is {merge!r}, not two tokens")
            pairs[merge[0] + left, right] = None
        return list(pairs)

    def resolved_types(self, id_of: Mapping[str, int]) -> list[int]:
        """Types by id, with tokens of a well-known name taken as control tokens.

        A converter may leave <|im_end|> or <|fim_prefix|> as user-defined or normal text; user text
        must still not be able to form them.
        """
        types = [int(value) for value in self.token_types]
        names = set(END_NAMES)
        for kind, texts in FIM_NAMES.items():
            if kind not in self.fim_ids:
                names |= texts
        for name in names & id_of.keys():
            types[id_of[name]] = int(TokenType.CONTROL)
        return types

    def end_ids(self, id_of: Mapping[str, int]) -> frozenset[int]:
        """Ids after which an answer is over: EOS, EOT, well-known names, and the
        fill-in-the-middle tokens for padding, repository and file separator."""
        found = {id_of[name] for name in END_NAMES & id_of.keys()}
        found |= {token_id for token_id in (self.eos_id, self.eot_id) if token_id is not None}
        for kind in FIM_ENDING:
            if kind in self.fim_ids:
                found.add(self.fim_ids[kind])
            else:
                found |= {id_of[name] for name in FIM_NAMES[kind] & id_of.keys()}
        return frozenset(found - self._message_ends(id_of))

    def _message_ends(self, id_of: Mapping[str, int]) -> set[int]:
        """Ids of tokens that end a message and not the answer: another message may follow."""
        return {
            id_of[end]
            for end, others in MESSAGE_ENDS.items()
            if end in id_of and any(id_of.keys() >= names for names in others)
        }
