#!/usr/bin/env bash
# Static checks: format, lint, types, import contracts, and that the native stub is today's.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
"$bin/ruff" format --check .
"$bin/ruff" check .
"$bin/mypy"
"$bin/lint-imports" --no-logo 2>/dev/null || "$bin/lint-imports"
stub=$(mktemp)
trap 'rm -f "$stub"' EXIT
"$bin/python" -m nanobind.stubgen -q -m thermocline.kernels._native -o "$stub"
diff -u thermocline/kernels/_native.pyi "$stub" || {
  echo "the native stub is not today's: run make stub" >&2
  exit 1
}
