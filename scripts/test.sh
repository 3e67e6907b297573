#!/usr/bin/env bash
# The test suite; arguments go to pytest. A file of tests runs in one process, the longest files first
# (tests/conftest.py): xdist itself would begin with those of most tests.
# THERMOCLINE_TEST_PROCESSES      how many there are at a time (default: 2)
set -euo pipefail
cd "$(dirname "$0")/.."
# The processes share the cores. Threads of NumPy and torch that wait for each other at each small product took
# three times the processor time.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1}
# Hundreds of tests start a process. Where Python may not keep bytecode, each compiles the package again: 0.7 s.
unset PYTHONDONTWRITEBYTECODE
exec "${VENV:-.venv}/bin/python" -m pytest -n "${THERMOCLINE_TEST_PROCESSES:-2}" --dist loadfile \
  --no-loadscope-reorder "$@"
