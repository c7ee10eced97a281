"""A layer's kernels: a function of host numbers."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from moe_ext._activations import INTERLEAVED
from moe_ext._configs import GroupedGemmConfig, config_indices, matching_configs
from moe_ext._dispatch import choose
from moe_ext._dispatch_measured import Measured
from moe_ext._dispatch_table import WHOLE_ROWS
from moe_ext._dispatch_table_layer import LAYER_TABLES
from moe_ext._fused_moe_checks import Layer
from moe_ext._fused_moe_scales import WeightScale
from moe_ext._scales import SCALE_BLOCK


class Kernels(NamedTuple):
    """Indices of the kernels of the two GEMMs."""

    gate_up: int
    down: int


class LayerDecision(NamedTuple):
    """The chosen kernels and why the first is: `source` is "table", "likeness" or "cost model"."""

    kernels: Kernels
    source: str
    reason: str


def takes_plain(layer: Layer, bias: bool) -> bool:
    """Whether gated kernels in plain order with scales per block can take the first GEMM.

    They read one weight scale for each 128 columns of a tile's gate and of its up, and have no
    registers for a bias. C++ refuses others, by the rows of `w13` (csrc/grouped_gemm/scales.cpp):
    half as many where there is no up.
    """
    scale = layer.w13_scale
    whole_blocks = layer.intermediate_size % (SCALE_BLOCK if layer.gated else 2 * SCALE_BLOCK) == 0
    segments = scale is not None and scale.n_segments == 2
    return (whole_blocks or segments) and layer.gate_up_layout != INTERLEAVED and not bias


def gated_candidates(layer: Layer, accumulate: str, bias: bool) -> tuple[GroupedGemmConfig, ...]:
    """List the gated kernels that can take the first GEMM."""
    configs = matching_configs("fp8" if layer.fp8 else "bf16", accumulate, ("gated", "either"))
    if accumulate != "block" or takes_plain(layer, bias):
        return configs
    return tuple(config for config in configs if config.swapped)


def nearest_kernel(
    wanted: GroupedGemmConfig, candidates: tuple[GroupedGemmConfig, ...]
) -> GroupedGemmConfig:
    """Return the candidate with the tile most like the wanted one, by order, tokens, weights."""

    def distance(config: GroupedGemmConfig) -> tuple[bool, float, float]:
        return (
            config.swapped != wanted.swapped,
            abs(math.log2(config.tile_tokens / wanted.tile_tokens)),
            abs(math.log2(config.tile_weights / wanted.tile_weights)),
        )

    return min(candidates, key=distance)


class _Finder(NamedTuple):
    """A measured table, the kernels of its choices, and which of these a layer can take."""

    table: Measured
    kernels: tuple[Kernels, ...]
    allowed: int


@functools.lru_cache(maxsize=64)
def _finder(
    table: Measured, second: str, plain: bool, either: bool, split_k: bool, whole_rows: bool
) -> _Finder | None:
    """Return what finds kernels in a table, None where it has none that the layers can take.

    `second` is how the second GEMM sums, `plain` whether the first can run in plain order, `either`
    whether its kernel can run the second too, `split_k` whether K may be added up in parts,
    `whole_rows` whether its K is of those that kernels for few K are for.
    """
    first = matching_configs(table.dtype, table.accumulate, ("gated", "either"))
    first = tuple(config for config in first if plain or config.swapped)
    rows = matching_configs(table.dtype, second)
    rows = tuple(c for c in rows if whole_rows or c.order != "SwapABRows")
    sums = "promoted" if second == "fast" else second
    both = matching_configs(table.dtype, sums, ("either",)) if either else ()
    allowed = table.allowed(
        [
            *(config.id for config in rows if split_k or config.split_k == 1),
            *(config.id for config in both if config in first),
        ],
        [config.id for config in first],
    )
    known = config_indices()
    pairs = (choice.split("+") for choice in table.compiled)
    kernels = tuple(Kernels(known[names[0]], known[names[-1]]) for names in pairs)
    return _Finder(table, kernels, allowed) if allowed else None


def prepare_finders() -> None:
    """Make what the first choices of common layers need."""
    for (_, gated), table in LAYER_TABLES.items():
        second = "block" if table.accumulate == "block" else "promoted"
        for whole_rows in (False, True):
            _finder(table, second, gated != "block_swapped", True, True, whole_rows)
        table.finder  # noqa: B018  made when it is first asked for


class _Kinds(NamedTuple):
    """How both GEMMs of a layer sum, and what can take the first."""

    dtype: str
    first: str
    second: str
    gated: str  # what the first GEMM's kernels do
    plain: bool  # whether those of plain order are among them


def _kinds_of(layer: Layer, accumulate: str, bias: bool, batch_invariant: bool) -> _Kinds:
    if batch_invariant and accumulate == "fast":
        accumulate = "promoted"  # which every kernel of the first GEMM does: all rows get the same

    def kind(scale: WeightScale | None) -> str:
        return "block" if scale is not None and scale.granularity == "1x128" else accumulate

    first, second = kind(layer.w13_scale), kind(layer.w2_scale)
    # No gated kernel leaves the tensor core's sums where they are: "fast" allows it, no more.
    gated = "block" if first == "block" else "promoted" if layer.fp8 else "fp32"
    plain = gated != "block" or takes_plain(layer, bias)
    return _Kinds("fp8" if layer.fp8 else "bf16", first, second, gated, plain)


def _finder_of(layer: Layer, kinds: _Kinds, batch_invariant: bool, sm_count: int) -> _Finder | None:
    table = LAYER_TABLES.get((kinds.dtype, kinds.gated if kinds.plain else "block_swapped"))
    if table is None:
        return None
    either = layer.hidden_size % 16 == 0  # rows come in slabs of 16
    whole_rows = _wants_whole_rows(layer, kinds.second, sm_count)
    return _finder(table, kinds.second, kinds.plain, either, not batch_invariant, whole_rows)


def _wants_whole_rows(layer: Layer, second: str, sm_count: int) -> bool:
    num_rows, num_groups, n, k = _sizes(layer)
    return any(
        k <= row.max_k and row.matches(num_rows, num_groups, n, k, sm_count)
        for row in WHOLE_ROWS.get(second, ())
    )


def rule_of(
    layer: Layer, accumulate: str, bias: bool, batch_invariant: bool, sm_count: int
) -> tuple[Measured, int] | None:
    """Return the table, and which of its choices, that this layer's kernels are chosen by.

    For any number of tokens: None where the kernels are chosen otherwise for some.
    """
    kinds = _kinds_of(layer, accumulate, bias, batch_invariant)
    finder = _finder_of(layer, kinds, batch_invariant, sm_count)
    few_k = any(layer.intermediate_size <= row.max_k for row in WHOLE_ROWS.get(kinds.second, ()))
    return None if finder is None or few_k else (finder.table, finder.allowed)


def _ring_bytes_k(config: GroupedGemmConfig) -> int:
    """Bytes of K in flight."""
    return config.stages * config.tile_k_bytes


def decide_kernels(
    layer: Layer, accumulate: str, bias: bool, batch_invariant: bool, sm_count: int
) -> LayerDecision:
    """Choose a layer's kernels and say why; `bias` is whether the first GEMM has one.

    A measured choice, or the gated kernel most like that which the product alone would take.
    Where it can, it runs the second GEMM too: its code need not be fetched again
    (docs/notes/cold-code.md).
    """
    kinds = _kinds_of(layer, accumulate, bias, batch_invariant)
    finder = _finder_of(layer, kinds, batch_invariant, sm_count)
    if finder is not None:
        return _decided(finder, layer, sm_count)
    dtype, first, second, gated, _ = kinds
    num_rows = layer.num_tokens * layer.top_k
    sizes = {"num_rows": num_rows, "num_groups": layer.num_experts, "sm_count": sm_count}
    n = 2 * layer.intermediate_size
    like = choose(dtype=dtype, accumulate=first, n=n, k=layer.hidden_size, **sizes)
    gate_up = nearest_kernel(like.config, gated_candidates(layer, gated, bias))
    source = "likeness" if like.source == "table" else like.source
    reason = f"most like {like.config.id}, which the product alone would take; {like.reason}"
    down = choose(
        dtype=dtype, accumulate=second, n=layer.hidden_size, k=layer.intermediate_size, **sizes
    ).config
    if _runs_both(gate_up, down, layer):
        down = gate_up
    if batch_invariant and down.split_k > 1:
        # All others add up K in one order, whatever their tiles: tests/test_kernels_gpu.py.
        same = matching_configs(dtype, down.accumulate)
        down = nearest_kernel(down, tuple(config for config in same if config.split_k == 1))
    return LayerDecision(Kernels(gate_up.index, down.index), source, reason)


def _sizes(layer: Layer) -> tuple[int, int, int, int]:
    """Return a layer's rows and sizes, as measured tables ask for them."""
    num_rows = layer.num_tokens * layer.top_k
    return num_rows, layer.num_experts, layer.hidden_size, layer.intermediate_size


def _decided(finder: _Finder, layer: Layer, sm_count: int) -> LayerDecision:
    """Return what a measured table decides."""
    table = finder.table
    found = table.layer(*_sizes(layer), sm_count, finder.allowed)
    kernels = finder.kernels[table.compiled.index(found.choice)]
    source = "cost model" if found.nearest is None else "table"
    return LayerDecision(kernels, source, table.reason(found))


def _runs_both(gate_up: GroupedGemmConfig, down: GroupedGemmConfig, layer: Layer) -> bool:
    """Whether the first GEMM's kernel is to run the second too, which alone would take `down`."""
    sums = "promoted" if down.accumulate == "fast" else down.accumulate
    if gate_up.output != "either" or gate_up.accumulate != sums:
        return False
    if layer.hidden_size % 16:  # rows come in slabs of 16
        return False
    # A ring this deep is for few experts: with it mixtral takes 95 us at T = 1, 102 without
    # (h200-2026-11-30-1c0e5bd.jsonl, probes/layer-kernels-2026-11-30.jsonl).
    return down.order != "SwapABRows" and _ring_bytes_k(down) < 2 * _ring_bytes_k(gate_up)


@functools.lru_cache(maxsize=4096)
def choose_kernels(
    layer: Layer, accumulate: str, bias: bool, batch_invariant: bool, sm_count: int
) -> Kernels:
    """Choose a layer's kernels: what the op asks for once per problem.

    What `decide_kernels` says, without the words: those take longer than the choice.
    """
    kinds = _kinds_of(layer, accumulate, bias, batch_invariant)
    finder = _finder_of(layer, kinds, batch_invariant, sm_count)
    if finder is not None:
        choose_layer = finder.table.finder.choose
        return finder.kernels[choose_layer(*_sizes(layer), sm_count, finder.allowed)[0]]
    return decide_kernels(layer, accumulate, bias, batch_invariant, sm_count).kernels
