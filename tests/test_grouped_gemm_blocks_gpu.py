"""Scales per block on the GPU: short blocks, two grids, blocks cut by a shard, mixtures."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from moe_ext.reference import grouped_gemm_reference
from support.inputs import (
    BLOCK_ROWS,
    BLOCK_SHAPES,
    SHIFTED_SHAPES,
    Case,
    build_problem,
    integer_operands,
    named_problem,
    offs_of,
)
from support.kernels import KERNELS, run_into_poison
from support.tolerance import assert_close_to_reference, assert_same_bits

pytestmark = pytest.mark.gpu

BLOCK_KERNELS = {id: config for id, config in KERNELS.items() if config.accumulate == "block"}
SHIFTED_KERNELS = [id for id, config in KERNELS.items() if config.accumulate == "shifted"]


def aligned(n, k, n_segments, n_offset):
    return n_offset == 0 and (n_segments == 1 or n // 2 % 128 == 0)


@pytest.mark.parametrize("shape", BLOCK_SHAPES)
@pytest.mark.parametrize("config_id", BLOCK_KERNELS)
def test_blocks_where_a_shard_leaves_them(config_id, shape):
    case = Case(BLOCK_ROWS, *shape)
    problem = build_problem(case, "fp8_block", "integers", "cuda")
    if BLOCK_KERNELS[config_id].order == "Plain" and not aligned(*shape):
        with pytest.raises(ValueError, match="`config` must be one of swap_"):
            run_into_poison(problem, torch.float32, config=config_id)
        return
    out = run_into_poison(problem, torch.float32, config=config_id)
    assert_same_bits(out, problem.expected, problem.offs)
    problem = build_problem(case, "fp8_block", "random", "cuda")
    out = run_into_poison(problem, torch.bfloat16, config=config_id)
    assert_close_to_reference(out, problem.expected, problem.offs)


@pytest.mark.parametrize("shape", BLOCK_SHAPES)
def test_the_dispatchers_choice_for_blocks(shape):
    problem = build_problem(Case(BLOCK_ROWS, *shape), "fp8_block", "integers", "cuda")
    out = run_into_poison(problem, torch.float32)
    assert_same_bits(out, problem.expected, problem.offs)


@pytest.mark.parametrize("shape", SHIFTED_SHAPES)
@pytest.mark.parametrize("config_id", SHIFTED_KERNELS)
def test_blocks_that_begin_inside_k(config_id, shape):
    case = Case(BLOCK_ROWS, *shape)
    problem = build_problem(case, "fp8_block", "integers", "cuda")
    out = run_into_poison(problem, torch.float32, config=config_id)
    assert_same_bits(out, problem.expected, problem.offs)
    problem = build_problem(case, "fp8_block", "random", "cuda")
    out = run_into_poison(problem, torch.bfloat16, config=config_id)
    assert_close_to_reference(out, problem.expected, problem.offs)


@pytest.mark.parametrize("shape", SHIFTED_SHAPES)
def test_the_dispatchers_choice_for_blocks_that_begin_inside_k(shape):
    problem = build_problem(Case(BLOCK_ROWS, *shape), "fp8_block", "integers", "cuda")
    assert_same_bits(run_into_poison(problem, torch.float32), problem.expected, problem.offs)


@pytest.mark.parametrize("rows", [slice(0, 192), slice(192, 384), slice(384, 576)])
def test_shards_of_a_block_quantised_layer(rows):
    """A gate/up matrix cut along n and a down matrix cut along k at 192 of a 128-grid, as they
    are: the shards' results are those of the whole, or add up to it."""
    generator = torch.Generator().manual_seed(4)
    whole = Case((30, 0, 65), 576, 576)
    a, b, scale_a, scale_b = integer_operands(whole, "fp8_block", "cuda", generator)
    offs = offs_of(whole.rows, "cuda")
    expected = grouped_gemm_reference(a, b, offs, scale_a, scale_b, out_dtype=torch.float32)
    begin, first = rows.start % 128, rows.start // 128
    last = -(-rows.stop // 128)
    out = moe_ext.grouped_gemm(
        a,
        b[:, rows],
        offs,
        scale_a=scale_a,
        scale_b=scale_b[:, first:last],
        scale_b_offset=(begin, 0),
        out_dtype=torch.float32,
    )
    assert_same_bits(out, expected[:, rows])
    # Along k activations are quantised by the shard: their blocks begin with it.
    own = _own_scales(a.shape[0], generator)
    out = moe_ext.grouped_gemm(
        a[:, rows],
        b[:, :, rows],
        offs,
        scale_a=own,
        scale_b=scale_b[..., first:last],
        scale_b_offset=(0, begin),
        out_dtype=torch.float32,
    )
    wide = scale_b.repeat_interleave(128, dim=1)[:, :576].repeat_interleave(128, dim=2)[..., :576]
    of_rows = own.repeat_interleave(128, dim=1)[:, :192]
    for group, (begin_row, end_row) in enumerate(((0, 30), (30, 30), (30, 95))):
        left = a[begin_row:end_row, rows].float() * of_rows[begin_row:end_row]
        right = b[group, :, rows].float() * wide[group, :, rows]
        assert_same_bits(out[begin_row:end_row], left @ right.T)


def _own_scales(num_rows, generator):
    return (2.0 ** torch.randint(-2, 3, (num_rows, 2), generator=generator)).cuda()


@pytest.mark.parametrize("scale_a", ["none", "tensor", "row", "block"])
@pytest.mark.parametrize("scale_b", ["none", "tensor", "group", "block"])
def test_mixtures_with_blocks(scale_a, scale_b):
    problem = named_problem("every_tile_edge", "fp8_block", "integers", "cuda")
    a, b, offs = problem.args
    of_a = {
        "none": None,
        "tensor": torch.tensor(0.5, device="cuda"),
        "row": problem.scale_a[:, 0],
        "block": problem.scale_a,
    }[scale_a]
    of_b = {
        "none": None,
        "tensor": torch.tensor(4.0, device="cuda"),
        "group": problem.scale_b[:, 0, 0],
        "block": problem.scale_b,
    }[scale_b]
    out = moe_ext.grouped_gemm(a, b, offs, scale_a=of_a, scale_b=of_b, out_dtype=torch.float32)
    expected = grouped_gemm_reference(a, b, offs, of_a, of_b, out_dtype=torch.float32)
    valid = problem.num_valid
    assert_same_bits(out[:valid], expected[:valid], offs)
