#!/bin/bash
# Makes the environment of the numeric oracles (transformers, llama.cpp) and prints its python.
#
# usage: scripts/oracle_env.sh          an existing environment that has everything is used as it is
# THERMOCLINE_ORACLE_VENV               where it is, or shall be (default: .venv-oracle here)
# PYTHON                                the python that makes it (default: python3)
#
# llama.cpp is compiled for the instructions that /proc/cpuinfo names, and no others: a binary package
# would be either slow or killed by an unknown instruction. AMX is always off, because its code path
# crashes on small models.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
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
  printf -- ' -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF\n'
}

if ! complete; then
  constraints=()
  [ -f constraints.txt ] && constraints=(-c "$root/constraints.txt")
  {
    [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
    # First and alone: the flags must not reach other packages' builds. No cache: it may hold a build
    # for another machine.
    if ! "$venv/bin/python" -c 'import llama_cpp' 2>/dev/null; then
      CMAKE_ARGS=$(llama_flags) "$venv/bin/python" -m pip install -q --no-cache-dir \
        --no-binary llama-cpp-python "${constraints[@]}" "llama-cpp-python>=0.3.16"
    fi
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
