"""Owns what may be asked of an answer's form, and its limits. Knows no vocabulary, no logits, no request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from thermocline.errors import RequestError

MAX_CONSTRAINT_BYTES: Final = 1 << 20
"""Of all that one request asks, the schemas of its tools included."""


class ConstraintKind(StrEnum):
    """What `Constraint.text` is."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Free text that comes before the constrained answer.

    begin: what opens it if the answer does not begin inside of it; then it is optional. "" if the
    answer does. end: what closes it. rules: Lark whose rule `before` is all that comes before the
    answer, where begin and end do not say it; control tokens have no text for a grammar.
    """

    begin: str
    end: str
    rules: str = ""


@dataclass(frozen=True, slots=True)
class ReasoningBudget:
    """How many tokens of reasoning a model may write; then it is made to close it.

    begin, end: as in `Reasoning`. closing: the text that is forced, with `end` in it. max_tokens: 0 and
    more.
    """

    begin: str
    end: str
    closing: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must be, from its first token to its end.

    text: nothing for JSON_OBJECT; the schema's JSON; a regular expression that the whole answer
    matches; a JSON list of strings for CHOICE; or a grammar, in llguidance's Lark or in GBNF. lenient:
    keywords of a schema that can not be enforced are passed over. reasoning: comes first, free. param:
    the request's field, for errors. Raises RequestError for a text of more than MAX_CONSTRAINT_BYTES.
    """

    kind: ConstraintKind
    text: str = ""
    lenient: bool = False
    reasoning: Reasoning | None = None
    param: str = "constraint"

    def __post_init__(self) -> None:
        num_bytes = len(self.text.encode("utf-8", "surrogatepass"))
        if num_bytes > MAX_CONSTRAINT_BYTES:
            raise RequestError(
                f"{self.param} has {num_bytes} bytes: send at most {MAX_CONSTRAINT_BYTES}",
                param=self.param,
            )
