#!/usr/bin/env bash
# Clients that many people use, from PyPI and npm, against a server on the demo model: some minutes.
# usage: scripts/clients.sh [pytest arguments]
# THERMOCLINE_CLIENTS_VENVS             where the clients are, or shall be (default: .venv-clients here)
#
# Each line of `groups` is an environment: these clients ask for versions of each other's packages that
# exclude one another. Without npm its programs are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${VENV:-.venv}/bin/python
venvs=${THERMOCLINE_CLIENTS_VENVS:-.venv-clients}

groups=(
  "agents langchain-openai pydantic-ai-slim[openai,anthropic]"
  "instructor instructor"
  "litellm litellm mcp"
  "lm_eval lm-eval[api]"
  "jupyter jupyter-client ipykernel"
)
for group in "${groups[@]}"; do
  read -r name packages <<<"$group"
  [ -e "$venvs/$name/.installed" ] && continue
  "${PYTHON:-python3}" -m venv "$venvs/$name"
  # shellcheck disable=SC2086 - several packages
  "$venvs/$name/bin/python" -m pip install -q numpy msgspec pytest pytest-asyncio pytest-timeout $packages
  touch "$venvs/$name/.installed"
done
if command -v npm >/dev/null; then
  [ -d tests/clients/node/node_modules ] || (cd tests/clients/node && npm install --no-fund --no-audit)
else
  echo "npm is not installed: its clients are skipped" >&2
fi

log=$(mktemp)
"$python" -m thermocline serve --port 0 >"$log" &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; rm -f "$log"' EXIT
url=
for _ in $(seq 300); do
  url=$(sed -n 's/.* is serving .* at \(http:.*\)$/\1/p' "$log")
  [ -n "$url" ] && curl -sf "$url/health" >/dev/null && break
  kill -0 "$server" || { echo "the server did not start" >&2; exit 1; }
  sleep 0.1
done
# A notebook's kernel has packages of its own, and runs this package beside them.
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
export THERMOCLINE_CLIENTS_PACKAGES=$packages
failed=0
for group in "${groups[@]}"; do
  read -r name _ <<<"$group"
  THERMOCLINE_CLIENTS_URL=$url "$venvs/$name/bin/python" -m pytest -W default -m clients \
    -p no:cacheprovider "tests/clients/test_$name.py" "$@" || failed=1
done
THERMOCLINE_CLIENTS_URL=$url "$python" -m pytest -m clients tests/clients/test_npm.py "$@" || failed=1
exit $failed
