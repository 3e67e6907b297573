#!/usr/bin/env bash
# Run one benchmark on a synthetic model, which is written first where it is missing.
# usage: scripts/bench.sh quick | llama | llama-gpu | llama-qwen35moe | llama-olmoe | kt | layer | types | lag | memory | published | requests | agent | overlap | overhead | http | http-large
#                         | larger | predictions | experts | foresight | link | streaming | round-trip | workers | gpu | settings | speculation | ranks | rank-speed [ARGUMENTS of the benchmark...]
# BENCH_MODELS                    folder of the models (default: build/models); 3.5 and 18.6 GB,
#                                 and 13 GB more for predictions
# THERMOCLINE_LLAMA_PYTHON        interpreter with llama_cpp (default: the one of scripts/oracle_env.sh,
#                                 which builds it where it is missing)
# LLAMA_BENCH                     llama.cpp's llama-bench with CUDA, for llama-gpu
# THERMOCLINE_KT_PYTHON           interpreter with kt-kernel (default: one in .venv-kt, which is made where it is missing)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${VENV:-.venv}/bin/python
models=${BENCH_MODELS:-build/models}
what=${1:?say which benchmark}
shift

model() { # LAYERS [SHAPE [SKEW]]
  local shape=${2:-qwen3-30b-a3b}
  local path=$models/$shape-$1-layers${3:+-skew-$3}.gguf
  if [ ! -f "$path" ]; then
    mkdir -p "$models"
    "$python" -m benchmarks.synthetic_model "$path" --shape "$shape" --layers "$1" --skew "${3:-0}" >&2
  fi
  echo "$path"
}

case $what in
  quick)
    out=$(mktemp -d)
    trap 'rm -rf "$out"' EXIT
    for name in moe_layer type_table loop_lag memory many_requests agent overlap pipeline_overhead shared_step predictions expert_cache expert_foresight expert_link prompt_streaming worker_round_trip expert_workers published_models settings speculation; do
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
  llama-qwen35moe | llama-olmoe)
    THERMOCLINE_LLAMA_PYTHON=${THERMOCLINE_LLAMA_PYTHON:-$(scripts/oracle_env.sh)}
    export THERMOCLINE_LLAMA_PYTHON
    if [ "$what" = llama-olmoe ]; then path=$(model 16 olmoe-1b-7b); else path=$(model 8 qwen3.6-35b-a3b); fi
    "$python" -m benchmarks.against_llama "$path" --contexts 0 --out "docs/results/against-$what.csv" "$@"
    ;;
  llama-gpu) # LLAMA_BENCH: llama.cpp's llama-bench, built with CUDA
    : "${LLAMA_BENCH:?give the llama-bench of a llama.cpp with CUDA: LLAMA_BENCH=PATH make bench-llama-gpu}"
    "$python" -m benchmarks.against_llama_gpu "$(model 48)" --llama-bench "$LLAMA_BENCH" "$@"
    ;;
  kt)
    if [ -z "${THERMOCLINE_KT_PYTHON:-}" ]; then
      kt=.venv-kt/bin/python
      if ! "$kt" -c 'import kt_kernel' 2>/dev/null; then
        {
          "$python" -m venv --clear .venv-kt
          "$kt" -m pip install -q -c constraints.txt torch numpy gguf safetensors
          "$kt" -m pip install -q --no-deps kt-kernel==0.7.2  # its requirements are for serving on GPUs
        } >&2
      fi
      export THERMOCLINE_KT_PYTHON=$kt
    fi
    "$python" -m benchmarks.against_kt "$@"
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
  agent) # a session of 60,000 tokens: few layers, since attention takes most of it
    status=0
    mkdir -p "$models"
    windowed=$models/gpt-oss-20b-2-layers.gguf
    [ -f "$windowed" ] ||
      "$python" -m benchmarks.published_models.random_gguf gpt-oss-20b "$windowed" --layers 2 --mix MXFP4 >&2
    for path in "$(model 2)" "$windowed" "$(model 4 qwen3.6-35b-a3b)"; do
      "$python" -m benchmarks.agent "$path" --out "docs/results/agent-$(basename "$path" .gguf).csv" "$@" || status=$?
    done
    exit $status
    ;;
  overhead)
    status=0
    "$python" -m benchmarks.pipeline_overhead "$@" || status=$?
    "$python" -m benchmarks.shared_step || status=$?
    exit $status
    ;;
  http) "$python" -m benchmarks.http_overhead "$@" ;;
  http-large)
    path=$(model 8)
    "$python" -m benchmarks.http_overhead "$path" "$@"
    ;;
  memory)
    path=$(model 48)
    "$python" -m benchmarks.memory "$path" "$@"
    ;;
  published) "$python" -m benchmarks.published_models "$@" ;;
  link)
    status=0
    for path in thermocline/demo/demo-moe.gguf "$(model 4 mini)" "$(model 4 mini 0.5)"; do
      "$python" -m benchmarks.expert_link "$path" "$@" || status=$?
    done
    exit $status
    ;;
  streaming) "$python" -m benchmarks.prompt_streaming "$(model 4)" "$@" ;;
  foresight) "$python" -m benchmarks.expert_foresight "$@" ;;
  experts) "$python" -m benchmarks.expert_cache "$@" ;;
  round-trip) "$python" -m benchmarks.worker_round_trip "$@" ;;
  workers)
    path=$(model 8)
    "$python" -m benchmarks.expert_workers "$path" "$@"
    ;;
  ranks) # a simulation: the same figures on any machine
    exec "$python" -m benchmarks.ranks "$@"
    ;;
  rank-speed) # ranks with a core each, started here
    "$python" -m benchmarks.rank_speed "$(model 8)" "$@"
    "$python" -m benchmarks.rank_speed "$(model 8)" --tp 2 --prompt 512 --cases --sides "1 core" ranks "$@"
    ;;
  settings) # as root for the memory limits, which need a memory group
    "$python" -m benchmarks.settings "$(model 8)" "$(model 8 qwen3.6-35b-a3b)" "$(model 16 olmoe-1b-7b)" "$@"
    ;;
  speculation)
    # 21 minutes for each model; as root for the part in a memory group. llama.cpp where an interpreter has it.
    status=0
    mkdir -p "$models"
    block=$models/qwen3.6-35b-a3b-8-layers-block.gguf
    [ -f "$block" ] ||
      "$python" -m benchmarks.published_models.random_gguf Qwen3.6-35B-A3B-MTP "$block" --layers 8 --block --vocabulary 49664 >&2
    if [ -z "${THERMOCLINE_LLAMA_PYTHON:-}" ] && [ -x .venv-oracle/bin/python ]; then
      export THERMOCLINE_LLAMA_PYTHON=$PWD/.venv-oracle/bin/python
    fi
    "$python" -m benchmarks.speculation "$block" --out docs/results/speculation-qwen3.6-35b-a3b.csv "$@" || status=$?
    "$python" -m benchmarks.speculation "$(model 8)" --out docs/results/speculation-qwen3-30b-a3b.csv "$@" || status=$?
    exit $status
    ;;
  gpu) "$python" -m benchmarks.gpu_experts "$@" ;;
  larger) # as root: it makes a memory group
    THERMOCLINE_LLAMA_PYTHON=${THERMOCLINE_LLAMA_PYTHON:-$(scripts/oracle_env.sh)}
    export THERMOCLINE_LLAMA_PYTHON
    path=$(model 8)
    "$python" -m benchmarks.larger_than_ram "$path" "$@"
    ;;
  predictions) # as root: it makes a memory group
    "$python" -m benchmarks.predictions "$(model 8)" "$(model 8 qwen3-30b-a3b 0.5)" \
      "$(model 8 qwen3.6-35b-a3b)" "$(model 16 olmoe-1b-7b)" "$@"
    ;;
  *)
    echo "no benchmark $what: scripts/bench.sh names them in its first lines" >&2
    exit 2
    ;;
esac
