#!/usr/bin/env bash
# Run one benchmark on a synthetic model, which is written first where it is missing.
# usage: scripts/bench.sh quick | llama | layer | types | lag | memory | requests | overlap | overhead | round-trip | workers | http | http-large | larger [ARGUMENTS of the benchmark...]
# BENCH_MODELS                    folder of the models (default: build/models); 3.5 and 18.6 GB
# THERMOCLINE_LLAMA_PYTHON        interpreter with llama_cpp (default: the one of scripts/oracle_env.sh,
#                                 which builds it where it is missing)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${VENV:-.venv}/bin/python
models=${BENCH_MODELS:-build/models}
what=${1:?say which benchmark}
shift

model() {
  local path=$models/qwen3-30b-a3b-$1-layers.gguf
  if [ ! -f "$path" ]; then
    mkdir -p "$models"
    "$python" -m benchmarks.synthetic_model "$path" --layers "$1" >&2
  fi
  echo "$path"
}

case $what in
  quick)
    out=$(mktemp -d)
    trap 'rm -rf "$out"' EXIT
    for name in moe_layer type_table loop_lag memory many_requests overlap pipeline_overhead worker_round_trip expert_workers; do
      echo "== $name"
      extra=()
      [ $name = type_table ] && extra=(--markdown "$out/types.md")
      "$python" -m "benchmarks.$name" --quick --out "$out/rows.csv" "${extra[@]}"
    done
    ;;
  llama)
    THERMOCLINE_LLAMA_PYTHON=${THERMOCLINE_LLAMA_PYTHON:-$(scripts/oracle_env.sh)}
    export THERMOCLINE_LLAMA_PYTHON
    path=$(model 8)
    "$python" -m benchmarks.against_llama "$path" "$@"
    ;;
  layer) "$python" -m benchmarks.moe_layer "$@" ;;
  types) "$python" -m benchmarks.type_table "$@" ;;
  lag)
    path=$(model 8)
    "$python" -m benchmarks.loop_lag "$path" "$@"
    ;;
  requests)
    path=$(model 8)
    "$python" -m benchmarks.many_requests "$path" "$@"
    ;;
  overlap)
    path=$(model 8)
    "$python" -m benchmarks.overlap "$path" "$@"
    ;;
  round-trip) "$python" -m benchmarks.worker_round_trip "$@" ;;
  workers)
    path=$(model 8)
    "$python" -m benchmarks.expert_workers "$path" "$@"
    ;;
  overhead) "$python" -m benchmarks.pipeline_overhead "$@" ;;
  http) "$python" -m benchmarks.http_overhead "$@" ;;
  http-large)
    path=$(model 8)
    "$python" -m benchmarks.http_overhead "$path" "$@"
    ;;
  memory)
    path=$(model 48)
    "$python" -m benchmarks.memory "$path" "$@"
    ;;
  larger) # as root: it makes a memory group
    THERMOCLINE_LLAMA_PYTHON=${THERMOCLINE_LLAMA_PYTHON:-$(scripts/oracle_env.sh)}
    export THERMOCLINE_LLAMA_PYTHON
    path=$(model 8)
    "$python" -m benchmarks.larger_than_ram "$path" "$@"
    ;;
  *)
    echo "no benchmark $what: choose quick, llama, layer, types, lag, memory, requests, overlap, overhead, round-trip, workers or larger" >&2
    exit 2
    ;;
esac
