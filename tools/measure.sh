#!/usr/bin/env bash
# On a machine with a Hopper GPU: the tests, then the grid of layers and pairs of GEMMs that releases are compared by.
#
#     tools/measure.sh OUT [COMMIT]      from the root of a tree that holds python/moe_ext/moe_ext_cuda.so
#
# Leaves OUT/suite.log, host.log, demo.log, layers.jsonl and pairs.jsonl. With a second GPU layers are timed there while
# the first runs the tests. Needs no network.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath "${1:?OUT must be a folder}")
commit=${2:-$(git rev-parse --short HEAD)}
mkdir -p "$out"
export OMP_NUM_THREADS=1
PYTHONPATH=python python3 tools/build_planner.py

tests() {
  local cores
  cores=$(($(nproc) - 2))
  make test OFFLINE=1 PYTHON=python3 ARGS="-n $((cores > 1 ? cores : 1)) --dist worksteal -p no:benchmark" \
    > "$out/suite.log" 2>&1
  tail -n 1 "$out/suite.log"
  # What these measure, other processes change.
  PYTHONPATH=python python3 -m pytest -m gpu -p no:benchmark -k "host_time or first_call or loaded_once" \
    > "$out/host.log" 2>&1
  tail -n 1 "$out/host.log"
  make demo OFFLINE=1 PYTHON=python3 > "$out/demo.log" 2>&1 && echo "demo passed"
}

run() {
  local file=$1
  shift
  PYTHONPATH=python:. python3 -m bench.run --out "$out/$file.jsonl" --commit "$commit" --providers moe_ext \
    --cases all --dtypes bf16,fp8 "$@" | tail -n 1
}

layers() {
  run layers --op fused_moe --scales all --accumulate promoted --tokens 1,4,16,64,128,256
  run layers --op fused_moe --scales all --accumulate promoted --tokens 1024,8192
}

pairs() {
  run pairs --op grouped_gemm_pair --scales tensor,block128,channel --accumulate promoted --tokens 1,4,16,64,128,256
  run pairs --op grouped_gemm_pair --scales tensor,block128,channel --accumulate promoted --tokens 1024,8192
}

if (($(nvidia-smi -L | wc -l) > 1)); then
  CUDA_VISIBLE_DEVICES=1 layers &
  export CUDA_VISIBLE_DEVICES=0
  tests
  pairs
  wait
else
  tests
  pairs
  layers
fi
