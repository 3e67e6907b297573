#!/usr/bin/env bash
# Record the sample in traces/ and draw the README's picture from it.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
"$bin/thermocline" demo --trace traces/demo.json.gz
"$bin/python" -m scripts.trace_picture traces/demo.json.gz docs/images/demo-trace.svg
