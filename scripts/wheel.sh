#!/usr/bin/env bash
# Build a wheel for other machines: for glibc 2.28 and later, with the kernels of all instruction sets.
# usage: scripts/wheel.sh PYTHON SOURCE FOLDER
#        PYTHON 3.11 makes a wheel for 3.11, any later one the wheel for 3.12 and all after it.
#        SOURCE is this folder or an sdist of it.
# Needs g++ 12 (CXX names it) and Python's headers. The other tools come with the hashes in hashes/wheels.txt.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$1 source=$2 folder=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/tools"
export PATH="$work/tools/bin:$PATH" ZIG_GLOBAL_CACHE_DIR="$work/zig"
pip() { python -m pip --quiet --disable-pip-version-check "$@"; }
pip install --require-hashes --no-deps -r "$root/hashes/wheels.txt"
export WHEEL_CXX=${CXX:-$(command -v g++-12 || echo g++)} CXX="$root/scripts/wheel_cxx.sh"
export SKBUILD_CMAKE_DEFINE=THERMOCLINE_OLD_GLIBC=ON SKBUILD_BUILD_DIR="$work/build"
pip wheel --no-deps --no-build-isolation -w "$work" "$source"
# auditwheel refuses what the name would promise wrongly.
auditwheel repair --only-plat --plat "manylinux_2_28_$(uname -m)" -w "$folder" "$work"/thermocline_moe-*.whl
