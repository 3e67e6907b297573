#!/usr/bin/env bash
# Build the reference of all public names into build/docs, in an environment of its own. A link that leads nowhere fails.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${DOCS_VENV:-.venv-docs}
if [ ! -e "$venv/.installed" ] || [ hashes/docs.txt -nt "$venv/.installed" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r hashes/docs.txt
  touch "$venv/.installed"
fi
"$venv/bin/mkdocs" build --strict --quiet
echo "build/docs/index.html"
