#!/usr/bin/env bash
# The test suite; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${VENV:-.venv}/bin/python" -m pytest "$@"
