"""Pairs of a query and a document to token ids, by the template that a reranker's file has.

The template is text with {query} and {document} in it. Neither can forge a control token.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from thermocline.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from thermocline.text.tokenizer import Tokenizer

TEMPLATE_KEY: Final = "tokenizer.chat_template.rerank"
_PLACE: Final = re.compile(r"\{(query|document)\}")


class RerankPrompt:
    """One file's template, cut at its control tokens once."""

    def __init__(self, template: str, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        longest_first = sorted(tokenizer.control_texts, key=len, reverse=True)
        cuts = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
        pieces = [template] if cuts is None else cuts.split(template)
        self._parts = [
            piece if index % 2 == 0 else tokenizer.token_id(piece)
            for index, piece in enumerate(pieces)
        ]

    def encode(
        self,
        query: str,
        document: str,
        *,
        max_tokens: int | None = None,
        on_slice: Callable[[], None] | None = None,
    ) -> list[int]:
        """Return the token ids of a pair, [T]. max_tokens, on_slice: as of `Tokenizer.encode`, which says what is raised."""
        texts = {"query": query, "document": document}
        filled = [
            _PLACE.sub(lambda place: texts[place[1]], part) if isinstance(part, str) else part
            for part in self._parts
        ]
        parts = [part for part in filled if part is not None and part != ""]
        return self._tokenizer.encode_parts(parts, max_tokens=max_tokens, on_slice=on_slice)


def require_prompt(prompt: RerankPrompt | None) -> RerankPrompt:
    """Return the template of a reranker. Raises RequestError for a model that is none."""
    if prompt is None:
        raise RequestError(
            "this model does not score documents: serve a reranker (Qwen3-Reranker), or use /v1/embeddings",
            param="model",
        )
    return prompt
