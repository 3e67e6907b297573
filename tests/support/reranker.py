"""A toy reranker: a qwen3 model whose head scores pairs of a query and a document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.toy_archs import ToyArch, toy_arch_weights, write_toy_arch

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = "<|im_start|>judge\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
TOY = ToyArch("qwen3", experts=0, used=0, tied=True, seed=91)
NUM_OUTPUTS = 2


def write_reranker(path: Path, metadata: dict[str, Any] | None = None) -> Path:
    """Write the file as a converter does: no output matrix, two rows of it as `cls.output`, and the form of a pair."""
    weights = toy_arch_weights(TOY)
    weights["cls.output.weight"] = 2 * weights["token_embd.weight"][[100, 110]]
    keys = {
        "qwen3.pooling_type": 4,
        "qwen3.classifier.output_labels": ["yes", "no"],
        "tokenizer.chat_template": None,
        "tokenizer.chat_template.rerank": TEMPLATE,
    }
    return write_toy_arch(path, TOY, weights=weights, metadata=keys | (metadata or {}))
