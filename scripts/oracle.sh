#!/usr/bin/env bash
# Compare with transformers and llama.cpp; `golden` writes again what the ordinary suite checks instead.
# THERMOCLINE_LLAMA_CPP_SOURCE  folder of llama.cpp's sources, whose chat templates are tested (default: skipped)
# TIKTOKEN_ENCODINGS_BASE  folder of o200k_base.tiktoken, with which Harmony is compared (default: skipped)
# usage: scripts/oracle.sh [golden | pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(scripts/oracle_env.sh)
# The environment has a core of its own, which an editable install does not build again.
core=$("$python" -c 'from thermocline.kernels import _native; print(_native.__file__)')
if [ -n "$(find native -type f -newer "$core" -print -quit)" ]; then
  "$python" -m pip install -q --no-deps --config-settings=build-dir="build/oracle" -e . >&2
fi
if [ "${1:-}" = golden ]; then
  "$python" -m tests.oracle.make_logits_golden
  "$python" -m tests.oracle.make_converted_golden
  "$python" -m tests.oracle.make_drafts_golden
  "$python" -m tests.oracle.make_dflash_golden
  "$python" -m tests.oracle.make_assistant_golden
  "$python" -m tests.oracle.make_eagle3_golden
  exec "$python" -m tests.oracle.make_tokenizer_golden
fi
exec "$python" -m pytest -m oracle tests/oracle --timeout 1800 "$@"
