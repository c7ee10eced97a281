"""The masked layout: a buffer for each group, the rows past its count never looked at."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from moe_ext.reference import grouped_gemm_reference
from support.inputs import (
    DTYPES,
    FP8,
    Case,
    integer_operands,
    poisoned,
    random_operands,
)
from support.kernels import KERNELS, accumulate_of, kind_of
from support.tolerance import assert_close_to_reference, assert_same_bits, assert_untouched

COUNTS = (0, 1, 7, 65, 129, 40, 0, 130, 3)
MAX_ROWS = 130
CASES = {
    "tails": Case(COUNTS, 192, 720),
    "segments": Case(COUNTS, 384, 512, n_segments=2),
    "offset": Case(COUNTS, 256, 352, k_offset=104),
}


def masked(rows, fill, max_rows=MAX_ROWS, counts=COUNTS):
    """Spread rows sorted by group over buffers that hold `fill` elsewhere."""
    result = fill((len(counts), max_rows, *rows.shape[1:]))
    as_bytes = torch.uint8 if rows.dtype is FP8 else rows.dtype
    begin = 0
    for group, count in enumerate(counts):
        result.view(as_bytes)[group, :count] = rows[begin : begin + count].view(as_bytes)
        begin += count
    return result


def problem(case, kind, values, device):
    """Return (a, b, counts) and the options, rows past the counts and their scales NaN."""
    generator = torch.Generator().manual_seed(2)
    make = random_operands if values == "random" else integer_operands
    kind = "fp8_block" if kind == "fp8_shifted" else kind
    a, b, scale_a, scale_b = make(case, kind, device, generator)
    options = {}
    if scale_a is not None:
        if scale_a.numel() > 1:
            scale_a = masked(scale_a, lambda shape: poisoned(shape, torch.float32, device))
        options |= {"scale_a": scale_a, "scale_b": scale_b}
    if case.n_segments != 1:
        options["n_segments"] = case.n_segments
    if case.k_offset:
        options["scale_b_offset"] = (0, case.k_offset)
    a = masked(a, lambda shape: poisoned(shape, DTYPES[kind], device))
    return (a, b, torch.tensor(COUNTS, dtype=torch.int32, device=device)), options


def check(out, args, options, out_dtype, exact):
    reference = {**options, "bias": options.get("bias")}
    expected = grouped_gemm_reference(*args, **reference, out_dtype=out_dtype)
    for group, count in enumerate(COUNTS):
        assert_untouched(out[group, count:])
        if exact:
            assert_same_bits(out[group, :count], expected[group, :count])
        elif count:
            ends = torch.tensor([count], dtype=torch.int32)
            assert_close_to_reference(out[group, :count], expected[group, :count], ends)


def run(args, options, out_dtype, **more):
    a, b, _ = args
    out = poisoned((*a.shape[:2], b.shape[1]), out_dtype, str(a.device))
    moe_ext.grouped_gemm_masked_out(*args, out=out, **options, **more)
    return out


@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8_channel", "fp8_block"])
@pytest.mark.parametrize("name", ["tails", "segments"])
def test_the_dispatchers_choice(name, kind, device):
    case = CASES[name]
    if name == "segments" and kind != "fp8_block":
        case = CASES["tails"]
    args, options = problem(case, kind, "integers", device)
    for expected_rows in (None, 0, 2, 1000):
        out = run(args, options, torch.bfloat16, expected_rows=expected_rows)
        check(out, args, options, torch.bfloat16, exact=True)


def test_blocks_that_begin_inside_k(device):
    args, options = problem(CASES["offset"], "fp8_shifted", "integers", device)
    check(run(args, options, torch.float32), args, options, torch.float32, exact=True)


@pytest.mark.gpu
@pytest.mark.parametrize("config_id", KERNELS)
def test_every_kernel(config_id):
    config = KERNELS[config_id]
    kind = kind_of(config)
    case = CASES["offset" if kind == "fp8_shifted" else "tails"]
    more = {"config": config_id, "accumulate": accumulate_of(config)}
    bias = torch.randint(-4, 5, (len(COUNTS), case.n), device="cuda").bfloat16()
    args, options = problem(case, kind, "integers", "cuda")
    for options_of_run in (options, options | {"bias": bias}):
        out = run(args, options_of_run, torch.float32, **more)
        check(out, args, options_of_run, torch.float32, exact=True)
    if config.accumulate != "fast":
        args, options = problem(case, kind, "random", "cuda")
        out = run(args, options, torch.bfloat16, **more)
        check(out, args, options, torch.bfloat16, exact=False)


def test_values(device):
    a = torch.arange(2 * 3 * 16, device=device).reshape(2, 3, 16).bfloat16()
    b = torch.ones(2, 8, 16, device=device).bfloat16()
    out = moe_ext.grouped_gemm_masked(a, b, torch.tensor([3, 1], device=device).int())
    assert out.shape == (2, 3, 8)
    assert out[0, :, 0].tolist() == [120.0, 376.0, 632.0]
    assert out[1, 0, 7].item() == 888.0


def test_one_row_a_group_and_one_group(device):
    for shape in ((5, 1, 32), (1, 7, 32), (1, 1, 32)):
        a = torch.ones(shape, device=device).to(FP8)
        b = torch.ones(shape[0], 16, 32, device=device).to(FP8)
        counts = torch.full((shape[0],), shape[1], dtype=torch.int32, device=device)
        scale_a = torch.arange(1.0, 1 + shape[0] * shape[1], device=device).reshape(shape[:2])
        out = moe_ext.grouped_gemm_masked(a, b, counts, scale_a=scale_a)
        assert out[..., 3].float().tolist() == (scale_a * 32).tolist()


@pytest.mark.parametrize("counts", [(-3, 2), (2**31 - 1, -(2**31)), (5, 5), (0, 0)])
def test_counts_outside_the_contract_are_clamped(counts, device):
    a = torch.ones(2, 4, 64, device=device).bfloat16()
    b = torch.ones(2, 64, 64, device=device).bfloat16()
    ends = torch.tensor(counts, dtype=torch.int32, device=device)
    out = poisoned((2, 4, 64), torch.bfloat16, device)
    moe_ext.grouped_gemm_masked_out(a, b, ends, out=out)
    for group, count in enumerate(counts):
        rows = min(max(count, 0), 4)
        assert bool((out[group, :rows] == 64).all())
        assert_untouched(out[group, rows:])


def test_scales_of_any_strides(device):
    """Column-major scales within each group, as low-latency communication leaves them."""
    args, options = problem(CASES["tails"], "fp8_block", "integers", device)
    scale = options["scale_a"]
    groups, rows, blocks = scale.shape
    stored = torch.full((groups, blocks, rows + 6), float("nan"), device=device)
    stored[..., :rows] = scale.transpose(1, 2)
    strided = {**options, "scale_a": stored[..., :rows].transpose(1, 2)}
    check(run(args, strided, torch.float32), args, options, torch.float32, exact=True)
    # One scale for all rows of a group, repeated by a stride of 0.
    args, options = problem(CASES["tails"], "fp8", "integers", device)
    of_groups = 2.0 ** (torch.arange(groups, device=device) % 4)
    options["scale_a"] = of_groups[:, None].expand(groups, rows)
    check(run(args, options, torch.float32), args, options, torch.float32, exact=True)


def test_opcheck(device):
    (a, b, counts), _ = problem(CASES["tails"], "bf16", "integers", device)
    full = torch.full_like(counts, MAX_ROWS)  # uninitialised rows would differ between runs
    a = torch.ones(a.shape, device=device).to(a.dtype)
    bias = torch.ones(b.shape[:2], device=device)
    torch.library.opcheck(
        torch.ops.moe_ext.grouped_gemm_masked.default, (a, b, full), {"bias": bias}
    )


def test_compiles_to_one_graph(device):
    args, options = problem(CASES["tails"], "bf16", "integers", device)
    compiled = torch.compile(moe_ext.grouped_gemm_masked, backend="aot_eager", fullgraph=True)
    out = compiled(*args, **options)
    eager = moe_ext.grouped_gemm_masked(*args, **options)
    for group, count in enumerate(COUNTS):
        assert_same_bits(out[group, :count], eager[group, :count])


@pytest.mark.gpu
def test_counts_may_change_between_replays():
    (a, b, counts), _ = problem(CASES["tails"], "bf16", "integers", "cuda")
    a = torch.randint(-4, 5, a.shape, device="cuda").bfloat16()
    out = poisoned((*a.shape[:2], b.shape[1]), torch.bfloat16, "cuda")
    moe_ext.grouped_gemm_masked_out(a, b, counts, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moe_ext.grouped_gemm_masked_out(a, b, counts, out=out)
    for changed in (COUNTS, (130, 0, 64, 1, 0, 0, 9, 2, 130)):
        counts.copy_(torch.tensor(changed, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        expected = grouped_gemm_reference(a, b, counts)
        for group, count in enumerate(changed):
            assert_same_bits(out[group, :count], expected[group, :count])
            assert_untouched(out[group, count:])
