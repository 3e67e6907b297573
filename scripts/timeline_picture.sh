#!/usr/bin/env bash
# Draw a picture of a trace's page with Chromium.
# usage: scripts/timeline_picture.sh                 the README's picture, and the trace that it is of: a prompt of 1000
#                                                    tokens through 8 layers of Qwen3-30B-A3B's shapes is run first
#        scripts/timeline_picture.sh TRACE.json.gz OUT.png ["from=12&to=40" [WIDTH HEIGHT]]
# The picture is signed with the trace (scripts/picture_signature.py), so that one without the other is noticed.
# CHROMIUM                        the browser (default: chromium)
# PICTURE_MODEL                   another model file for the first form (default: the one of bench-llama in BENCH_MODELS,
#                                 3.5 GB, written first where it is missing)
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
browser=${CHROMIUM:-chromium}
command -v "$browser" > /dev/null || {
  echo "no $browser: install it (apt-get install chromium), or name one with CHROMIUM" >&2
  exit 2
}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

record() { # OUT: the first run brings the file into memory, the second is the one that counts
  local model=${PICTURE_MODEL:-${BENCH_MODELS:-build/models}/qwen3-30b-a3b-8-layers.gguf} out
  if [ ! -f "$model" ]; then
    mkdir -p "$(dirname "$model")"
    "$bin/python" -m benchmarks.synthetic_model "$model" --layers 8 >&2
  fi
  for out in "$folder/first.json.gz" "$1"; do
    head -c 1033 thermocline/demo/held_text.txt | "$bin/thermocline" run "$model" --prompt - --max-tokens 4 --ignore-eos \
      --hot-device simulated --trunk-device cpu --expert-cache static --hot-fraction 0.5 --hot-choice even --no-heat \
      --threads 1 --prefill-chunk 256 --trace "$out" > "$folder/answer"
  done
}

draw() { # TRACE OUT [VIEW [WIDTH HEIGHT]]
  "$bin/python" -m thermocline trace html "$1" -o "$folder/page.html"
  "$browser" --headless=new --no-sandbox --disable-gpu --hide-scrollbars \
    --user-data-dir="$folder/profile" --virtual-time-budget=8000 \
    --window-size="${4:-1280},${5:-860}" --screenshot="$folder/page.png" "file://$folder/page.html#${3:-}"
  "$bin/python" -m scripts.picture_signature sign "$folder/page.png" "$1"
  mv "$folder/page.png" "$2"
}

if [ $# -gt 0 ]; then
  draw "$@"
else
  record "$folder/timeline.json.gz"
  # From an eighth to half of the run: prompt chunks under way, none of them the first.
  draw "$folder/timeline.json.gz" "$folder/timeline.png" \
    "$("$bin/python" -m scripts.picture_signature view "$folder/timeline.json.gz" 0.125 0.5)"
  "$bin/python" -m scripts.picture_signature check "$folder/timeline.png" "$folder/timeline.json.gz"
  mv "$folder/timeline.json.gz" traces/timeline.json.gz
  mv "$folder/timeline.png" docs/images/timeline.png
fi
