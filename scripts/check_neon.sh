#!/usr/bin/env bash
# Cross-compile the kernels for 64-bit ARM and compare their NEON set with the portable one in an emulator.
# Skips, with a message, where the cross compiler or the emulator is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
compiler=${ARM_CXX:-aarch64-linux-gnu-g++}
emulator=${ARM_EMULATOR:-qemu-aarch64}
for tool in "$compiler" "$emulator"; do
  command -v "$tool" >/dev/null || {
    echo "skipped: $tool is missing (Debian: apt-get install g++-aarch64-linux-gnu qemu-user)"
    exit 0
  }
done
cmake=${VENV:-.venv}/bin/cmake
[ -x "$cmake" ] || cmake=cmake
build=build/check-neon
"$cmake" -S native -B "$build" -DTHERMOCLINE_PYTHON=OFF \
  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER="$compiler" \
  -DCMAKE_EXE_LINKER_FLAGS=-static >/dev/null
"$cmake" --build "$build" --target compare_sets
"$emulator" "$build/compare_sets"
