#!/usr/bin/env bash
# On a machine with a Hopper GPU: the tests, then the grid of layers and pairs of GEMMs that releases are compared by.
#
#     tools/measure.sh OUT [COMMIT]      from the root of a tree that holds python/moe_ext/moe_ext_cuda.so
#
# Leaves OUT/suite.log, alone.log, demo.log, layers.jsonl and pairs.jsonl. With a second GPU the grid is timed there
# while the first runs the tests, and the tests of two GPUs run too. Needs no network.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath "${1:?OUT must be a folder}")
commit=${2:-$(git rev-parse --short HEAD)}
mkdir -p "$out"
export OMP_NUM_THREADS=1
PYTHONPATH=python python3 tools/build_planner.py

suite() {
  local cores
  cores=$(($(env -u OMP_NUM_THREADS nproc) - 2))
  make test OFFLINE=1 PYTHON=python3 ARGS="-n $((cores > 1 ? cores : 1)) --dist worksteal -p no:benchmark" \
    > "$out/suite.log" 2>&1
  tail -n 1 "$out/suite.log"
}

# What other processes change, and what needs every GPU of the machine.
alone() {
  PYTHONPATH=python python3 -m pytest -p no:benchmark -m multi_gpu > "$out/alone.log" 2>&1
  tail -n 1 "$out/alone.log"
  PYTHONPATH=python python3 -m pytest -p no:benchmark -m gpu -k "host_time or first_call or loaded_once" \
    >> "$out/alone.log" 2>&1
  tail -n 1 "$out/alone.log"
  make demo OFFLINE=1 PYTHON=python3 > "$out/demo.log" 2>&1 && echo "demo passed"
}

run() {
  local file=$1
  shift
  PYTHONPATH=python:. python3 -m bench.run --out "$out/$file.jsonl" --commit "$commit" --providers moe_ext \
    --cases all --dtypes bf16,fp8 "$@" | tail -n 1
}

grid() {
  run layers --op fused_moe --scales all --accumulate promoted --tokens 1,4,16,64,128,256
  run layers --op fused_moe --scales all --accumulate promoted --tokens 1024,8192
  run pairs --op grouped_gemm_pair --scales tensor,block128,channel --accumulate promoted --tokens 1,4,16,64,128,256
  run pairs --op grouped_gemm_pair --scales tensor,block128,channel --accumulate promoted --tokens 1024,8192
}

if (($(nvidia-smi -L | wc -l) > 1)); then
  CUDA_VISIBLE_DEVICES=1 grid &
  CUDA_VISIBLE_DEVICES=0 suite
  wait
else
  suite
  grid
fi
alone
