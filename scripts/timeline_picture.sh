#!/usr/bin/env bash
# Draw a picture of a trace's page with Chromium.
# usage: scripts/timeline_picture.sh TRACE.json.gz OUT.png ["from=12&to=40" [WIDTH HEIGHT]]
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$bin/python" -m thermocline trace html "$1" -o "$folder/page.html"
"${CHROMIUM:-chromium}" --headless=new --no-sandbox --disable-gpu --hide-scrollbars \
  --user-data-dir="$folder/profile" --virtual-time-budget=8000 \
  --window-size="${4:-1280},${5:-860}" --screenshot="$folder/page.png" "file://$folder/page.html#${3:-}"
mv "$folder/page.png" "$2"
