"""Random strings on which two tokenizers are compared, and the comparison."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.unit.text.vocabularies import SPECIALS, hostile_text, natural_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tests.oracle.llama_vocabulary import LlamaVocabulary
    from thermocline.text.tokenizer import Tokenizer

_RUNS = (
    "a",
    "1",
    " ",
    "\n",
    "\t",
    "=",
    "中",
    "é",
    "ab",
    "1 ",
    "a\n",
    " \n",
    "\u2581",
    "\U0001f44d",
)


def random_strings(count: int, *, seed: int, specials: Sequence[str] = SPECIALS) -> Iterator[str]:
    """`count` strings: natural and hostile ones, and runs of one thing up to 600 long."""
    rng = random.Random(seed)
    for index in range(count):
        if index % 50 == 49:
            yield rng.choice(_RUNS) * rng.randint(1, 600)
        elif index % 5 == 0:
            yield natural_text(rng, 30)
        else:
            yield hostile_text(rng, specials=specials)


def assert_same_ids(
    ours: Tokenizer, llama: LlamaVocabulary, texts: Iterable[str], *, parse_special: bool
) -> None:
    """Both give the same ids for each text."""
    for text in texts:
        expected = llama.encode(text, parse_special=parse_special)
        ids = ours.encode(text, parse_special=parse_special, add_bos=False)
        assert ids == expected, repr(text)


def assert_same_tokens(ours: Tokenizer, llama: LlamaVocabulary) -> None:
    """Bytes, kind and end-of-answer flag of every token agree."""
    assert ours.vocab_size == llama.vocab_size
    for token_id in range(ours.vocab_size):
        piece = llama.piece(token_id)
        if piece.startswith(b"[UNK_BYTE_"):  # a token outside of the byte alphabet is its own text
            piece = ours.token_text(token_id).encode()
        assert ours.token_bytes(token_id) == piece, token_id
        is_hidden = llama.is_control(token_id) or llama.is_unknown(token_id)
        assert ours.is_control(token_id) == is_hidden, token_id
        assert (token_id in ours.end_ids) == llama.is_end(token_id), token_id
