"""llama.cpp as the benchmarks use it: a long-lived child that loads a file once and answers requests.

Runs as a script in whichever interpreter has the package `llama_cpp`, so that it needs nothing else.
Weights are repacked or not for a whole child; everything else is set per request, and a context is kept
for each setting. The cache is f16, the default.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import sys
import time
from typing import Any

import llama_cpp


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(_level: int, _text: bytes, _data: object) -> None:
    """Drop llama.cpp's log lines."""


class LlamaSide:
    """One loaded file and the contexts made so far."""

    def __init__(self, path: str, threads: int, repack: bool) -> None:
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = repack
        self._threads = threads
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp could not load {path}")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self.vocab_size = int(llama_cpp.llama_vocab_n_tokens(vocabulary))
        self._contexts: dict[tuple[int, bool, int], Any] = {}
        self._filled: dict[tuple[int, bool, int], tuple[int, int]] = {}

    def run(self, request: dict[str, Any]) -> dict[str, float]:
        """Compute `prompt` tokens, then `decode` tokens one at a time; times in seconds.

        With `keep`, a prompt that is still in this setting's cache is not computed again.
        """
        key = (request["ubatch"], request["flash"], request["context"])
        context = self._context(key)
        memory = llama_cpp.llama_get_memory(context)
        num_prompt, num_decode = request["prompt"], request["decode"]
        draw = random.Random(request["seed"])
        tokens = [draw.randrange(self.vocab_size - 1) for _ in range(num_prompt + num_decode)]
        prefill_s = 0.0
        filled = (num_prompt, request["seed"])
        is_filled = request["keep"] and self._filled.get(key) == filled
        # Recurrent state can not be cut back: there the prompt is computed again.
        if not is_filled or not llama_cpp.llama_memory_seq_rm(memory, 0, num_prompt, -1):
            llama_cpp.llama_memory_clear(memory, True)
            prefill_s = self._decode(context, tokens[:num_prompt], 0)
        self._filled[key] = filled
        decode_s = sum(
            self._decode(context, [tokens[position]], position)
            for position in range(num_prompt, num_prompt + num_decode)
        )
        return {"prefill_s": prefill_s, "decode_s": decode_s}

    def _decode(self, context: Any, tokens: list[int], start: int) -> float:  # noqa: ANN401
        """Compute `tokens` behind `start` others, with the logits of the last; return the seconds."""
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for index, token in enumerate(tokens):
                batch.token[index] = token
                batch.pos[index] = start + index
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = 0
                batch.logits[index] = index == len(tokens) - 1
            begin = time.perf_counter()
            code = llama_cpp.llama_decode(context, batch)
            llama_cpp.llama_synchronize(context)
            took = time.perf_counter() - begin
        finally:
            llama_cpp.llama_batch_free(batch)
        if code:
            raise SystemExit(f"llama_decode returned {code}")
        return took

    def _context(self, key: tuple[int, bool, int]) -> Any:  # noqa: ANN401
        ubatch, flash, num_tokens = key
        if key not in self._contexts:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = params.n_batch = num_tokens
            params.n_ubatch = ubatch
            params.n_threads = params.n_threads_batch = self._threads
            params.flash_attn_type = (
                llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
                if flash
                else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
            )
            made = llama_cpp.llama_init_from_model(self._model, params)
            if not made:
                raise SystemExit("llama.cpp could not make a context")
            self._contexts[key] = made
        return self._contexts[key]


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--repack", action="store_true")
    options = parser.parse_args()
    start = time.perf_counter()
    side = LlamaSide(options.model, options.threads, options.repack)
    first = {
        "open_s": time.perf_counter() - start,
        "vocabulary": side.vocab_size,
        "version": llama_cpp.__version__,
    }
    print(json.dumps(first), flush=True)
    for line in sys.stdin:
        print(json.dumps(side.run(json.loads(line))), flush=True)


if __name__ == "__main__":
    _main()
