#!/bin/bash
# Makes the environment of the numeric oracles (transformers, llama.cpp) and prints its python.
#
# usage: scripts/oracle_env.sh              an existing environment that has everything is used as it is
#        scripts/oracle_env.sh --avx2 DIR   only llama.cpp, compiled for AVX2 and nothing above it, in DIR: what
#                                           `benchmarks.against_llama --cpu-isa avx2` is compared with
# THERMOCLINE_ORACLE_VENV               where it is, or shall be (default: .venv-oracle here)
# PYTHON                                the python that makes it (default: python3)
#
# llama.cpp is compiled for the instructions that /proc/cpuinfo names, and no others: a binary package
# would be either slow or killed by an unknown instruction. AMX is always off.
set -euo pipefail
only=
if [ $# -gt 0 ]; then
  { [ $# = 2 ] && [ "$1" = --avx2 ]; } || { echo "usage: scripts/oracle_env.sh [--avx2 DIR]" >&2; exit 2; }
  mkdir -p "$2"
  only=$(cd "$2" && pwd)
fi
cd "$(dirname "$0")/.."
root=$PWD
constraints=()
[ -f constraints.txt ] && constraints=(-c "$root/constraints.txt")
# Its code path crashes on small models.
AMX_OFF="-DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF"
venv=${THERMOCLINE_ORACLE_VENV:-$root/.venv-oracle}
case $venv in /*) ;; *) venv=$root/$venv ;; esac

complete() {
  [ -x "$venv/bin/python" ] &&
    (cd / && "$venv/bin/python" -W ignore -c \
      'import llama_cpp, transformers, torch, pytest; from thermocline.kernels.cpu import load_native as f; f()') \
      >/dev/null 2>&1
}

llama_flags() {
  if [ "$(uname -m)" != x86_64 ] || [ ! -r /proc/cpuinfo ]; then
    echo "-DGGML_NATIVE=ON"
    return
  fi
  local flags pair state
  flags=" $(grep -m1 '^flags' /proc/cpuinfo | cut -d: -f2) "
  printf -- '-DGGML_NATIVE=OFF'
  for pair in SSE42:sse4_2 AVX:avx AVX2:avx2 FMA:fma F16C:f16c BMI2:bmi2 AVX_VNNI:avx_vnni \
    AVX512:avx512f+avx512cd+avx512bw+avx512dq+avx512vl AVX512_VBMI:avx512_vbmi \
    AVX512_VNNI:avx512_vnni AVX512_BF16:avx512_bf16; do
    state=ON
    for need in $(tr + ' ' <<<"${pair#*:}"); do
      [[ $flags == *" $need "* ]] || state=OFF
    done
    printf -- ' -DGGML_%s=%s' "${pair%%:*}" "$state"
  done
  printf -- ' %s\n' "$AMX_OFF"
}

avx2_flags() {
  local name
  printf -- '-DGGML_NATIVE=OFF'
  for name in SSE42 AVX AVX2 FMA F16C BMI2; do printf -- ' -DGGML_%s=ON' "$name"; done
  for name in AVX_VNNI AVX512 AVX512_VBMI AVX512_VNNI AVX512_BF16; do printf -- ' -DGGML_%s=OFF' "$name"; done
  printf -- ' %s\n' "$AMX_OFF"
}

# Compiles llama.cpp into the environment $1 with the flags $2. Alone: the flags must not reach other packages' builds.
# No cache: it may hold a build for another machine.
install_llama() {
  [ -x "$1/bin/python" ] || "${PYTHON:-python3}" -m venv "$1"
  "$1/bin/python" -c 'import llama_cpp' 2>/dev/null ||
    CMAKE_ARGS=$2 "$1/bin/python" -m pip install -q --no-cache-dir \
      --no-binary llama-cpp-python "${constraints[@]}" "llama-cpp-python>=0.3.16"
}

if [ -n "$only" ]; then
  install_llama "$only" "$(avx2_flags)" >&2
  echo "$only/bin/python"
  exit
fi

if ! complete; then
  {
    install_llama "$venv" "$(llama_flags)"
    # From before the distribution was renamed: the same files under the old name.
    if "$venv/bin/python" -m pip show -q thermocline 2>/dev/null; then
      "$venv/bin/python" -m pip uninstall -q -y thermocline
    fi
    # A build folder of its own: the everyday environment's has that environment's paths in it.
    "$venv/bin/python" -m pip install -q "${constraints[@]}" \
      --config-settings=build-dir="build/oracle" -e ".[dev,oracle]"
  } >&2
  complete || { echo "the oracle environment $venv is incomplete: remove it and try again" >&2; exit 1; }
fi
echo "$venv/bin/python"
