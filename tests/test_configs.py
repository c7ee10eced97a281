"""The list of kernels: parsed whole, with unique ids, which become indices or clear errors."""

from __future__ import annotations

import sys

import moe_ext
import pytest
from moe_ext import _configs

HEADER = (
    "id,order,dtype,accumulate,output,tile_weights,tile_tokens,tile_k_bytes,stages,mma_warp_groups,"
    "split_k,ctas_per_sm"
)


def test_a_row_becomes_a_value():
    (config,) = _configs.parse_configs(
        f"{HEADER}\nswap_x,SwapAB,FP8,Promoted,Rows,128,64,256,4,2,4,2\n"
    )
    assert config == moe_ext.GroupedGemmConfig(
        index=0,
        id="swap_x",
        order="SwapAB",
        dtype="fp8",
        accumulate="promoted",
        output="rows",
        tile_weights=128,
        tile_tokens=64,
        tile_k_bytes=256,
        stages=4,
        mma_warp_groups=2,
        split_k=4,
        ctas_per_sm=2,
    )


def test_other_columns_are_refused():
    with pytest.raises(RuntimeError, match=r"must have the columns id,order,.*, got id,size"):
        _configs.parse_configs("id,size\nx,1\n")


def test_indices_are_positions_and_ids_unique():
    configs = moe_ext.kernels()
    assert [config.index for config in configs] == list(range(len(configs)))
    assert len({config.id for config in configs}) == len(configs)


@pytest.mark.parametrize(
    ("dtype", "accumulate"), [("bf16", "promoted"), ("fp8", "promoted"), ("fp8", "fast")]
)
def test_every_operand_kind_has_a_kernel(dtype, accumulate):
    matching = _configs.matching_configs(dtype, accumulate)
    assert matching
    for config in matching:
        assert _configs.config_index("grouped_gemm", config.id, dtype, accumulate) == config.index


def test_fields_hold_known_values():
    for config in moe_ext.kernels():
        assert config.order in ("SwapAB", "SwapABRows", "Plain")
        assert (config.dtype, config.accumulate) in (
            ("bf16", "fp32"),
            ("fp8", "promoted"),
            ("fp8", "fast"),
            ("fp8", "block"),
            ("fp8", "shifted"),
        )
        assert config.tile_weights % 64 == 0
        assert config.tile_tokens % 8 == 0
        assert config.ctas_per_sm >= 1
        assert config.split_k >= 1
        assert config.tile_k_bytes % 128 == 0


def test_unknown_id_lists_the_fitting_ones():
    with pytest.raises(ValueError, match=r"`config` must be one of .* for bf16 .*, got 'nothing'"):
        _configs.config_index("grouped_gemm", "nothing", "bf16", "promoted")


def test_missing_planner_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "moe_ext._planner", None)
    monkeypatch.delattr(moe_ext, "_planner", raising=False)
    with pytest.raises(RuntimeError, match=r"moe_ext\._planner must be importable, got .*install"):
        _configs.planner()
