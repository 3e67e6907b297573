"""Trains the demo model's block that guesses a further token, and adds it to the model's file.

The model itself stays as it is: the block learns what it would say. 12 minutes on two busy cores of an EPYC.
Usage: python -m scripts.demo_model.train_block [MODEL.gguf] [--out FILE]
"""

from __future__ import annotations

import argparse
import random
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from scripts.demo_model import export, train
from scripts.demo_model.model import NextTokenBlock
from thermocline.demo import DEMO_MODEL_PATH

if TYPE_CHECKING:
    from torch import Tensor

    from scripts.demo_model.model import DemoModel
    from scripts.demo_model.vocabulary import Vocabulary

PHASE = train.Phase(600, 2.5e-3, 400, 1.0, train.SEED + 2)
NUM_ROWS = 640
ROWS_PER_STEP = 3
# How much the guesses after the first count, which take the block's own states.
CHAIN_WEIGHTS = (1.0, 0.7)
NOT_LEARNT = -100
LEAST_WEIGHT = 0.5  # of a token that is learnt: answers and prose, no questions
DEFAULT_OUT = Path("out/demo-model/demo-moe-block.gguf")


@torch.inference_mode()
def read_rows(model: DemoModel, words: Vocabulary, num_rows: int, seed: int) -> list[Tensor]:
    """Return ids [n, T], the model's best next token of each, -100 where none is learnt, and its states [n, T, D]."""
    phase = train.Phase(0, 0.0, 1, 1.0, seed)
    drawn = list(islice(train.rows(words, phase), num_rows))
    ids = torch.tensor([row[:-1] for row, _ in drawn])
    learnt = torch.tensor([weights[1:] for _, weights in drawn]) >= LEAST_WEIGHT
    states = torch.cat([model.states(part)[0] for part in ids.split(16)])
    best = torch.cat([model.head(part).argmax(-1) for part in states.split(16)])
    return [ids, best.masked_fill(~learnt, NOT_LEARNT), states]


def chained(block: NextTokenBlock, model: DemoModel, ids: Tensor, states: Tensor) -> list[Tensor]:
    """Return the block's states [B, T, D] at each depth of a draft, each at the position whose token it has read."""
    tokens = model.embed(ids)
    found, before = [], states
    for _ in CHAIN_WEIGHTS:
        before = torch.cat((torch.zeros_like(before[:, :1]), before[:, :-1]), dim=1)
        before = block(tokens, before)
        found.append(before)
    return found


def train_block(block: NextTokenBlock, model: DemoModel, rows: list[Tensor]) -> None:
    """Let the block learn the model's own choices, in place."""
    optimizer = torch.optim.AdamW(block.parameters(), lr=PHASE.peak_rate, betas=(0.9, 0.95))
    order = torch.Generator().manual_seed(PHASE.seed)
    start, shown = time.monotonic(), 0.0
    for step in range(PHASE.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = train.rate(step, PHASE)
        picked = torch.randint(len(rows[0]), (ROWS_PER_STEP,), generator=order)
        ids, best, states = (part[picked] for part in rows)
        is_learnt = best != NOT_LEARNT
        loss = torch.zeros(())
        for weight, guess in zip(CHAIN_WEIGHTS, chained(block, model, ids, states), strict=True):
            logits = model.head(guess[is_learnt])
            loss = loss + weight * functional.cross_entropy(logits, best[is_learnt])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(block.parameters(), 1.0)
        optimizer.step()
        shown = loss.item() if step == 0 else 0.95 * shown + 0.05 * loss.item()
        if step % 50 == 49:
            seconds = time.monotonic() - start
            print(f"{step + 1}/{PHASE.num_steps}  loss {shown:.3f}  {seconds:.0f} s", flush=True)


@torch.inference_mode()
def agreement(block: NextTokenBlock, model: DemoModel, rows: list[Tensor]) -> list[float]:
    """Return how often the block's best token is the model's, at each depth."""
    ids, best, states = rows
    is_learnt = best != NOT_LEARNT
    guesses = (model.head(guess[is_learnt]) for guess in chained(block, model, ids, states))
    return [(guess.argmax(-1) == best[is_learnt]).float().mean().item() for guess in guesses]


def main() -> None:
    """Train, and write the file with the block."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path, nargs="?", default=DEMO_MODEL_PATH)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="the GGUF file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, words = export.read_gguf(options.gguf)
    model.requires_grad_(False)
    torch.manual_seed(PHASE.seed)
    block = NextTokenBlock(model.dims)
    rows = read_rows(model, words, NUM_ROWS, random.Random(PHASE.seed).randrange(1 << 30))
    rows = [part.clone() for part in rows]  # inference tensors take no part in a gradient
    train_block(block, model, rows)
    held = read_rows(model, words, 32, PHASE.seed + 1)
    shares = ", ".join(f"{share:.1%}" for share in agreement(block, model, held))
    print(f"agrees with the model on fresh chats, by depth: {shares}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    export.replace_block(options.gguf, options.out, block)
    print(f"wrote {options.out}: {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
