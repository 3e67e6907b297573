"""Judges a demo model file: its answers, its perplexity on the held text, its use of experts.

Works on the dequantised weights in torch, so that it is an oracle for other programs that read the
same file. Usage: python -m scripts.demo_model.check MODEL.gguf
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from torch.nn import functional

from scripts.demo_model import corpus, export
from scripts.demo_model.model import DemoModel, greedy
from thermocline.demo import DEMO_HELD_TEXT_PATH, DEMO_MODEL_PATH, DEMO_QUESTIONS

WINDOW_TOKENS = 512
MANY = 300


def answers(
    model: DemoModel, words: export.Vocabulary, questions: list[str], batch: int = 25
) -> list[str]:
    """Greedy answers to questions, each asked alone."""
    end = words.special_id(corpus.TURN_END)
    texts: list[str] = []
    for at in range(0, len(questions), batch):
        prompts = [words.encode(corpus.prompt(q))[0] for q in questions[at : at + batch]]
        texts += [words.tokenizer.decode(ids) for ids in greedy(model, prompts, end)]
    return texts


@torch.inference_mode()
def perplexity(model: DemoModel, ids: list[int]) -> float:
    """Perplexity over windows of WINDOW_TOKENS, every token but the first of each window."""
    total, count = 0.0, 0
    for at in range(0, len(ids), WINDOW_TOKENS):
        window = torch.tensor([ids[at : at + WINDOW_TOKENS]])
        if window.shape[1] < 2:
            break
        logits = model(window[:, :-1])[0][0]
        total += functional.cross_entropy(logits, window[0, 1:], reduction="sum").item()
        count += window.shape[1] - 1
    return float(torch.tensor(total / count).exp())


@torch.inference_mode()
def expert_shares(model: DemoModel, documents: list[list[int]]) -> list[list[float]]:
    """Per layer the share of routed slots that each expert received, the largest first."""
    counts = torch.zeros(model.dims.num_layers, model.dims.num_experts)
    for ids in documents:
        for layer, chosen in enumerate(model(torch.tensor([ids]))[2]):
            counts[layer] += torch.bincount(chosen.flatten(), minlength=model.dims.num_experts)
    shares = counts / counts.sum(1, keepdim=True)
    return [sorted(row, reverse=True) for row in shares.tolist()]


def main() -> None:
    """Print everything about one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path, nargs="?", default=DEMO_MODEL_PATH)
    options = parser.parse_args()
    torch.set_num_threads(2)
    model, words = export.read_gguf(options.gguf)
    shown = list(DEMO_QUESTIONS)
    chats = []
    for question, text in zip(shown, answers(model, words, shown), strict=True):
        print(f"? {question}\n= {text}")
        document = (*corpus.prompt(question), corpus.Piece(text, 0.0, False))
        chats.append(words.encode(document)[0])
    rng = random.Random(1)
    intents = corpus.load_intents()
    asked = [intents[i % len(intents)] for i in range(MANY)]
    questions = [corpus.vary(rng.choice(intent.questions), rng) for intent in asked]
    given = answers(model, words, questions)
    wrong = [
        (q, a) for q, a, i in zip(questions, given, asked, strict=True) if a.strip() != i.answer
    ]
    print(f"{MANY - len(wrong)} of {MANY} varied questions got their answer word for word")
    for question, text in wrong:
        print(f"  ? {question}\n    {text}")
    held = DEMO_HELD_TEXT_PATH.read_text(encoding="utf-8")
    ids = words.tokenizer.encode(held).ids
    print(f"perplexity of the held text ({len(ids)} tokens): {perplexity(model, ids):.4f}")
    for layer, shares in enumerate(expert_shares(model, chats)):
        print(f"layer {layer}: top 4 of {len(shares)} experts take {sum(shares[:4]):.0%};", end=" ")
        print(" ".join(f"{share:.3f}" for share in shares))


if __name__ == "__main__":
    main()
