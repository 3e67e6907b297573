#!/usr/bin/env bash
# Make the virtual environment and install thermocline into it, editable, native core included.
# usage: scripts/install.sh [run|dev]     dev adds what lint, tests and training need
# HASHES=1 takes only packages with the hashes in hashes/, but for torch and triton, which have builds for each machine.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:-run}
venv=${VENV:-.venv}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "thermocline needs Python 3.11 or newer; $python is $("$python" --version 2>&1). Set PYTHON=..." >&2
  exit 1
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
target=. compile=--compile
# Most of what tests need is never imported: to compile all of it takes pip 40 s, and Python compiles what it imports.
[ "$kind" = dev ] && target=".[dev]" compile=--no-compile
if [ "${HASHES:-}" = 1 ]; then pip install "$compile" --require-hashes --no-deps -r "hashes/$kind.txt"; fi
# The build tools first: the editable build runs in this environment, so that it can be repeated offline.
pip install -c constraints.txt scikit-build-core nanobind cmake ninja
# An environment from before the distribution was renamed holds the same files under the old name.
if pip show thermocline >/dev/null 2>&1; then pip uninstall -y thermocline; fi
pip install -c constraints.txt --no-build-isolation "$compile" -e "$target"
touch "$venv/.installed-$kind"
