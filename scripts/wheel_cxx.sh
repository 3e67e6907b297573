#!/bin/sh
# The C++ compiler of a wheel (scripts/wheel.sh): $WHEEL_CXX compiles, and zig links shared libraries against glibc 2.28.
# zig is asked for its linker and old symbols alone: the kernels are those that the tests of g++ have seen.
for argument in "$@"; do
  if [ "$argument" = -shared ]; then linking=yes; fi
done
if [ -z "${linking:-}" ]; then exec "$WHEEL_CXX" "$@"; fi
archive() { "$WHEEL_CXX" -print-file-name="$1"; }
# libstdc++ and the unwinder go into the library: an old machine has old ones.
exec python -m ziglang cc -target "$(uname -m)-linux-gnu.2.28" "$@" \
  "$(archive libstdc++.a)" "$(archive libgcc.a)" "$(archive libgcc_eh.a)" -lm -lpthread
