"""The compiled kernels as values: a `GroupedGemmConfig` per row of csrc's configs.def."""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType


@dataclasses.dataclass(frozen=True)
class GroupedGemmConfig:
    """One compiled kernel.

    Attributes:
        index: position in the list; what the C++ op takes.
        id: name; what users, tables and profilers show.
        order: "SwapAB" (weights on the M side of WGMMA), "SwapABRows" (the same, with whole rows of
            weights in shared memory) or "Plain" (tokens on M).
        dtype: "bf16" or "fp8" operands.
        accumulate: "fp32" (bf16), "promoted", "fast" or, for scales per block, "block", or
            "shifted" where the weights' blocks begin inside k (fp8).
        output: "rows" for the product, "gated" for gate and up joined by an activation, "either"
            for what the call asks for.
        tile_weights: rows of `b[group]` in one CTA's tile.
        tile_tokens: rows of `a` in one CTA's tile, at most.
        tile_k_bytes: bytes of K in one stage of the shared-memory ring.
        stages: depth of the ring.
        mma_warp_groups: warp groups that issue WGMMA.
        split_k: CTAs of a cluster, which share one tile, each with its own part of K.
        ctas_per_sm: co-resident CTAs the kernel is cut for.
    """

    index: int
    id: str
    order: str
    dtype: str
    accumulate: str
    output: str
    tile_weights: int
    tile_tokens: int
    tile_k_bytes: int
    stages: int
    mma_warp_groups: int
    split_k: int
    ctas_per_sm: int

    @property
    def swapped(self) -> bool:
        """Whether weights sit on the M side of WGMMA, as `is_swapped` in C++ has it."""
        return self.order != "Plain"


_COLUMNS = tuple(field.name for field in dataclasses.fields(GroupedGemmConfig))[1:]


def parse_configs(csv_text: str) -> tuple[GroupedGemmConfig, ...]:
    """Parse the list of kernels: a header line, then a row a kernel."""
    header, *rows = csv_text.strip().splitlines()
    if tuple(header.split(",")) != _COLUMNS:
        raise RuntimeError(
            f"moe_ext: the list of kernels must have the columns {','.join(_COLUMNS)}, got "
            f"{header}; the compiled modules come from another version: reinstall the package"
        )
    configs = []
    for index, row in enumerate(rows):
        name, order, dtype, accumulate, output, *numbers = row.split(",")
        configs.append(
            GroupedGemmConfig(
                index,
                name,
                order,
                dtype.lower(),
                accumulate.lower(),
                output.lower(),
                *map(int, numbers),
            )
        )
    return tuple(configs)


def planner() -> ModuleType:
    """Import the compiled planner: when it is needed, not at import of the package."""
    try:
        from moe_ext import _planner
    except ImportError as error:
        raise RuntimeError(
            "moe_ext: the compiled module moe_ext._planner must be importable, got "
            f"{type(error).__name__}: {error}; install the package (pip install .) with this Python"
        ) from error
    return _planner


@functools.cache
def all_configs() -> tuple[GroupedGemmConfig, ...]:
    """List the compiled kernels, in the order of their indices."""
    return parse_configs(planner().configs_csv())


@functools.cache
def config_indices() -> dict[str, int]:
    """Map the id of each compiled kernel to its index."""
    return {config.id: config.index for config in all_configs()}


def matching_configs(
    dtype: str, accumulate: str, outputs: tuple[str, ...] = ("rows",)
) -> tuple[GroupedGemmConfig, ...]:
    """List the kernels for `dtype` ("bf16", "fp8") and `accumulate`, which bf16 has one kind of.

    Those for a layer alone (`outputs`) are not among the kernels of `grouped_gemm`.

    "block_swapped" is "block" without the kernels of plain order (`_scales.block_kind`).
    """
    if dtype == "bf16":
        accumulate = "fp32"
    swapped = accumulate == "block_swapped"
    return tuple(
        config
        for config in all_configs()
        if config.dtype == dtype
        and config.output in outputs
        and config.accumulate == ("block" if swapped else accumulate)
        and (not swapped or config.swapped)
    )


def _described(accumulate: str) -> str:
    blocks = {
        "block": "scales per block",
        "block_swapped": "scales per block off multiples of 128",
        "shifted": "scales per block that begin inside k",
    }
    return blocks.get(accumulate, f'accumulate="{accumulate}"')


@functools.lru_cache(maxsize=1024)
def config_index(op: str, config_id: str, dtype: str, accumulate: str) -> int:
    """Turn the user's `config` into an index, or say which ids would do."""
    matching = {config.id: config.index for config in matching_configs(dtype, accumulate)}
    if config_id not in matching:
        known = config_id in config_indices()
        other = f"{config_id!r}, which is compiled for other operands or scale layouts"
        what = other if known else repr(config_id)
        raise ValueError(
            f"{op}: `config` must be one of {', '.join(matching)} for {dtype} operands with "
            f"{_described(accumulate)}, got {what}"
        )
    return matching[config_id]
