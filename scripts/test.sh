#!/usr/bin/env bash
# The test suite; arguments go to pytest. A file of tests runs in one process.
# THERMOCLINE_TEST_PROCESSES      how many there are at a time (default: 2)
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${VENV:-.venv}/bin/python" -m pytest -n "${THERMOCLINE_TEST_PROCESSES:-2}" --dist loadfile "$@"
