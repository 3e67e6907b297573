"""The byte-level BPE of the demo model: learns it from the corpus and encodes documents.

Token ids: the 256 bytes first, then one token per merge, the special tokens last. The text is split
as Qwen2 models do. Knows no model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.demo_model import corpus

if TYPE_CHECKING:
    from scripts.demo_model.corpus import Document

NUM_TOKENS = 2304
DECISION_TOKENS = 6  # the role and its line break, then four tokens of the answer itself
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A trained tokenizer with its tokens by id and its merges ("left right") by rank."""

    tokenizer: Tokenizer
    tokens: tuple[str, ...]
    merges: tuple[str, ...]

    def special_id(self, token: str) -> int:
        """Id of one of the special tokens."""
        return self.tokens.index(token)

    def encode(
        self, document: Document, decision_weight: float = 1.0
    ) -> tuple[list[int], list[float]]:
        """Token ids of a document and the weight of each in the loss.

        The first tokens of each answer count `decision_weight` times.
        """
        ids: list[int] = []
        weights: list[float] = []
        for piece in document:
            new = (
                [self.special_id(piece.text)]
                if piece.is_special
                else self.tokenizer.encode(piece.text, add_special_tokens=False).ids
            )
            ids.extend(new)
            first = min(DECISION_TOKENS, len(new)) if piece.decides else 0
            weights.extend([piece.weight * decision_weight] * first)
            weights.extend([piece.weight] * (len(new) - first))
        return ids, weights


def learn() -> Vocabulary:
    """Learn the merges from all questions, answers and paragraphs; the same ones every time."""
    tokenizer = _tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS - len(corpus.SPECIAL_TOKENS),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_training_texts(), trainer)
    state = json.loads(tokenizer.to_str())["model"]
    pairs = [m if isinstance(m, list) else m.split(" ") for m in state["merges"]]
    return from_merges([f"{left} {right}" for left, right in pairs])


def from_merges(merges: list[str]) -> Vocabulary:
    """Build the vocabulary that these merges define."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = list(dict.fromkeys([*alphabet, *(m.replace(" ", "") for m in merges)]))
    pairs = [(left, right) for left, _, right in (m.partition(" ") for m in merges)]
    tokenizer = _tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, pairs))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in corpus.SPECIAL_TOKENS])
    tokens.extend(corpus.SPECIAL_TOKENS)
    return Vocabulary(tokenizer, tuple(tokens), tuple(merges))


def _tokenizer(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _training_texts() -> list[str]:
    texts = list(corpus.load_prose())
    for intent in corpus.load_intents():
        texts.extend([intent.answer] * 3)  # answers are what the model writes
        texts.extend(q if i % 2 else q.lower() for i, q in enumerate(intent.questions[:40]))
    return texts
