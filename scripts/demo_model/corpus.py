"""The training texts of the demo model, drawn as chats and prose; knows no tokens and no model.

`corpus.txt` holds the chat intents (its head explains the format), `prose.txt` the plain paragraphs.
A drawn `Document` is a list of pieces, each either a special token or a text with the weight that
its tokens have in the loss.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

HERE = Path(__file__).parent
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

SINGULAR_FORMS = (
    "What is {}?",
    "What is {}?",
    "What's {}?",
    "What exactly is {}?",
    "Explain {}.",
    "Can you explain {}?",
    "Please explain {} to me.",
    "Tell me about {}.",
    "Tell me what {} is.",
    "What does {} mean?",
    "What does {} do?",
    "What do you know about {}?",
    "What is the purpose of {}?",
    "What is {} good for?",
    "What is the use of {}?",
    "What is the job of {}?",
    "What is {} and why is it needed?",
    "Why is there {}?",
    "How does {} work?",
    "How is {} used?",
    "I want to learn about {}.",
    "I do not understand {}.",
    "Describe {}.",
    "Define {}.",
    "{}?",
)
PLURAL_FORMS = (
    "What are {}?",
    "What are {}?",
    "What exactly are {}?",
    "Explain {}.",
    "Can you explain {}?",
    "Tell me about {}.",
    "Tell me what {} are.",
    "What do you know about {}?",
    "What do {} do?",
    "What is the purpose of {}?",
    "What are {} good for?",
    "Why are there {}?",
    "How do {} work?",
    "I do not understand {}.",
    "Describe {}.",
    "{}?",
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are the thermocline demo model.",
    "Answer in short and plain English.",
    "You are a friendly guide to thermocline.",
    "Be brief.",
)
OPENERS = ("Hello, ", "Hi! ", "Hey, ", "Please tell me: ", "One question: ", "OK, ", "So, ", "And ")
CLOSERS = (" please", " Thanks!", " I am new to this.", " In short, please.", " exactly?", " here?")
# Pairs of words that people use for each other; either is replaced by the other now and then.
SWAPS = (
    ("How do I ", "How can I "),
    ("How do I ", "How to "),
    ("How can I ", "Show me how to "),
    ("How do I ", "Tell me how to "),
    ("Can I ", "Is it possible to "),
    ("Can I ", "May I "),
    ("Why ", "How come "),
    ("Why is ", "What is the reason that "),
    ("What is ", "What's "),
    ("What is ", "Could you tell me what is "),
    ("What is ", "Do you know what is "),
    ("What happens ", "What will happen "),
    ("Explain ", "Could you explain "),
    ("the difference between ", "difference between "),
    (" a GPU", " a graphics card"),
    ("larger than", "bigger than"),
    (" my RAM", " my memory"),
    (" machine", " computer"),
    (" machine", " laptop"),
    (" decode ", " decoding "),
    (" use ", " need "),
    (" tokens", " words"),
    (" does not fit", " is too large"),
    (" an expert", " experts"),
    (" start ", " run "),
    (" text", " answer"),
)
DROPPED_WORDS = frozenset(
    {"the", "a", "an", "is", "are", "does", "do", "of", "in", "to", "I", "it"}
)

QUESTION_WEIGHT = 0.05  # users' questions are read, hardly ever written
PROSE_SHARE = 0.12
SYSTEM_SHARE = 0.15
NEXT_TURN_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Intent:
    """Several ways to ask for one answer; `weight` says how often it is drawn."""

    questions: tuple[str, ...]
    answer: str
    weight: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A special token or a text, with the weight of its tokens in the loss.

    `decides` marks an answer: with its first tokens the model decides which answer it gives.
    """

    text: str
    weight: float
    is_special: bool
    decides: bool = False


Document = tuple[Piece, ...]


def load_intents() -> tuple[Intent, ...]:
    """Read corpus.txt. ValueError with the paragraph that has no answer or no question."""
    text = (HERE / "corpus.txt").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    return tuple(_parse_intent(part) for part in re.split(r"\n\s*\n", lines) if part.strip())


def load_prose() -> tuple[str, ...]:
    """Read the paragraphs of prose.txt."""
    text = (HERE / "prose.txt").read_text(encoding="utf-8")
    return tuple(part.strip() for part in text.split("\n\n") if part.strip())


def _parse_intent(paragraph: str) -> Intent:
    questions: list[str] = []
    answer, weight = "", 1
    for line in paragraph.strip().splitlines():
        mark, _, rest = line.partition(" ")
        if mark == "?":
            questions.extend(_expand(rest))
        elif mark in ("@", "@@"):
            forms = SINGULAR_FORMS if mark == "@" else PLURAL_FORMS
            for term in rest.split(" | "):
                questions.extend(_capitalise(form.format(term)) for form in forms)
        elif mark == "*":
            weight = int(rest)
        elif mark == "=" and not answer:
            answer = rest
        else:
            raise ValueError(f"line not understood: {line!r}")
    if not questions or not answer:
        raise ValueError(f"an intent needs questions and one answer: {paragraph!r}")
    return Intent(tuple(questions), answer, weight)


def _expand(question: str) -> list[str]:
    """Write out each {a|b} of a question."""
    parts = re.split(r"\{([^}]*)\}", question)
    choices = [part.split("|") if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(pick) for pick in itertools.product(*choices)]


def _capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]


def vary(question: str, rng: random.Random) -> str:
    """Write a question as people type it: other words or case, no mark, a slip of the finger."""
    if rng.random() < 0.4:
        question = _swap(question, rng)
    if rng.random() < 0.12:
        question = _drop_words(question, rng)
    if rng.random() < 0.12:
        question = rng.choice(OPENERS) + question[:1].lower() + question[1:]
    if rng.random() < 0.05:
        question = question.rstrip("?!.") + rng.choice(CLOSERS)
    if rng.random() < 0.3:
        question = question.rstrip("?!.") or question
    if rng.random() < 0.4:
        question = question.lower()
    if rng.random() < 0.06 and len(question) > 8:
        at = rng.randrange(1, len(question) - 1)
        question = question[:at] + question[at + 1 :]
    return question


def _swap(question: str, rng: random.Random) -> str:
    fitting = [(old, new) for pair in SWAPS for old, new in (pair, pair[::-1]) if old in question]
    if not fitting or question.lower().count("mean"):
        return question
    old, new = rng.choice(fitting)
    return _capitalise(question.replace(old, new, 1))


def _drop_words(question: str, rng: random.Random) -> str:
    words = question.split(" ")
    kept = [word for word in words if word not in DROPPED_WORDS or rng.random() < 0.4]
    return _capitalise(" ".join(kept))


def turn(role: str, content: str, weight: float) -> Document:
    """One message in the chat format, with the line break that follows it."""
    return (
        Piece(TURN_START, 0.0, True),
        Piece(f"{role}\n{content}", weight, False, decides=role == "assistant"),
        Piece(TURN_END, weight, True),
        Piece("\n", 0.0, False),
    )


def prompt(question: str) -> Document:
    """What a model reads before it answers one question."""
    start = (Piece(TURN_START, 0.0, True), Piece("assistant\n", 0.0, False))
    return (*turn("user", question, 0.0), *start)


def documents(seed_rng: random.Random) -> Iterator[Document]:
    """Draw documents without end; every intent comes up once (times its weight) per round."""
    rng = seed_rng
    prose = load_prose()
    intents = _rounds(load_intents(), rng)
    end = (Piece(END_OF_TEXT, 1.0, True),)
    while True:
        if rng.random() < PROSE_SHARE:
            first = rng.randrange(len(prose))
            text = "\n\n".join(prose[first : first + rng.randint(1, 4)])
            yield (Piece(text, 1.0, False), *end)
            continue
        parts: list[Piece] = []
        if rng.random() < SYSTEM_SHARE:
            parts.extend(turn("system", rng.choice(SYSTEM_PROMPTS), 0.0))
        while True:
            intent = next(intents)
            parts.extend(turn("user", vary(rng.choice(intent.questions), rng), QUESTION_WEIGHT))
            parts.extend(turn("assistant", intent.answer, 1.0))
            if rng.random() >= NEXT_TURN_SHARE:
                break
        yield (*parts, *end)


def _rounds(intents: tuple[Intent, ...], rng: random.Random) -> Iterator[Intent]:
    deck = [intent for intent in intents for _ in range(intent.weight)]
    while True:
        rng.shuffle(deck)
        yield from deck
