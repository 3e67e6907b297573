#!/usr/bin/env bash
# Write hashes/run.txt and hashes/dev.txt: constraints.txt with the hashes of all files of each version. Write
# hashes/docs.txt and hashes/wheels.txt, which make docs and make wheels install.
# torch and triton are left out: which of their builds is right depends on the machine (docs/decisions/0057).
set -euo pipefail
cd "$(dirname "$0")/.."
tools=build/hashes
[ -x "$tools/bin/uv" ] || { "${PYTHON:-python3}" -m venv "$tools" && "$tools/bin/pip" install --quiet uv; }
uv() { "$tools/bin/uv" pip compile --quiet --no-header --no-annotate "$@"; }
pinned() { grep -E '^[A-Za-z]' constraints.txt | grep -vE '^(torch|triton)=='; }
write() {
  {
    echo "# Written by make hashes from constraints.txt, for make install HASHES=1. Without torch and triton."
    uv --no-deps --generate-hashes -
  } >"hashes/$1.txt.new"
  mv "hashes/$1.txt.new" "hashes/$1.txt"
}
pinned | write dev
# What running needs, and what builds the native core.
build_tools=(scikit-build-core nanobind cmake ninja)
needed=$(printf '%s\n' "${build_tools[@]}" | uv -c constraints.txt pyproject.toml - | sed 's/==.*//; s/[-_.]/[-_.]/g' | paste -sd'|')
pinned | grep -iE "^($needed)==" | write run
# These tools are in no other environment: the versions that a file has stay, unless it is removed.
for kind in docs wheels; do
  tools_of=$(sed -n "/^$kind = \[/s/[^\"]*\"\([^\"]*\)\"[],]*/\1\n/gp" pyproject.toml)
  touch "hashes/$kind.txt"
  printf '%s\n' "$tools_of" | uv -c constraints.txt --generate-hashes --output-file "hashes/$kind.txt" - >/dev/null
  sed -i "1i # Written by make hashes, for make $kind." "hashes/$kind.txt"
done
