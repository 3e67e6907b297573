#!/usr/bin/env bash
# Clients that many people use, from PyPI and npm, against a server on the demo model: some minutes.
# usage: scripts/clients.sh [pytest arguments]
# THERMOCLINE_CLIENTS_VENV              where the clients are, or shall be (default: .venv-clients here)
#
# The clients have an environment of their own, because they ask for versions of what the library uses.
# Without npm the programs for it are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
venv=${THERMOCLINE_CLIENTS_VENV:-.venv-clients}

packages=(numpy pytest pytest-asyncio pytest-timeout openai anthropic ollama
  langchain-openai litellm "pydantic-ai-slim[openai,anthropic]" instructor)
"$venv/bin/python" -c 'import instructor, langchain_openai, litellm, pydantic_ai, pytest_asyncio' \
  >/dev/null 2>&1 || {
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install -q "${packages[@]}"
}
if command -v npm >/dev/null; then
  [ -d tests/clients/node/node_modules ] || (cd tests/clients/node && npm install --no-fund --no-audit)
else
  echo "npm is not installed: its clients are skipped" >&2
fi

log=$(mktemp)
"$bin/thermocline" serve --port 0 >"$log" &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; rm -f "$log"' EXIT
url=
for _ in $(seq 300); do
  url=$(sed -n 's/.* at \(http:.*\)$/\1/p' "$log")
  [ -n "$url" ] && curl -sf "$url/health" >/dev/null && break
  kill -0 "$server" || { echo "the server did not start" >&2; exit 1; }
  sleep 0.1
done
THERMOCLINE_CLIENTS_URL=$url "$venv/bin/python" -m pytest -W default -m clients tests/clients "$@"
