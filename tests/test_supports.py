"""`supports` says what the op would say: its own message, or that the problem runs."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from moe_ext import _configs, _dispatch, _library, _supports

GEMM = {"dtype": "bf16", "num_rows": 48, "num_groups": 4, "n": 256, "k": 512}
MASKED = {"dtype": "fp8", "max_rows": 16, "num_groups": 4, "n": 256, "k": 512}
SIZES = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 8}
LAYER = {"dtype": "fp8", "num_tokens": 16, "top_k": 2, **SIZES}
BUFFERS = {"dtype": "fp8", "max_rows": 16, **SIZES}
BLOCK = {"w13_scale": "block", "w2_scale": "block"}
ROUTING = {"num_tokens": 16, "num_experts": 8, "top_k": 2}


def on_cpu(op, **problem):
    return moe_ext.supports(op, device="cpu", **problem)


@pytest.mark.parametrize(
    ("op", "problem"),
    [
        ("grouped_gemm", GEMM),
        ("grouped_gemm", GEMM | {"dtype": torch.float8_e4m3fn}),
        ("grouped_gemm", GEMM | {"dtype": "fp8", "scale_a": "block", "scale_b": "block"}),
        ("grouped_gemm", GEMM | {"dtype": "fp8", "scale_a": (48, 4), "scale_b": (4, 2, 4)}),
        ("grouped_gemm", GEMM | {"bias": True, "out_dtype": torch.float32, "offs_ready": True}),
        ("grouped_gemm", GEMM | {"bias": None, "out_dtype": "fp32", "n": 260}),
        (
            "grouped_gemm",
            GEMM
            | {"dtype": "fp8", "scale_b": "block", "scale_b_offset": (32, 64), "n_segments": 2},
        ),
        ("grouped_gemm_masked", MASKED | {"scale_a": "channel", "expected_rows": 3}),
        ("fused_moe", LAYER | BLOCK),
        ("fused_moe", LAYER | {"dtype": "bf16", "addend": True, "w13_bias": True}),
        ("fused_moe", LAYER | {"w13_scale": (8, 2, 1, 2), "w2_scale": "tensor", "a2_scale": True}),
        ("fused_moe", LAYER | {"dtype": "bf16", "activation": "relu2", "batch_invariant": True}),
        ("fused_moe_masked", BUFFERS | BLOCK),
        ("quantize_fp8", {"dtype": "fp16", "shape": (3, 200), "granularity": "1x128"}),
        ("topk_routing", ROUTING | {"scoring": "sigmoid", "correction_bias": True}),
        ("sort_tokens", ROUTING | {"dtype": torch.int64}),
        ("combine_tokens", {"num_tokens": 16, "top_k": 2, "hidden_size": 64, "addend": True}),
    ],
)
def test_what_runs(op, problem):
    support = on_cpu(op, **problem)
    assert support, support.reason
    assert str(support) == "supported"


@pytest.mark.parametrize(
    ("op", "problem", "reason"),
    [
        ("grouped_gemm", GEMM | {"dtype": torch.float16}, "grouped_gemm: `a` must be bfloat16 or"),
        (
            "grouped_gemm",
            GEMM | {"dtype": "mxfp4"},
            "supports: `dtype` must be torch's or one of bf16, fp8, got 'mxfp4'",
        ),
        ("grouped_gemm", GEMM | {"n": 100}, "grouped_gemm: `b` must have n a multiple of 8"),
        ("grouped_gemm", GEMM | {"k": 12}, "grouped_gemm: `a` must have a contiguous last"),
        ("grouped_gemm", GEMM | {"num_groups": 5000}, "grouped_gemm: `b` must have 1 to 4096"),
        ("grouped_gemm", GEMM | {"num_rows": 2**31}, "grouped_gemm: `a` must have at most 21474"),
        ("grouped_gemm", GEMM | {"n": 2**31}, "grouped_gemm: n must be at most 2147482623, got"),
        ("grouped_gemm", GEMM | {"num_rows": -1}, "supports: `num_rows` must not be negative"),
        (
            "grouped_gemm",
            GEMM | {"dtype": "fp8", "scale_a": (-1,)},
            "supports: sizes must not be negative, got (-1,)",
        ),
        ("grouped_gemm", GEMM | {"scale_b": "block"}, "grouped_gemm: `scale_b` must be None"),
        ("grouped_gemm", GEMM | {"scale_b": "row"}, "supports: `scale_b` must be None, a shape"),
        ("grouped_gemm", GEMM | {"n_segments": 0}, "grouped_gemm: `n_segments` must be 1, or 2"),
        ("grouped_gemm", GEMM | {"scale_b_offset": (1,)}, "grouped_gemm: `scale_b_offset` must"),
        ("grouped_gemm", GEMM | {"config": "none"}, "grouped_gemm: `config` must be one of"),
        ("grouped_gemm_masked", MASKED | {"accumulate": "slow"}, "grouped_gemm_masked: `accumul"),
        ("fused_moe", LAYER, "fused_moe: `w13_scale` must be given for float8_e4m3fn weights"),
        ("fused_moe", LAYER | BLOCK | {"top_k": 33}, "fused_moe: `topk_ids` must have 1 to 32"),
        ("fused_moe", LAYER | BLOCK | {"activation": "tanh"}, "fused_moe: `activation` must be"),
        ("fused_moe", LAYER | BLOCK | {"routed_scale": float("nan")}, "fused_moe: `routed_scale` "),
        ("fused_moe", LAYER | BLOCK | {"a1_scale": True}, "fused_moe: `a1_scale` must be None"),
        (
            "fused_moe",
            LAYER | {"dtype": "bf16", "hidden_size": 2**31},
            "fused_moe: `hidden_states` must have hidden size at most 2147418111",
        ),
        (
            "fused_moe",
            LAYER | {"dtype": "bf16", "intermediate_size": 2**30},
            "fused_moe: `w2` must have intermediate size at most 1073709055",
        ),
        ("fused_moe_masked", BUFFERS | BLOCK | {"hidden_size": 100}, "fused_moe_masked: `hidden_"),
        (
            "quantize_fp8",
            {"dtype": "bf16", "shape": (3,), "granularity": "row"},
            "quantize_fp8: `x` must have shape",
        ),
        ("topk_routing", ROUTING | {"top_k": 9}, "topk_routing: `top_k` must be at most the 8"),
        ("sort_tokens", ROUTING | {"num_experts": 0}, "sort_tokens: `num_experts` must be in"),
        (
            "combine_tokens",
            {"num_tokens": 16, "top_k": 2, "hidden_size": 12},
            "combine_tokens: `y` must have shape",
        ),
    ],
)
def test_what_does_not_run(op, problem, reason):
    support = on_cpu(op, **problem)
    assert not support
    assert support.reason.startswith(reason)
    assert str(support) == f"not supported: {support.reason}"


def test_the_reason_is_what_the_op_raises():
    a, b = torch.ones(4, 64).bfloat16(), torch.ones(2, 12, 64).bfloat16()
    with pytest.raises(ValueError, match=r"multiple of 8") as raised:
        moe_ext.grouped_gemm(a, b, torch.tensor([1, 4], dtype=torch.int32))
    problem = {"dtype": "bf16", "num_rows": 4, "num_groups": 2, "n": 12, "k": 64}
    assert on_cpu("grouped_gemm", **problem).reason == str(raised.value)


def test_every_registered_op_can_be_asked_about():
    functions = {
        name
        for name in moe_ext.__all__
        if hasattr(torch.ops.moe_ext, name) and not name.endswith("_out")
    } - {"build_info"}
    assert functions == set(_supports.CHECKS)


def test_a_build_without_a_kernel(monkeypatch):
    others = tuple(config for config in moe_ext.kernels() if config.dtype != "bf16")
    monkeypatch.setattr(_configs, "all_configs", lambda: others)
    for cached in (_dispatch._candidates, _dispatch.choose):
        cached.cache_clear()
    try:
        assert "a kernel for bf16 operands" in on_cpu("grouped_gemm", **GEMM).reason
    finally:
        for cached in (_dispatch._candidates, _dispatch.choose):
            cached.cache_clear()


def test_another_device_is_refused_in_the_library_s_words(monkeypatch):
    def refuse(index):
        raise RuntimeError(f"moe_ext: the GPU must be of compute capability 9.0, got {index}")

    monkeypatch.setattr(_library, "load", lambda: None)
    monkeypatch.setattr(_library, "device_kernels", refuse)
    reason = moe_ext.supports(device=3, **GEMM).reason
    assert reason == "moe_ext: the GPU must be of compute capability 9.0, got 3"
    assert (
        "`device` must be a CUDA device, got meta" in moe_ext.supports(device="meta", **GEMM).reason
    )


def test_what_is_no_device():
    reason = moe_ext.supports(device=-1, **GEMM).reason
    assert reason == "supports: `device` must be a CUDA device or its index, got -1"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only where there is no GPU")
def test_without_a_gpu_nothing_but_the_reference_runs():
    assert moe_ext.supports(**GEMM).reason.startswith("moe_ext: ")


@pytest.mark.gpu
def test_on_a_gpu():
    assert moe_ext.supports(**GEMM)
    assert moe_ext.supports("fused_moe", **LAYER, **BLOCK)


def test_what_is_no_question_raises():
    with pytest.raises(ValueError, match=r"`op` must be one of grouped_gemm, .*, got 'matmul'"):
        moe_ext.supports("matmul")
    message = (
        "supports: a problem of grouped_gemm must have dtype, num_groups, n, k, num_rows, got none "
        "of k, num_rows"
    )
    with pytest.raises(TypeError, match=f"^{message}$"):
        moe_ext.supports(dtype="bf16", num_groups=4, n=8)
    message = "supports: a problem of grouped_gemm must have no parts but dtype, .*, got colour"
    with pytest.raises(TypeError, match=f"^{message}$"):
        moe_ext.supports(**GEMM, colour="blue")


@pytest.mark.parametrize("asked", [moe_ext.supports, moe_ext.explain_fused_moe])
@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"num_tokens": "64"}, "an int, got '64'"),
        ({"num_tokens": None}, "an int, got None"),
        ({"hidden_size": 4.5}, "an int, got 4.5"),
        ({"top_k": True}, "an int, got True"),
        ({"num_experts": [4]}, "an int, got [4]"),
        ({"expert_map": True}, "a tensor or None, got True"),
        ({"first_expert": 1.5}, "an int, got 1.5"),
        ({"first_expert": "0"}, "an int, got '0'"),
        ({"routed_scale": None}, "a number, got None"),
        ({"alpha": "1"}, "a number or None, got '1'"),
        ({"limit": 10**400}, "a number or None, got int"),
        ({"w13_bias": 0.5}, "True, False or None, got 0.5"),
        ({"batch_invariant": "no"}, "True or False, got 'no'"),
        ({"activation": None}, "a str, got None"),
        ({"activation": ["swiglu"]}, "a str, got ['swiglu']"),
        ({"w13_scale": 128}, "a str, a shape or None, got 128"),
        ({"w2_scale": (4, 0.5)}, "a str, a shape or None, got (4, 0.5)"),
        ({"dtype": None}, "a torch.dtype or a str, got None"),
    ],
    ids=str,
)
def test_a_part_of_another_kind_is_named(asked, wrong, expected):
    problem = {
        "num_tokens": 4,
        "top_k": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_experts": 4,
        "dtype": "bf16",
    }
    options = {"op": "fused_moe", "device": "cpu"} if asked is moe_ext.supports else {}
    with pytest.raises(TypeError) as raised:
        asked(**options, **problem | wrong)
    assert str(raised.value) == f"{asked.__name__}: `{next(iter(wrong))}` must be {expected}"


@pytest.mark.parametrize(
    ("op", "problem", "expected"),
    [
        ("quantize_fp8", {"shape": 3}, "`shape` must be a sequence of ints, got 3"),
        ("quantize_fp8", {"shape": (3, 1.5)}, "`shape` must be a sequence of ints, got (3, 1.5)"),
        ("quantize_fp8", {"granularity": 128}, "`granularity` must be a str, got 128"),
        ("grouped_gemm", {"config": 3}, "`config` must be a str or None, got 3"),
        (
            "grouped_gemm",
            {"scale_b_offset": "ab"},
            "`scale_b_offset` must be a sequence of ints, g",
        ),
        ("topk_routing", {"dtype": 16}, "`dtype` must be a torch.dtype or a str, got 16"),
    ],
)
def test_so_it_is_for_other_ops(op, problem, expected):
    with pytest.raises(TypeError) as raised:
        on_cpu(op, **problem)
    assert str(raised.value).startswith(f"supports: {expected}")


@pytest.mark.parametrize("num_tokens", [2**58, 2**63, 2**70])
def test_sizes_of_no_tensor_are_a_reason(num_tokens):
    sizes = {"top_k": 2, "hidden_size": 64, "intermediate_size": 64, "num_experts": 4}
    support = moe_ext.supports(
        "fused_moe", device="cpu", dtype="bf16", num_tokens=num_tokens, **sizes
    )
    assert not support
    message = f"supports: sizes must make tensors of less than 2^59 elements, got ({num_tokens}, 2)"
    assert support.reason == message


def test_an_int_that_torch_cannot_hold_is_a_reason():
    support = on_cpu("sort_tokens", **ROUTING, first_expert=2**70)
    assert support.reason.startswith("sort_tokens: `first_expert` must be ")


def test_an_op_that_is_no_name():
    with pytest.raises(ValueError, match=r"`op` must be one of .*, got \[\]"):
        moe_ext.supports([])
