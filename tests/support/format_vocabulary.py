"""A byte vocabulary whose control tokens are a format's marks, or none of them."""

from __future__ import annotations

import re

from thermocline.text.format_table import THINK
from thermocline.text.token_kinds import TokenType, byte_alphabet
from thermocline.text.tokenizer import Tokenizer
from thermocline.text.vocabulary import TokenizerData

# What vocabularies hold as one token: words between these brackets, and Mistral's in capitals.
_TOKEN = re.compile(r"<\|?[^<>\s]*?\|?>|<｜[^<>｜]*｜>|</[^<>\s]+>|\[/?[A-Z_]+\]")
ENDS = ("<|im_end|>", "<|call|>", "<|return|>")


def control_words(row):
    """Return the marks of a format that a vocabulary would hold as control tokens."""
    marks = row.reasoning or THINK
    words = {}
    for text in (*row.marks(), marks.begin, marks.end):
        words |= dict.fromkeys(_TOKEN.findall(text))
    return [word for word in words if "=" not in word]


def vocabulary(words=(), ends=ENDS):
    """Return a tokenizer of single bytes, some frequent words, and `words` as control tokens."""
    tokens = list(byte_alphabet())
    tokens += ["Ġt", "he", "in", "er", '":', '{"', "},"]
    merges = ["Ġ t", "h e", "i n", "e r", '" :', '{ "', "} ,"]
    types = [int(TokenType.NORMAL)] * len(tokens)
    special = [word for word in dict.fromkeys((*words, *ends)) if word not in tokens]
    tokens += special
    types += [int(TokenType.CONTROL)] * len(special)
    data = TokenizerData(
        model="gpt2",
        pre="gpt-2",
        tokens=tokens,
        token_types=types,
        merges=merges,
        eos_id=tokens.index(ends[0]),
    )
    return Tokenizer(data)
