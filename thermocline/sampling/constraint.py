"""What an answer must be: data only. Knows no vocabulary, no logits and no request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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

    begin: what opens it if the answer does not begin inside of it: then it is optional; "" if the
    answer does. end: what closes it. max_tokens: it is closed after so many tokens; None: never.
    """

    begin: str
    end: str
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must be.

    text: nothing for JSON_OBJECT, the schema's JSON, the regular expression, a JSON list of strings for
    CHOICE, or a grammar in llguidance's Lark. lenient: keywords of a schema that can not be enforced
    are passed over. param: the request's field, for errors.
    """

    kind: ConstraintKind
    text: str = ""
    lenient: bool = False
    reasoning: Reasoning | None = None
    param: str = "constraint"
