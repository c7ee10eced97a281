"""Benchmark cases: the shapes of a layer, by name, derived from data/model_shapes.csv."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

MODEL_SHAPES = Path(__file__).parent / "data" / "model_shapes.csv"
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
ROUTINGS = ("zipf0.6", "uniform", "zipf1.2")
STAGES = ("gate_up", "down")
DRY_RUN = "-dry-run"  # ends the names of miniatures
OF_SIZES = re.compile(r"(\d+)x(\d+)x(\d+)-top(\d+)")  # names of cases that were drawn

# case name -> (row of model_shapes.csv, tensor-parallel degree, expert-parallel degree)
_CASE_SOURCES = {
    "mixtral": ("Mixtral-8x7B", 1, 1),
    "mixtral-tp4": ("Mixtral-8x7B", 4, 1),
    "qwen3-30b": ("Qwen3-30B-A3B", 1, 1),
    "qwen3-30b-tp4": ("Qwen3-30B-A3B", 4, 1),
    "qwen3-235b": ("Qwen3-235B-A22B", 1, 1),
    "qwen3-next": ("Qwen3-Next-80B-A3B", 1, 1),
    "qwen3.5-397b": ("Qwen3.5-397B-A17B", 1, 1),
    "deepseek-v3-tp8": ("DeepSeek-V3/R1/V3.1", 8, 1),
    "deepseek-v3-ep8": ("DeepSeek-V3/R1/V3.1", 1, 8),
    "gpt-oss-120b": ("gpt-oss-120b", 1, 1),
    "glm-4.5-air": ("GLM-4.5-Air", 1, 1),
    "glm-4.5-air-tp8": ("GLM-4.5-Air", 8, 1),
}
# Measured only where they are named, and by the tuner: a full run leaves them out. Two shards of
# one layer whose intermediate size is 192, one and a half blocks of scales, and 256; and ranks with
# few experts, so with few tiles of weights.
_NAMED_SOURCES = {
    "shard-192": ("Qwen3-30B-A3B", 4, 1),
    "shard-256": ("Qwen3-30B-A3B", 3, 1),
    "qwen3-30b-ep8": ("Qwen3-30B-A3B", 1, 8),
    "mixtral-ep4": ("Mixtral-8x7B", 1, 4),
}


@dataclass(frozen=True)
class Case:
    """One layer as one GPU sees it: sizes are per GPU."""

    name: str
    model: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int

    def stage_shape(self, stage: str) -> tuple[int, int]:
        """Return (n, k) of the GEMM of a stage: `gate_up` or `down`."""
        if stage == "gate_up":
            return 2 * self.intermediate_size, self.hidden_size
        if stage == "down":
            return self.hidden_size, self.intermediate_size
        raise ValueError(f"stage_shape: `stage` must be one of {STAGES}, got {stage!r}")

    def shrunk(self) -> Case:
        """Return a miniature of the case that a CPU runs in milliseconds."""
        experts = min(self.num_experts, 8)
        return Case(
            name=f"{self.name}{DRY_RUN}",
            model=self.model,
            num_experts=experts,
            top_k=min(self.top_k, experts),
            hidden_size=128,
            intermediate_size=64,
        )


@lru_cache(maxsize=1)
def _model_rows() -> dict[str, dict[str, str]]:
    with MODEL_SHAPES.open(newline="") as file:
        return {row["model"]: row for row in csv.DictReader(file)}


def case_names() -> list[str]:
    """Return the names of the cases of a full run, in its order."""
    return list(_CASE_SOURCES)


def extra_case_names() -> list[str]:
    """Return the names of the cases that a full run leaves out."""
    return list(_NAMED_SOURCES)


def tuned_case_names() -> list[str]:
    """Return the names of cases of different sizes: what the tuner times by default."""
    every = {name: get_case(name) for name in [*case_names(), *extra_case_names()]}
    sizes = {replace(case, name="", model=""): name for name, case in reversed(every.items())}
    return [name for name in every if name in sizes.values()]


def name_of_sizes(num_experts: int, hidden_size: int, intermediate_size: int, top_k: int) -> str:
    """Return the name of a case that has no other: `get_case` reads it."""
    return f"{num_experts}x{hidden_size}x{intermediate_size}-top{top_k}"


def get_case(name: str) -> Case:
    """Return a case by name, which may spell out its sizes as `name_of_sizes` does.

    Expert parallelism keeps top-k: a rank of deepseek-v3-ep8 owns 32 experts and the benchmark
    sends each of its tokens to 8 of those 32.
    """
    if name.endswith(DRY_RUN):
        return get_case(name.removesuffix(DRY_RUN)).shrunk()
    if sizes := OF_SIZES.fullmatch(name):
        experts, hidden, intermediate, top_k = map(int, sizes.groups())
        return Case(name, "none", experts, top_k, hidden, intermediate)
    sources = _CASE_SOURCES | _NAMED_SOURCES
    if name not in sources:
        raise ValueError(f"get_case: `name` must be one of {list(sources)}, got {name!r}")
    model, tensor_parallel, expert_parallel = sources[name]
    row = _model_rows()[model]
    experts, intermediate = int(row["num_experts"]), int(row["intermediate_size"])
    return Case(
        name=name,
        model=model,
        num_experts=experts // expert_parallel,
        top_k=int(row["top_k"]),
        hidden_size=int(row["hidden_size"]),
        intermediate_size=intermediate // tensor_parallel,
    )
