#!/usr/bin/env bash
# Record the sample in traces/.
set -euo pipefail
cd "$(dirname "$0")/.."
"${VENV:-.venv}/bin/thermocline" demo --trace traces/demo.json.gz
