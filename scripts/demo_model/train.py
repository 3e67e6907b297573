"""Trains the demo model on the CPU and writes its GGUF file: python -m scripts.demo_model.train.

About 1,000 CPU seconds on a 2.5 GHz Xeon (OMP_WAIT_POLICY=PASSIVE helps on a busy machine). Seeds are
fixed; other packages or processors may round differently. The files go to out/; pass
--out thermocline/demo/demo-moe.gguf to replace the packaged model.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from scripts.demo_model import corpus, vocabulary
from scripts.demo_model.export import write_gguf
from scripts.demo_model.model import DemoModel, Dims

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scripts.demo_model.vocabulary import Vocabulary

SEED = 20
ROW_TOKENS = 256
ROWS_PER_STEP = 4
WARMUP_STEPS = 30
LAST_RATE_SHARE = 0.02
# Without it the model learns its few texts by heart and is then sure of itself where it is wrong: the
# perplexity of held-out text rises beyond that of a guess (7463 of 2304 tokens).
LABEL_SMOOTHING = 0.1
BALANCE_WEIGHT = 0.002  # keeps experts alive, weak enough that some become hot and others cold


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the training with an optimizer and random numbers of its own.

    The learning rate rises to `peak_rate`, stays there, and falls in the last `decay_steps`.
    """

    num_steps: int
    peak_rate: float
    decay_steps: int
    decision_weight: float
    seed: int


PHASES = (
    Phase(750, 2.5e-3, 150, 1.0, SEED),  # learns to write the answers
    Phase(400, 1.5e-3, 370, 5.0, SEED + 1),  # learns which answer fits a question
)
DEFAULT_OUT = Path("out/demo-model/demo-moe.gguf")
DEFAULT_WEIGHTS = Path("out/demo-model/weights.pt")


def rows(words: Vocabulary, phase: Phase) -> Iterator[tuple[list[int], list[float]]]:
    """Pack documents into rows of ROW_TOKENS + 1 tokens, each of which begins with a document."""
    ids: list[int] = []
    weights: list[float] = []
    for document in corpus.documents(random.Random(phase.seed)):
        more_ids, more_weights = words.encode(document, phase.decision_weight)
        ids += more_ids
        weights += more_weights
        if len(ids) > ROW_TOKENS:
            yield ids[: ROW_TOKENS + 1], weights[: ROW_TOKENS + 1]
            ids, weights = [], []


def rate(step: int, phase: Phase) -> float:
    """Learning rate of a step: a short rise, a plateau, then a straight way down."""
    rise = (step + 1) / WARMUP_STEPS
    fall = max((phase.num_steps - step) / phase.decay_steps, LAST_RATE_SHARE)
    return phase.peak_rate * min(1.0, rise, fall)


def train_phase(model: DemoModel, words: Vocabulary, phase: Phase) -> None:
    """Run one phase on the model, in place."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=phase.peak_rate,
        betas=(0.9, 0.95),
        fused=True,
    )
    stream = rows(words, phase)
    start, shown = time.monotonic(), 0.0
    for step in range(phase.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, phase)
        loss = _step(model, optimizer, list(islice(stream, ROWS_PER_STEP)))
        shown = loss if step == 0 else 0.95 * shown + 0.05 * loss
        if step % 50 == 49:
            seconds = time.monotonic() - start
            print(f"{step + 1}/{phase.num_steps}  loss {shown:.3f}  {seconds:.0f} s", flush=True)


def _step(
    model: DemoModel, optimizer: torch.optim.Optimizer, batch: list[tuple[list[int], list[float]]]
) -> float:
    ids = torch.tensor([row for row, _ in batch])
    weights = torch.tensor([weight for _, weight in batch])[:, 1:].flatten()
    logits, balance, _ = model(ids[:, :-1])
    losses = functional.cross_entropy(
        logits.flatten(0, 1),
        ids[:, 1:].flatten(),
        reduction="none",
        label_smoothing=LABEL_SMOOTHING,
    )
    loss = (losses * weights).sum() / weights.sum()
    optimizer.zero_grad(set_to_none=True)
    (loss + BALANCE_WEIGHT * balance).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def main() -> None:
    """Learn the vocabulary, train, save the weights and export the GGUF file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="the GGUF file")
    parser.add_argument("--weights", type=Path, default=DEFAULT_WEIGHTS, help="the f32 weights")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    words = vocabulary.learn()
    model = DemoModel(Dims(num_tokens=len(words.tokens)))
    model.initialise(SEED)
    for phase in PHASES:
        train_phase(model, words, phase)
    for path in (options.weights, options.out):
        path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), options.weights)
    write_gguf(options.out, model, words)
    print(f"wrote {options.weights} and {options.out}")


if __name__ == "__main__":
    main()
