"""Every documented argument error, the same on the CPU and on CUDA, before anything is launched."""

from __future__ import annotations

import re

import moe_ext
import pytest
import torch

FP8 = torch.float8_e4m3fn
ROWS, GROUPS, N, K = 6, 3, 16, 32


def valid_arguments(device, dtype=torch.bfloat16):
    return {
        "a": torch.ones(ROWS, K, device=device).to(dtype),
        "b": torch.ones(GROUPS, N, K, device=device).to(dtype),
        "offs": torch.tensor([1, 3, 6], dtype=torch.int32, device=device),
    }


def changed(name, make):
    """Replace one argument by what `make` gives for it."""

    def change(arguments, device):
        arguments[name] = make(arguments.get(name), device)

    return change


def ones(*shape, dtype=torch.float32):
    return lambda old, device: torch.ones(shape, device=device).to(dtype)


def value(constant):
    return lambda old, device: constant


def misaligned(old, device):
    flat = torch.zeros(old.numel() + 1, dtype=old.dtype, device=device)
    return flat[1:].view(old.shape)


def transposed(old, device):
    return old.transpose(-1, -2).contiguous().transpose(-1, -2)


def narrow_rows(old, device):
    return torch.zeros(*old.shape[:-1], old.shape[-1] + 1, dtype=old.dtype, device=device)[..., :-1]


def with_k(k):
    def change(arguments, device):
        arguments["a"] = torch.ones(ROWS, k, device=device).to(arguments["a"].dtype)
        arguments["b"] = torch.ones(GROUPS, N, k, device=device).to(arguments["b"].dtype)

    return change


def with_groups(groups):
    def change(arguments, device):
        arguments["b"] = torch.ones(groups, 8, K, device=device).bfloat16()
        arguments["offs"] = torch.zeros(groups, dtype=torch.int32, device=device)

    return change


BF16_ERRORS = {
    "a_dtype": (
        changed("a", ones(ROWS, K, dtype=torch.float16)),
        "`a` must be bfloat16 or float8_e4m3fn, got float16",
    ),
    "b_dtype": (
        changed("b", ones(GROUPS, N, K, dtype=FP8)),
        "`b` must be bfloat16 to match `a`, got float8_e4m3fn",
    ),
    "offs_dtype": (changed("offs", lambda old, _: old.long()), "`offs` must be int32, got int64"),
    "out_dtype": (
        changed("out_dtype", value(torch.float16)),
        "`out_dtype` must be bfloat16 or float32, got float16",
    ),
    "a_rank": (
        changed("a", lambda old, _: old[None]),
        "`a` must have shape (num_rows, k), got (1, 6, 32)",
    ),
    "b_rank": (
        changed("b", lambda old, _: old[0]),
        "`b` must have shape (num_groups, n, k), got (16, 32)",
    ),
    "k_mismatch": (
        changed("b", ones(GROUPS, N, 40, dtype=torch.bfloat16)),
        "`b` must have shape (num_groups, n, k) = (*, *, 32) to match `a`, got (3, 16, 40)",
    ),
    "offs_shape": (
        changed("offs", lambda old, _: old[:2]),
        "`offs` must have shape (num_groups,) = (3,) to match `b`, got (2,)",
    ),
    "offs_rank": (
        changed("offs", lambda old, _: old[None]),
        "`offs` must have shape (num_groups,) = (3,) to match `b`, got (1, 3)",
    ),
    "offs_stride": (
        changed("offs", lambda old, _: old.repeat_interleave(2)[::2]),
        "`offs` must be contiguous, got stride 2",
    ),
    "no_groups": (with_groups(0), "`b` must have 1 to 4096 groups, got 0"),
    "too_many_groups": (with_groups(4097), "`b` must have 1 to 4096 groups, got 4097"),
    "k_alignment": (
        with_k(36),
        "multiples of 8 (16 bytes), got strides (36, 1) for shape (6, 36); moe_ext.pad_rows makes "
        "such a copy",
    ),
    "n_multiple_of_8": (
        changed("b", lambda old, _: old[:, :12].contiguous()),
        "`b` must have n a multiple of 8 for bfloat16 output, got 12",
    ),
    "a_not_k_contiguous": (changed("a", transposed), "`a` must have a contiguous last dimension"),
    "b_not_k_contiguous": (changed("b", transposed), "`b` must have a contiguous last dimension"),
    "a_row_stride": (changed("a", narrow_rows), "multiples of 8 (16 bytes), got strides (33, 1)"),
    "b_row_stride": (changed("b", narrow_rows), "got strides (528, 33, 1) for shape (3, 16, 32)"),
    "a_rows_overlap": (
        changed("a", lambda old, _: old[:1].expand(ROWS, K)),
        "`a` must have a contiguous last dimension and its other strides at least 32",
    ),
    "a_pointer": (
        changed("a", misaligned),
        "`a` must begin at a multiple of 16 bytes, got an address 2 bytes past one",
    ),
    "b_pointer": (changed("b", misaligned), "`b` must begin at a multiple of 16 bytes"),
    "scale_a": (changed("scale_a", ones()), "`scale_a` must be None for bfloat16 operands"),
    "scale_b": (changed("scale_b", ones(GROUPS)), "`scale_b` must be None for bfloat16 operands"),
    "accumulate": (
        changed("accumulate", value("fast")),
        '`accumulate` must be "promoted" (the default) for bfloat16 operands',
    ),
    "bias_dtype": (
        changed("bias", ones(GROUPS, N, dtype=torch.float16)),
        "`bias` must be bfloat16 or float32, got float16",
    ),
    "bias_shape": (
        changed("bias", ones(N)),
        "`bias` must have shape (num_groups, n) = (3, 16), got (16,)",
    ),
    "n_segments": (
        changed("n_segments", value(2)),
        "`n_segments` must be 1 where `scale_b` is not per block, got 2",
    ),
    "scale_b_offset": (
        changed("scale_b_offset", value([64, 0])),
        "`scale_b_offset` must be (0, 0) where `scale_b` is not per block, got (64, 0)",
    ),
    "unknown_config": (
        changed("config", value("no_such_kernel")),
        "`config` must be one of ",
    ),
}
FP8_ERRORS = {
    "accumulate": (
        changed("accumulate", value("fp32")),
        '`accumulate` must be "promoted" or "fast", got "fp32"',
    ),
    "k_alignment": (
        with_k(40),
        "multiples of 16 (16 bytes), got strides (40, 1) for shape (6, 40); moe_ext.pad_rows makes "
        "such a copy",
    ),
    "scale_a_dtype": (
        changed("scale_a", ones(dtype=torch.bfloat16)),
        "`scale_a` must be float32, got bfloat16",
    ),
    "scale_a_shape": (
        changed("scale_a", ones(GROUPS)),
        "`scale_a` must have shape (), (1,), (num_rows,) = (6,), (6, 1) or (num_rows, "
        "ceil(k / 128)) = (6, 1), got (3,)",
    ),
    "scale_a_too_many_blocks": (changed("scale_a", ones(ROWS, 2)), "= (6, 1), got (6, 2)"),
    "scale_b_dtype": (
        changed("scale_b", ones(GROUPS, dtype=torch.float64)),
        "`scale_b` must be float32, got float64",
    ),
    "scale_b_shape": (
        changed("scale_b", ones(GROUPS + 1)),
        "`scale_b` must have shape (), (1,), (num_groups,) = (3,), (num_groups, n) = (3, 16), "
        "(3, 16, 1), or for blocks of 128 x 128 (3, 1, 1) or (3, 1, 1, 1) (with n_segments=1 and "
        "scale_b_offset=(0, 0)), got (4,)",
    ),
    "scale_b_too_many_blocks": (changed("scale_b", ones(GROUPS, 1, 2)), "got (3, 1, 2)"),
    "scale_b_channel_and_a_block": (
        lambda arguments, device: arguments.update(
            a=torch.ones(ROWS, 256, device=device).to(FP8),
            b=torch.ones(GROUPS, N, 256, device=device).to(FP8),
            scale_a=torch.ones(ROWS, 2, device=device),
            scale_b=torch.ones(GROUPS, N, device=device),
        ),
        "`scale_b` must be per group or per block where `scale_a` is per block, got one per "
        "channel, (3, 16)",
    ),
    "accumulate_with_blocks": (
        lambda arguments, device: arguments.update(
            scale_b=torch.ones(GROUPS, 1, 1, 1, device=device), accumulate="fast"
        ),
        '`accumulate` must be "promoted" with scales per block',
    ),
    "scale_b_offset_too_large": (
        changed("scale_b_offset", value([128, 0])),
        "`scale_b_offset` must be (n0, k0), each 0 to 127, got (128, 0)",
    ),
    "scale_b_offset_length": (
        changed("scale_b_offset", value([0])),
        "`scale_b_offset` must be (n0, k0), each 0 to 127, got (0,)",
    ),
    "scale_b_offset_along_k": (
        lambda arguments, device: arguments.update(
            scale_b=torch.ones(GROUPS, 1, 1, device=device), scale_b_offset=(0, 100)
        ),
        "(3, 1, 2) or (3, 1, 1, 2) (with n_segments=1 and scale_b_offset=(0, 100)), got (3, 1, 1)",
    ),
    "n_segments": (
        changed("n_segments", value(3)),
        "`n_segments` must be 1, or 2 with an even n, got 3 with n 16",
    ),
    "n_segments_with_one_scale_a_group": (
        lambda arguments, device: arguments.update(
            scale_b=torch.ones(GROUPS, device=device), n_segments=2
        ),
        "`n_segments` must be 1 where `scale_b` is not per block, got 2",
    ),
    "n_segments_with_one_block_a_group": (
        lambda arguments, device: arguments.update(
            scale_b=torch.ones(GROUPS, 1, 1, device=device), n_segments=2
        ),
        "(3, 2, 1) or (3, 2, 1, 1) (with n_segments=2 and scale_b_offset=(0, 0)), got (3, 1, 1)",
    ),
    "unknown_config": (changed("config", value("swap")), "for fp8 operands with"),
}
OUT_ERRORS = {
    "dtype": (lambda out: out.half(), "`out` must be bfloat16 or float32, got float16"),
    "shape": (lambda out: out[:-1], "`out` must have shape (num_rows, n) = (6, 16), got (5, 16)"),
    "columns": (lambda out: out.T.contiguous().T, "`out` must have a contiguous last dimension"),
    "rows": (lambda out: out[:1].expand(ROWS, N), "`out` must have a contiguous last dimension"),
    "pointer": (lambda out: misaligned(out, out.device), "`out` must begin at a multiple of 16"),
}


def expect_error(arguments, message, op="grouped_gemm"):
    with pytest.raises(ValueError, match="^" + op + ": .*" + re.escape(message)):
        getattr(torch.ops.moe_ext, op)(**arguments)


@pytest.mark.parametrize("name", BF16_ERRORS)
def test_bf16_error(name, device):
    change, message = BF16_ERRORS[name]
    arguments = valid_arguments(device)
    change(arguments, device)
    expect_error(arguments, message)


@pytest.mark.parametrize("name", FP8_ERRORS)
def test_fp8_error(name, device):
    change, message = FP8_ERRORS[name]
    arguments = valid_arguments(device, FP8)
    change(arguments, device)
    expect_error(arguments, message)


@pytest.mark.parametrize("name", OUT_ERRORS)
def test_out_error(name, device):
    change, message = OUT_ERRORS[name]
    out = change(torch.zeros(ROWS, N, device=device).bfloat16())
    expect_error({**valid_arguments(device), "out": out}, message, "grouped_gemm_out")


def test_out_dtype_must_match_out(device):
    out = torch.zeros(ROWS, N, device=device)
    arguments = {**valid_arguments(device), "out": out, "out_dtype": torch.bfloat16}
    message = "`out_dtype` must be None or float32 to match `out`, got bfloat16"
    expect_error(arguments, message, "grouped_gemm_out")


def test_config_of_other_operands_names_the_fitting_ones(device):
    fitting = [
        config.id
        for config in moe_ext.kernels()
        if (config.dtype, config.output) == ("bf16", "rows")
    ]
    other = next(config.id for config in moe_ext.kernels() if config.dtype == "fp8")
    arguments = {**valid_arguments(device), "config": other}
    expect_error(arguments, f"one of {', '.join(fitting)} for bf16 operands")
    expect_error(arguments, f"got '{other}', which is compiled for other operands")


def test_float32_output_allows_n_a_multiple_of_4(device):
    arguments = valid_arguments(device)
    arguments["b"] = arguments["b"][:, :12].contiguous()
    out = moe_ext.grouped_gemm(**arguments, out_dtype=torch.float32)
    assert out.tolist() == [[float(K)] * 12] * ROWS
    arguments["b"] = arguments["b"][:, :6].contiguous()
    arguments["out_dtype"] = torch.float32
    expect_error(arguments, "`b` must have n a multiple of 4 for float32 output, got 6")


def test_strides_of_dimensions_of_one_do_not_matter(device):
    a = torch.ones(1, K, device=device).bfloat16().as_strided((1, K), (3, 1))
    b = torch.ones(1, N, K, device=device).bfloat16().as_strided((1, N, K), (5, K, 1))
    offs = torch.ones(1, dtype=torch.int32, device=device)
    assert moe_ext.grouped_gemm(a, b, offs).tolist() == [[float(K)] * N]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["a", "b", "offs", "scale_a", "scale_b", "out"])
def test_tensors_on_mixed_devices(name):
    arguments = valid_arguments("cuda", FP8)
    arguments |= {"scale_a": torch.ones((), device="cuda"), "scale_b": torch.ones(3, device="cuda")}
    op = "grouped_gemm_out" if name == "out" else "grouped_gemm"
    if name == "out":
        arguments["out"] = torch.zeros(ROWS, N, device="cuda").bfloat16()
    arguments[name] = arguments[name].cpu()
    expected = "where `a` is, got" if name == "a" else f"`{name}` must be on cuda:0, where `a` is"
    expect_error(arguments, expected, op)


MASKED_ERRORS = {
    "a_rank": (
        changed("a", lambda old, _: old[0]),
        "`a` must have shape (num_groups, max_rows, k), got (6, 32)",
    ),
    "a_groups": (
        changed("a", lambda old, _: old[:2]),
        "`a` must have 3 groups to match `b`, got shape (2, 6, 32)",
    ),
    "a_gap": (
        changed("a", lambda old, _: old.repeat(1, 2, 1)[:, :ROWS]),
        "`a` must have groups that follow each other without a gap, 6 x 32 elements apart",
    ),
    "counts_dtype": (
        changed("counts", lambda old, _: old.long()),
        "`counts` must be int32, got int64",
    ),
    "counts_shape": (
        changed("counts", lambda old, _: old[:2]),
        "`counts` must have shape (num_groups,) = (3,) to match `b`, got (2,)",
    ),
    "scale_a_shape": (
        changed("scale_a", ones(ROWS)),
        "`scale_a` must have shape (), (1,), (num_groups,) = (3,), (num_groups, max_rows) = "
        "(3, 6), (3, 6, 1) or (num_groups, max_rows, ceil(k / 128)) = (3, 6, 1), got (6,)",
    ),
    "expected_rows": (
        changed("expected_rows", value(-1)),
        "`expected_rows` must not be negative, got -1",
    ),
}


def valid_masked_arguments(device):
    arguments = valid_arguments(device, FP8)
    a = torch.ones(GROUPS, ROWS, K, device=device).to(FP8)
    return {"a": a, "b": arguments["b"], "counts": arguments["offs"]}


@pytest.mark.parametrize("name", MASKED_ERRORS)
def test_masked_error(name, device):
    change, message = MASKED_ERRORS[name]
    arguments = valid_masked_arguments(device)
    change(arguments, device)
    expect_error(arguments, message, "grouped_gemm_masked")


def test_masked_out_error(device):
    arguments = valid_masked_arguments(device)
    arguments["out"] = torch.zeros(GROUPS * ROWS, N, device=device)
    message = "`out` must have shape (num_groups, max_rows, n) = (3, 6, 16), got (18, 16)"
    expect_error(arguments, message, "grouped_gemm_masked_out")


def test_a_masked_tensor_is_not_taken_for_a_contiguous_one(device):
    arguments = valid_masked_arguments(device)
    arguments["offs"] = arguments.pop("counts")
    expect_error(arguments, "`a` must have shape (num_rows, k), got (3, 6, 32)")
