"""llama.cpp as the benchmarks use it: a long-lived child that loads a file once and answers requests.

Runs as a script in whichever interpreter has the package `llama_cpp`, so that it needs nothing else.
Weights are repacked or not for a whole child; everything else is set per request, and a context is kept
for each setting. The cache is f16, the default. What was asked for is checked: how much was repacked is told by the
library's own lines about its buffers, and a context with another micro-batch than the asked one is an error.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp

_REPACKED = re.compile(r"REPACK model buffer size *= *([0-9.]+) MiB")


class BufferLog:
    """Drops llama.cpp's log lines, but for what they say of repacked weights."""

    def __init__(self) -> None:
        self.repacked_mib = 0.0
        self._line = ""
        # The library keeps the pointer, and this the function behind it.
        self.callback = llama_cpp.llama_log_callback(self._take)

    def _take(self, _level: int, text: bytes, _data: object) -> None:
        # Lines may come in pieces.
        self._line += text.decode("utf-8", "replace")
        if not self._line.endswith("\n"):
            return
        self.repacked_mib += sum(float(size) for size in _REPACKED.findall(self._line))
        self._line = ""


class LlamaSide:
    """One loaded file and the contexts made so far."""

    def __init__(self, path: str, threads: int, repack: bool) -> None:
        self._log = BufferLog()
        llama_cpp.llama_log_set(self._log.callback, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        # A structure of another version takes any name, and drops what it does not know.
        if "use_extra_bufts" not in {name for name, *_ in params._fields_}:
            raise SystemExit(
                "this llama_cpp can not turn repacking on or off: see scripts/oracle_env.sh"
            )
        params.use_extra_bufts = repack
        self._threads = threads
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp could not load {path}")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self.vocab_size = int(llama_cpp.llama_vocab_n_tokens(vocabulary))
        self.repacked_mib = self._log.repacked_mib
        self._contexts: dict[tuple[int, bool, int], Any] = {}
        self._filled: dict[tuple[int, bool, int], tuple[int, int]] = {}

    def run(self, request: dict[str, Any]) -> dict[str, float]:
        """Compute `prompt` tokens, then `decode` tokens one at a time; times in seconds.

        With `keep`, a prompt that is still in this setting's cache is not computed again, nor one that another process
        left in the file `state`, which no setting changes but flash attention.
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
            state = request.get("state") if request["keep"] else None
            if not self._load(context, state, num_prompt):
                prefill_s = self._decode(context, tokens[:num_prompt], 0)
                self._save(context, state, tokens[:num_prompt])
        self._filled[key] = filled
        decode_s = sum(
            self._decode(context, [tokens[position]], position)
            for position in range(num_prompt, num_prompt + num_decode)
        )
        return {"prefill_s": prefill_s, "decode_s": decode_s}

    def _load(self, context: Any, state: str | None, num_prompt: int) -> bool:  # noqa: ANN401
        """Fill the cache from a file, if there is one that fits."""
        if state is None or not Path(state).exists():
            return False
        found = (llama_cpp.llama_token * num_prompt)()
        count = ctypes.c_size_t()
        read = llama_cpp.llama_state_seq_load_file(
            context, state.encode(), 0, found, num_prompt, ctypes.byref(count)
        )
        return bool(read) and count.value == num_prompt

    def _save(self, context: Any, state: str | None, tokens: list[int]) -> None:  # noqa: ANN401
        if state is not None:
            ids = (llama_cpp.llama_token * len(tokens))(*tokens)
            llama_cpp.llama_state_seq_save_file(context, state.encode(), 0, ids, len(tokens))

    def _decode(
        self,
        context: Any,  # noqa: ANN401
        tokens: list[int],
        start: int,
        *,
        all_logits: bool = False,
    ) -> float:
        """Compute `tokens` behind `start` others, with the logits of the last or of all; return the seconds."""
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for index, token in enumerate(tokens):
                batch.token[index] = token
                batch.pos[index] = start + index
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = 0
                batch.logits[index] = all_logits or index == len(tokens) - 1
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
            if (real := llama_cpp.llama_n_ubatch(made)) != min(ubatch, num_tokens):
                raise SystemExit(f"llama.cpp took micro-batches of {real} instead of {ubatch}")
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
        "repacked_mib": side.repacked_mib,
    }
    print(json.dumps(first), flush=True)
    for line in sys.stdin:
        print(json.dumps(side.run(json.loads(line))), flush=True)


if __name__ == "__main__":
    _main()
