"""Every compiled kernel on every named problem: the gate, and bit for bit on integers."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from moe_ext.reference import grouped_gemm_reference
from support.inputs import (
    CASES,
    MANY_GROUPS,
    TAIL_ROWS,
    build_problem,
    named_problem,
    offs_of,
    poisoned,
)
from support.kernels import KERNELS, accumulate_of, kind_of, run_into_poison
from support.tolerance import (
    assert_close_to_reference,
    assert_same_bits,
    assert_untouched,
    dissimilarity,
)

pytestmark = pytest.mark.gpu

KINDS = [
    ("bf16", "promoted"),
    ("fp8", "promoted"),
    ("fp8", "fast"),
    ("fp8_channel", "promoted"),
    ("fp8_channel", "fast"),
    ("fp8_block", "promoted"),
    ("fp8_shifted", "promoted"),
]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("config_id", KERNELS)
def test_every_kernel(config_id, name):
    config = KERNELS[config_id]
    options = {"config": config_id, "accumulate": accumulate_of(config)}
    integers = named_problem(name, kind_of(config), "integers", "cuda")
    for out_dtype in (torch.bfloat16, torch.float32):
        out = run_into_poison(integers, out_dtype, **options)
        assert_same_bits(out, integers.expected.to(out_dtype), integers.offs)
    normal = named_problem(name, kind_of(config), "random", "cuda")
    for out_dtype in (torch.bfloat16, torch.float32):
        out = run_into_poison(normal, out_dtype, **options)
        if config.accumulate == "fast":
            assert dissimilarity(out, normal.expected) < 1e-2  # reported elsewhere, not gated
        else:
            assert_close_to_reference(out, normal.expected, normal.offs)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "accumulate"), KINDS)
def test_the_dispatchers_choice(dtype, accumulate, name):
    problem = named_problem(name, dtype, "integers", "cuda")
    out = run_into_poison(problem, torch.bfloat16, accumulate=accumulate)
    assert_same_bits(out, problem.expected.bfloat16(), problem.offs)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("config_id", [id for id in KERNELS if kind_of(KERNELS[id]) == "fp8"])
def test_scales_per_row_and_channel(config_id, name):
    config = KERNELS[config_id]
    options = {"config": config_id, "accumulate": accumulate_of(config)}
    integers = named_problem(name, "fp8_channel", "integers", "cuda")
    for out_dtype in (torch.bfloat16, torch.float32):
        out = run_into_poison(integers, out_dtype, **options)
        assert_same_bits(out, integers.expected.to(out_dtype), integers.offs)
    if config.accumulate == "promoted":
        normal = named_problem(name, "fp8_channel", "random", "cuda")
        out = run_into_poison(normal, torch.float32, **options)
        assert_close_to_reference(out, normal.expected, normal.offs)


@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8_block", "fp8_shifted"])
def test_4096_groups(kind):
    problem = build_problem(MANY_GROUPS, kind, "integers", "cuda")
    for config in KERNELS.values():
        if kind_of(config) == kind:
            options = {"config": config.id, "accumulate": accumulate_of(config)}
            out = run_into_poison(problem, torch.float32, **options)
            assert_same_bits(out, problem.expected, problem.offs)


@pytest.mark.parametrize("config_id", KERNELS)
def test_garbage_past_the_last_offset_changes_no_bit(config_id):
    config = KERNELS[config_id]
    options = {"config": config_id, "accumulate": accumulate_of(config)}
    problem = named_problem("every_tile_edge_tails", kind_of(config), "random", "cuda")
    with_nan = run_into_poison(problem, torch.float32, **options)
    exact_rows = problem.a[: problem.num_valid]
    scales = problem.scales
    if kind_of(config) in ("fp8_block", "fp8_shifted"):
        scales["scale_a"] = problem.scale_a[: problem.num_valid]
    alone = moe_ext.grouped_gemm(
        exact_rows,
        problem.b.contiguous(),
        problem.offs,
        **scales,
        out_dtype=torch.float32,
        **options,
    )
    assert_same_bits(with_nan, alone, problem.offs)


@pytest.mark.parametrize("config_id", KERNELS)
def test_runs_give_the_same_bits(config_id):
    config = KERNELS[config_id]
    problem = named_problem("every_tile_edge", kind_of(config), "random", "cuda")
    options = {"config": config_id, "accumulate": accumulate_of(config)}
    first = run_into_poison(problem, torch.float32, **options)
    for _ in range(3):
        assert_same_bits(run_into_poison(problem, torch.float32, **options), first)


@pytest.mark.parametrize(("dtype", "accumulate"), KINDS[:3])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_no_rows(dtype, accumulate, num_groups):
    operand = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[dtype]
    a = torch.empty(0, 64, device="cuda").to(operand)
    b = torch.ones(num_groups, 128, 64, device="cuda").to(operand)
    out = moe_ext.grouped_gemm(a, b, offs_of((0,) * num_groups, "cuda"), accumulate=accumulate)
    assert out.shape == (0, 128)
    if accumulate != "fast":
        config = {"bf16": "swap_bf16_w64_t16", "fp8": "swap_fp8p_w64_t16"}[dtype]
        out = moe_ext.grouped_gemm(a, b, offs_of((0,) * num_groups, "cuda"), config=config)
        assert out.shape == (0, 128)
    torch.cuda.synchronize()


@pytest.mark.parametrize("shape", [(), (1,), (12,)])
@pytest.mark.parametrize("accumulate", ["promoted", "fast"])
def test_shapes_and_strides_of_scales(shape, accumulate):
    problem = named_problem("every_tile_edge", "fp8", "integers", "cuda")
    scale_b = torch.full((*shape, 2), 0.25, device="cuda")[..., 0]
    out = moe_ext.grouped_gemm(
        *problem.args,
        scale_a=None,
        scale_b=scale_b,
        accumulate=accumulate,
        out_dtype=torch.float32,
    )
    expected = grouped_gemm_reference(
        *problem.args, scale_b=scale_b.contiguous(), out_dtype=torch.float32
    )
    valid = problem.num_valid
    assert_same_bits(out[:valid], expected[:valid], problem.offs)


@pytest.mark.parametrize("config_id", [id for id in KERNELS if KERNELS[id].dtype == "fp8"])
def test_promoted_sums_of_one_sign_keep_their_accuracy(config_id):
    # 14 bits of accumulator lose about 1 % here: all products have the same sign.
    k, config = 16384, KERNELS[config_id]
    generator = torch.Generator(device="cuda").manual_seed(3)
    a = torch.rand(40, k, device="cuda", generator=generator).to(torch.float8_e4m3fn)
    b = torch.rand(1, 128, k, device="cuda", generator=generator).to(torch.float8_e4m3fn)
    offs = offs_of((40,), "cuda")
    options = {"config": config_id, "accumulate": accumulate_of(config)}
    if config.accumulate in ("block", "shifted"):
        shifted = config.accumulate == "shifted"
        options["scale_a"] = torch.ones(40, k // 128, device="cuda")
        options["scale_b"] = torch.ones(1, 1, k // 128 + shifted, device="cuda")
        options["scale_b_offset"] = (0, 64 if shifted else 0)
    out = moe_ext.grouped_gemm(a, b, offs, out_dtype=torch.float32, **options)
    expected = grouped_gemm_reference(a, b, offs, out_dtype=torch.float32)
    if config.accumulate == "fast":
        assert dissimilarity(out, expected) > 1e-5  # the gate, which "fast" does not pass here
    else:
        assert_close_to_reference(out, expected, offs)
        assert dissimilarity(out, expected) < 5e-7  # measured on an H200: 1.2e-7


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config_id", KERNELS)
def test_bias(config_id, bias_dtype):
    config = KERNELS[config_id]
    for name in ("every_tile_edge_tails", "k_zero"):
        for values, out_dtype in (("integers", torch.float32), ("random", torch.bfloat16)):
            problem = named_problem(name, kind_of(config), values, "cuda")
            groups, n, _ = problem.b.shape
            bias = torch.randint(-8, 9, (n, groups), device="cuda").to(bias_dtype).T
            if values == "random":
                bias = bias / 8
            out = run_into_poison(
                problem, out_dtype, config=config_id, accumulate=accumulate_of(config), bias=bias
            )
            rows = torch.diff(problem.offs, prepend=problem.offs.new_zeros(1)).long()
            expected = problem.expected + bias.float().repeat_interleave(rows, dim=0)
            if values == "integers":
                assert_same_bits(out, expected, problem.offs)
            elif config.accumulate != "fast":
                assert_close_to_reference(out, expected, problem.offs)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "ends",
    [
        (5, 3, 40, 2),
        (-7, -1, 20, 40),
        (10, 20, 30, 1000),
        (2**31 - 1, -(2**31), 2**31 - 1, 5),
        (1000, 1000, 1000, 1000),
        (-1, -1, -1, -1),
    ],
)
def test_offsets_outside_the_contract_stay_inside_the_tensors(dtype, ends):
    """Values are unspecified; memory around the tensors is not. Run under compute-sanitizer too."""
    operand = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[dtype]
    a = torch.ones(40, 128, device="cuda").to(operand)
    b = torch.ones(4, 192, 128, device="cuda").to(operand)
    offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
    for config in KERNELS.values():
        if config.dtype == dtype:
            surroundings = poisoned((60, 192), torch.bfloat16, "cuda")
            options = {"config": config.id, "accumulate": accumulate_of(config)}
            if config.accumulate in ("block", "shifted"):
                shifted = config.accumulate == "shifted"
                options["scale_a"] = torch.ones(40, 1, device="cuda")
                options["scale_b"] = torch.ones(4, 2, 2 if shifted else 1, device="cuda")
                options["scale_b_offset"] = (0, 9 if shifted else 0)
            moe_ext.grouped_gemm_out(a, b, offs, out=surroundings[10:50], **options)
            assert_untouched(surroundings[:10])
            assert_untouched(surroundings[50:])
            written = surroundings[10:50].float()
            assert bool((written.isnan() | (written == 128)).all())
    torch.cuda.synchronize()


def test_weights_of_more_than_2_to_the_31_elements():
    # 513 groups of 2048 x 2048: the last group begins past 2^31 elements, past 4 GiB of BF16.
    groups, n, k = 513, 2048, 2048
    b = torch.empty(groups, n, k, dtype=torch.bfloat16, device="cuda")
    b.random_(-4, 5)
    a = torch.randint(-4, 5, (groups, k), device="cuda").bfloat16()
    offs = torch.arange(1, groups + 1, dtype=torch.int32, device="cuda")
    out = moe_ext.grouped_gemm(a, b, offs, out_dtype=torch.float32)
    for group in (0, 1, 511, 512):
        expected = a[group].float() @ b[group].float().T
        assert_same_bits(out[group], expected)


def test_results_of_more_than_2_to_the_31_elements():
    rows, n, k = 1 << 18, 8200, 64
    a = torch.randint(-4, 5, (rows, k), device="cuda").bfloat16()
    b = torch.randint(-4, 5, (2, n, k), device="cuda").bfloat16()
    offs = torch.tensor([1000, rows - 7], dtype=torch.int32, device="cuda")
    out = poisoned((rows, n), torch.bfloat16, "cuda")
    moe_ext.grouped_gemm_out(a, b, offs, out=out)
    for begin, end, group in ((0, 1000, 0), (1000, 3000, 1), (rows - 2000, rows - 7, 1)):
        expected = (a[begin:end].float() @ b[group].float().T).bfloat16()
        assert_same_bits(out[begin:end], expected)
    assert_untouched(out[rows - 7 :])


def test_tail_rows_are_in_every_problem():
    problem = named_problem("one_token", "bf16", "random", "cuda")
    assert problem.a.shape[0] == problem.num_valid + TAIL_ROWS
    assert bool(problem.a[problem.num_valid :].isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_k_zero_as_torch_makes_it(dtype):
    a, b = (torch.empty(shape, dtype=dtype, device="cuda") for shape in ((5, 0), (2, 8, 0)))
    out = moe_ext.grouped_gemm(a, b, offs_of((2, 3), "cuda"))
    assert torch.equal(out, torch.zeros_like(out))
