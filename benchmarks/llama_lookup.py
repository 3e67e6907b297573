"""llama.cpp with llama-cpp-python's prompt lookup: a long-lived child, as `benchmarks/llama_side.py` is one.

Runs in whichever interpreter has the package `llama_cpp`. The answer is given, so a step's rows are computed, the likeliest token
of each is searched as a greedy sampler would, and the given one is taken. What llama-cpp-python's own loop does beside that, a copy
of all logits among it, is left out: this is what llama.cpp could do.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from benchmarks.llama_side import LlamaSide

_UBATCH = 512


class LookupSide(LlamaSide):
    """One loaded file, whose answers are given."""

    def __init__(self, path: str, threads: int, repack: bool) -> None:
        super().__init__(path, threads, repack)
        self._prompt: list[int] = []

    def run(self, request: dict[str, Any]) -> dict[str, float]:
        """Return the seconds of an answer's decode steps, and what became of its drafts.

        prompt, answer: token ids. drafted: the most drafted tokens of a step, 0 for none. rows: of the context.
        """
        prompt, tokens = request["prompt"], request["prompt"] + request["answer"]
        context = self._context((_UBATCH, True, request["context"]))
        memory = llama_cpp.llama_get_memory(context)
        if prompt != self._prompt or not llama_cpp.llama_memory_seq_rm(memory, 0, len(prompt), -1):
            llama_cpp.llama_memory_clear(memory, True)
            self._decode(context, prompt, 0)
            self._prompt = prompt
        known = np.array(tokens, np.intc)
        lookup = LlamaPromptLookupDecoding(num_pred_tokens=max(request["drafted"], 1))
        count = len(prompt) + 1  # the first token of the answer comes from the prompt's logits
        num_drafted = num_accepted = 0
        begin = time.perf_counter()
        while count < len(tokens):
            room = min(request["drafted"], len(tokens) - count - 1)
            draft = lookup(known[:count])[:room].tolist() if room > 0 else []
            self._decode(context, [tokens[count - 1], *draft], count - 1, all_logits=True)
            accepted = 0
            while accepted < len(draft) and draft[accepted] == tokens[count + accepted]:
                accepted += 1
            for row in range(accepted + 1):
                logits = llama_cpp.llama_get_logits_ith(context, row)
                np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax()
            count += accepted + 1
            if accepted < len(draft) and not llama_cpp.llama_memory_seq_rm(
                memory, 0, count - 1, -1
            ):
                return {"decode_s": 0.0}  # recurrent states can not be taken back
            num_drafted += len(draft)
            num_accepted += accepted
        took = time.perf_counter() - begin
        return {"decode_s": took, "drafted": num_drafted, "accepted": num_accepted}


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llama_lookup", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--repack", action="store_true")
    options = parser.parse_args()
    side = LookupSide(options.model, options.threads, options.repack)
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(side.run(json.loads(line))), flush=True)


if __name__ == "__main__":
    _main()
