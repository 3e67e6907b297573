"""One vocabulary: text -> token ids -> text.

Owns what all kinds of vocabulary share: special tokens in text, BOS and EOS, the bytes of a token. The
engines in byte_bpe.py, raw_bpe.py and sentencepiece.py do the rest. It follows llama.cpp id by id, which
means no Unicode normalisation (`e` + U+0301 stays two characters). It knows no chat messages and no files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from thermocline.errors import PromptTooLongError, RequestError
from thermocline.text.token_roles import TokenRoles
from thermocline.text.tokenization.byte_bpe import ByteBpe
from thermocline.text.tokenization.pretokenizers import find_pre_tokenizer
from thermocline.text.tokenization.raw_bpe import RawBpe
from thermocline.text.tokenization.sentencepiece import SentencePiece
from thermocline.text.tokenization.special_tokens import SpecialTokens
from thermocline.text.tokenization.text_engine import named_byte
from thermocline.text.tokenization.token_kinds import TokenType
from thermocline.text.vocabulary import SENTENCEPIECE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from thermocline.text.tokenization.text_engine import TextEngine
    from thermocline.text.vocabulary import TokenizerData

MAX_TEXT_BYTES = 4 << 20
"""One call encodes at most this much: one to four million tokens, and 1 to 8 s per million bytes."""


class Tokenizer:
    """Encodes and decodes with one vocabulary. Immutable after construction, so thread-safe.

    Token types, as in llama.cpp: CONTROL and UNKNOWN tokens are found in text only with
    `parse_special`; USER_DEFINED tokens always, before any other cutting; NORMAL tokens by merging;
    BYTE, UNUSED and UNDEFINED tokens are never searched for. `steering_ids` and `control_texts` are those that are
    found only with `parse_special`: more than the control tokens where TokenRoles says so. `never_ids`: no answer has them.
    `add_space_prefix`: `encode` puts a space before a text, which is in the bytes of its first token.

    Raises ModelFileError for tokens or merges that contradict each other.
    """

    def __init__(self, data: TokenizerData, *, max_text_bytes: int = MAX_TEXT_BYTES) -> None:
        self._path = data.path
        self._max_text_bytes = max_text_bytes
        self._texts = data.token_texts()
        self._id_of = {text: index for index, text in enumerate(self._texts)}
        self._engine = _build_engine(data, self._id_of)
        roles = TokenRoles(data, self._id_of)
        self._types = roles.types
        self._hidden_ids = roles.hidden_ids
        self._special_ids = roles.special_ids
        self._specials = SpecialTokens(
            [(token_id, self._texts[token_id]) for token_id in sorted(roles.special_ids)],
            steering=roles.steering_ids,
            swallowing=roles.swallowing_ids,
        )
        # Blanks after some tokens belong to them, however many there are.
        self._max_token_chars = None if roles.swallowing_ids else max(map(len, self._texts))
        self.add_space_prefix = data.add_space_prefix
        self.vocab_size = len(self._texts)
        self.bos_id = data.bos_id
        self.eos_id = data.eos_id
        self.eot_id = data.eot_id
        self.add_bos = data.add_bos
        self.add_eos = data.add_eos
        self.end_ids = roles.end_ids
        self.never_ids = frozenset(n for n in data.never_ids if 0 <= n < self.vocab_size)
        self.steering_ids = roles.steering_ids
        self.control_texts = frozenset(self._texts[token_id] for token_id in roles.steering_ids)

    def __repr__(self) -> str:
        return f"Tokenizer(path={self._path!r}, vocab_size={self.vocab_size})"

    def encode(
        self,
        text: str,
        *,
        parse_special: bool = False,
        add_bos: bool | None = None,
        max_tokens: int | None = None,
        truncate: bool = False,
        on_slice: Callable[[], None] | None = None,
    ) -> list[int]:
        """Token ids of `text`, [T].

        With `parse_special` the texts of control tokens become those tokens; never set it for text
        that a user wrote. `add_bos` None means what the model file says, of BOS before the text and of
        EOS after it; True and False say whether BOS is added, and EOS is not. max_tokens: the text is given up as
        soon as it is certain to have more, at the latest one slice after; truncate: then the ids so far are returned,
        more than max_tokens, instead of an error. on_slice: called between slices; what it raises ends the work.
        Raises RequestError for text that is too long, is not valid Unicode, or holds a byte that the
        vocabulary lacks; PromptTooLongError beyond max_tokens.
        """
        self._check_text(text, None if truncate else max_tokens)
        ids: list[int] = []
        if self.add_bos if add_bos is None else add_bos:
            if self.bos_id is None:
                raise RequestError(
                    "this model has no BOS token: do not ask for one", param="add_bos"
                )
            ids.append(self.bos_id)
        pieces = self._specials.split(text, parse_special=parse_special)
        ids += self._encode_pieces(
            pieces, max_tokens=max_tokens, truncate=truncate, on_slice=on_slice
        )
        if add_bos is None and self.add_eos:
            assert self.eos_id is not None
            ids.append(self.eos_id)
        return ids

    def encode_parts(
        self,
        parts: Iterable[str | int],
        *,
        max_tokens: int | None = None,
        on_slice: Callable[[], None] | None = None,
    ) -> list[int]:
        """Token ids of texts and special tokens in a row, [T]; neither BOS nor EOS is added.

        The texts may be a user's: control tokens are only those that are given as ids. Texts side by
        side are cut apart. max_tokens, on_slice: as of `encode`. Raises as `encode` does.
        """
        pieces: list[str | int] = []
        token_id: int | None = None
        for part in parts:
            if isinstance(part, int):
                token_id = part
                pieces.append(part)
            else:
                self._check_text(part, max_tokens)
                rest = self._specials.after(token_id, part)
                pieces += self._specials.split(rest, parse_special=False)
                token_id = None
        return self._encode_pieces(pieces, max_tokens=max_tokens, on_slice=on_slice)

    def encode_more(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of text that goes on where other text ended, [T]: nothing is put before it.

        parse_special: as of `encode`. Raises RequestError as `encode` does.
        """
        self._check_text(text)
        pieces = self._specials.split(text, parse_special=parse_special)
        return self._encode_pieces(pieces, is_after_special=False)

    def _encode_pieces(
        self,
        pieces: Iterable[str | int],
        *,
        is_after_special: bool = True,
        max_tokens: int | None = None,
        truncate: bool = False,
        on_slice: Callable[[], None] | None = None,
    ) -> list[int]:
        ids: list[int] = []
        for part in self._encoded(pieces, is_after_special=is_after_special):
            ids += part
            if on_slice is not None:
                on_slice()
            if max_tokens is not None and len(ids) > max_tokens:
                if truncate:
                    return ids
                raise PromptTooLongError(len(ids), max_tokens, is_least=True)
        return ids

    def _encoded(
        self, pieces: Iterable[str | int], *, is_after_special: bool
    ) -> Iterator[list[int]]:
        for piece in pieces:
            if isinstance(piece, int):
                yield [piece]
                is_after_special = True
            else:
                space = " " if is_after_special and self.add_space_prefix else ""
                yield from self._engine.encode(space + piece)
                is_after_special = False

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that form no character become U+FFFD. Raises RequestError on bad ids.

        Where `encode` puts a space before the text, the first token loses one, as in llama.cpp: not
        after a BOS token that `skip_special` leaves out. With `skip_special` control tokens are left
        out.
        """
        ids = list(ids)
        strips = self.add_space_prefix
        if skip_special and self.add_bos and ids[:1] == [self.bos_id]:
            strips = False
            del ids[0]
        if skip_special and self.add_eos and ids[-1:] == [self.eos_id]:
            del ids[-1]
        pieces = [
            b"" if skip_special and self.is_control(token_id) else self.token_bytes(token_id)
            for token_id in ids
        ]
        if strips and pieces:
            pieces[0] = pieces[0].removeprefix(b" ")
        return b"".join(pieces).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token.

        Control, unknown and user-defined tokens give their own text; BYTE tokens the byte that they
        name; UNUSED and UNDEFINED tokens nothing. Raises RequestError if there is no such id.
        """
        self._check_id(token_id)
        text, kind = self._texts[token_id], self._types[token_id]
        if token_id in self._special_ids:
            return text.encode()
        if kind == TokenType.BYTE:
            return named_byte(text)
        return self._engine.piece_bytes(text) if kind == TokenType.NORMAL else b""

    def is_control(self, token_id: int) -> bool:
        """True for CONTROL and UNKNOWN tokens, which are no text. Raises RequestError on a bad id."""
        self._check_id(token_id)
        return token_id in self._hidden_ids

    def token_text(self, token_id: int) -> str:
        """The vocabulary entry of an id, as the file writes it. Raises RequestError on a bad id."""
        self._check_id(token_id)
        return self._texts[token_id]

    def token_id(self, text: str) -> int | None:
        """The id whose vocabulary entry is exactly `text`, or None."""
        return self._id_of.get(text)

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(
                f"token id {token_id} is outside the vocabulary: use 0 to {self.vocab_size - 1}",
                param="prompt",
            )

    def _check_text(self, text: str, max_tokens: int | None = None) -> None:
        if max_tokens is not None and self._max_token_chars is not None:
            # Each token has at most so many characters.
            least = -(-len(text) // self._max_token_chars)
            if least > max_tokens:
                raise PromptTooLongError(least, max_tokens, is_least=True)
        if len(text) > self._max_text_bytes:
            raise self._too_long(len(text))
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has half a surrogate pair at character {error.start}: send valid Unicode",
                param="prompt",
            ) from error
        if len(raw) > self._max_text_bytes:
            raise self._too_long(len(raw))
        lacking = self._engine.find_lacking(text)
        if lacking is not None:
            raise RequestError(
                f"the vocabulary has no token for {lacking}: leave that character out",
                param="prompt",
            )

    def _too_long(self, num_bytes: int) -> RequestError:
        return RequestError(
            f"the text has {num_bytes} bytes: send at most {self._max_text_bytes}", param="prompt"
        )


def _build_engine(data: TokenizerData, id_of: Mapping[str, int]) -> TextEngine:
    if data.model == SENTENCEPIECE:
        return SentencePiece(id_of, data.scores)
    pre = find_pre_tokenizer(data.pre, path=data.path)
    if pre.is_raw:
        return RawBpe(id_of, data.merge_pairs(), whole_line_ends=pre.ignore_merges)
    return ByteBpe(id_of, data.merge_pairs(), pre)
