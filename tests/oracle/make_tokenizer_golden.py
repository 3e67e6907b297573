"""Writes tests/golden/tokenizer_llama_cpp.json: strings and the ids that llama.cpp gives them.

Run in an environment with llama_cpp:  python -m tests.oracle.make_tokenizer_golden
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

from tests.oracle.llama_vocabulary import LlamaVocabulary, write_vocabulary
from tests.unit.text.vocabularies import hostile_text, natural_text, train
from thermocline.text.pretokenizers import PRE_TOKENIZERS

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizer_llama_cpp.json"
NUM_STRINGS = 160
ALIASES = {"llama3", "llama-v3"}  # the same table entry as llama-bpe


def main() -> None:
    """Train one vocabulary, encode the strings with it under every pre-tokenizer name, write all."""
    rng = random.Random(2024)
    strings = [
        natural_text(rng, 12) if index % 5 == 0 else hostile_text(rng, 10)
        for index in range(NUM_STRINGS)
    ]
    vocabulary = train("qwen2", vocab_size=1500, num_words=40_000)
    ids = {}
    with tempfile.TemporaryDirectory() as folder:
        for pre in sorted(PRE_TOKENIZERS.keys() - ALIASES):
            path = Path(folder) / f"{pre}.gguf"
            write_vocabulary(path, vocabulary.data(pre))
            llama = LlamaVocabulary(path)
            ids[pre] = {"plain": [llama.encode(text, parse_special=False) for text in strings]}
            if pre == "qwen2":
                special = [llama.encode(text, parse_special=True) for text in strings]
                ids[pre]["parse_special"] = special
            llama.close()
    golden = {
        "made_by": "python -m tests.oracle.make_tokenizer_golden",
        "tokens": vocabulary.tokens,
        "token_types": vocabulary.token_types,
        "merges": vocabulary.merges,
        "strings": strings,
        "ids": ids,
    }
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
