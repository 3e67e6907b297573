#!/usr/bin/env bash
# Build dist/: an sdist, and from it a wheel for Python 3.11 and one for 3.12 and later. Each is built in a Debian of its
# own, so that a wheel depends on nothing of this machine. scripts/wheel.sh builds one without that.
set -euo pipefail
cd "$(dirname "$0")/.."
roots=build/roots
# The compiler that the kernels are tested with, in both.
for suite in bookworm trixie; do
  [ -d "$roots/$suite-build" ] || scripts/debian_root.sh make "$suite" "$roots/$suite-build" python3-dev python3-venv g++-12
done
rm -rf dist
"${VENV:-.venv}/bin/python" -c 'from scikit_build_core.build import build_sdist; build_sdist("dist")' >/dev/null
for suite in bookworm trixie; do
  SOURCE=$PWD OUT=$PWD/dist scripts/debian_root.sh run "$roots/$suite-build" bash -c \
    '/source/scripts/wheel.sh python3 /out/thermocline_moe-*.tar.gz /out'
done
ls dist
