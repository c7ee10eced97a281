"""Every documented argument error of `topk_routing`, the same on the CPU and on CUDA."""

from __future__ import annotations

import re

import moe_ext
import pytest
import torch

TOKENS, EXPERTS, TOP_K = 6, 12, 4


def float32(*shape):
    return lambda device: torch.ones(shape, device=device)


def of_dtype(dtype, *shape):
    return lambda device: torch.ones(shape, device=device).to(dtype)


def value(constant):
    return lambda device: constant


ERRORS = {
    "scoring": (
        {"scoring": value("softplus")},
        '`scoring` must be one of "softmax", "softmax_topk", "sigmoid", "sqrt_softplus", got '
        '"softplus"',
    ),
    "scale_inf": ({"scale": value(float("inf"))}, "`scale` must be finite in float32, got inf"),
    "scale_-inf": ({"scale": value(-float("inf"))}, "`scale` must be finite in float32, got -inf"),
    "scale_nan": ({"scale": value(float("nan"))}, "`scale` must be finite in float32, got nan"),
    "scale_1e39": ({"scale": value(1e39)}, "`scale` must be finite in float32, got 1e+39"),
    "logits_dtype": (
        {"logits": of_dtype(torch.float64, TOKENS, EXPERTS)},
        "`logits` must be bfloat16, float16 or float32, got float64",
    ),
    "logits_rank": (
        {"logits": float32(1, TOKENS, EXPERTS)},
        "`logits` must have shape (num_tokens, num_experts), got (1, 6, 12)",
    ),
    "logits_columns": (
        {"logits": lambda device: torch.ones(EXPERTS, TOKENS, device=device).T},
        "`logits` must have a contiguous last dimension, got strides (1, 6) for shape (6, 12)",
    ),
    "no_experts": (
        {"logits": float32(TOKENS, 0)},
        "`logits` must have 1 to 2048 experts, got 0",
    ),
    "too_many_experts": (
        {"logits": float32(TOKENS, 2049)},
        "`logits` must have 1 to 2048 experts, got 2049",
    ),
    "top_k_0": ({"top_k": value(0)}, "`top_k` must be 1 to 32, got 0"),
    "top_k_negative": ({"top_k": value(-1)}, "`top_k` must be 1 to 32, got -1"),
    "top_k_33": (
        {"logits": float32(TOKENS, 64), "top_k": value(33)},
        "`top_k` must be 1 to 32, got 33",
    ),
    "top_k_more_than_experts": (
        {"top_k": value(13)},
        "`top_k` must be at most the 12 experts of 1 of 1 groups, got 13",
    ),
    "top_k_more_than_experts_of_groups": (
        {"top_k": value(7), "num_groups": value(4), "topk_groups": value(2)},
        "`top_k` must be at most the 6 experts of 2 of 4 groups, got 7",
    ),
    "groups_do_not_divide": (
        {"num_groups": value(5)},
        "`num_groups` must be 1 to 32 and divide the 12 experts of `logits`, got 5",
    ),
    "no_groups": (
        {"num_groups": value(0)},
        "`num_groups` must be 1 to 32 and divide the 12 experts of `logits`, got 0",
    ),
    "too_many_groups": (
        {"logits": float32(TOKENS, 66), "num_groups": value(33)},
        "`num_groups` must be 1 to 32 and divide the 66 experts of `logits`, got 33",
    ),
    "no_groups_kept": (
        {"topk_groups": value(0)},
        "`topk_groups` must be 1 to `num_groups` = 1, got 0",
    ),
    "more_groups_kept_than_there_are": (
        {"num_groups": value(3), "topk_groups": value(4)},
        "`topk_groups` must be 1 to `num_groups` = 3, got 4",
    ),
    "bias_dtype": (
        {"correction_bias": of_dtype(torch.float64, EXPERTS)},
        "`correction_bias` must be float32 or bfloat16, got float64",
    ),
    "bias_float16": (
        {"correction_bias": of_dtype(torch.float16, EXPERTS)},
        "`correction_bias` must be float32 or bfloat16, got float16",
    ),
    "bias_size": (
        {"correction_bias": float32(EXPERTS - 1)},
        "`correction_bias` must have shape (num_experts,) = (12,), got (11,)",
    ),
    "bias_rank": (
        {"correction_bias": float32(1, EXPERTS)},
        "`correction_bias` must have shape (num_experts,) = (12,), got (1, 12)",
    ),
}
OUT_ERRORS = {
    "weights_dtype": (
        {"weights": of_dtype(torch.bfloat16, TOKENS, TOP_K)},
        "`weights` must be float32, got bfloat16",
    ),
    "weights_shape": (
        {"weights": float32(TOKENS, TOP_K + 1)},
        "`weights` must have shape (num_tokens, top_k) = (6, 4), got (6, 5)",
    ),
    "weights_rank": (
        {"weights": float32(TOKENS * TOP_K)},
        "`weights` must have shape (num_tokens, top_k) = (6, 4), got (24,)",
    ),
    "weights_columns": (
        {"weights": lambda device: torch.ones(TOP_K, TOKENS, device=device).T},
        "`weights` must have a contiguous last dimension, got strides (1, 6) for shape (6, 4)",
    ),
    "weights_rows_overlap": (
        {"weights": lambda device: torch.ones(1, TOP_K, device=device).expand(TOKENS, TOP_K)},
        "`weights` must have a stride of at least 4 between its rows, got strides (0, 1) for shape",
    ),
    "ids_dtype": (
        {"ids": of_dtype(torch.int64, TOKENS, TOP_K)},
        "`ids` must be int32, got int64",
    ),
    "ids_shape": (
        {"ids": of_dtype(torch.int32, TOKENS + 1, TOP_K)},
        "`ids` must have shape (num_tokens, top_k) = (6, 4), got (7, 4)",
    ),
    "ids_rows_overlap": (
        {"ids": lambda device: torch.ones(9, device=device).int().as_strided((6, 4), (1, 1))},
        "`ids` must have a stride of at least 4 between its rows, got strides (1, 1) for shape",
    ),
}
TENSORS = ("correction_bias", "weights", "ids")


def valid_arguments(device):
    return {"logits": torch.ones(TOKENS, EXPERTS, device=device), "top_k": TOP_K}


def valid_outputs(device):
    return {
        "weights": torch.ones(TOKENS, TOP_K, device=device),
        "ids": torch.ones(TOKENS, TOP_K, dtype=torch.int32, device=device),
    }


def expect_error(arguments, message, op="topk_routing"):
    with pytest.raises(ValueError, match="^" + op + ": .*" + re.escape(message)):
        getattr(torch.ops.moe_ext, op)(**arguments)


@pytest.mark.parametrize("name", ERRORS)
def test_error(name, device):
    changes, message = ERRORS[name]
    changes = {argument: make(device) for argument, make in changes.items()}
    expect_error(valid_arguments(device) | changes, message)


@pytest.mark.parametrize("name", OUT_ERRORS)
def test_out_error(name, device):
    changes, message = OUT_ERRORS[name]
    changes = {argument: make(device) for argument, make in changes.items()}
    arguments = valid_arguments(device) | valid_outputs(device) | changes
    expect_error(arguments, message, "topk_routing_out")


@pytest.mark.parametrize("name", ERRORS)
def test_fakes_are_checked_as_real_tensors_are(name):
    changes, message = ERRORS[name]
    changes = {argument: make("meta") for argument, make in changes.items()}
    expect_error(valid_arguments("meta") | changes, message)


def test_more_tokens_than_the_device_counts():
    logits = torch.empty(1, 4, device="meta").expand(2**31, 4)
    message = "`logits` must have at most 2147483647 tokens, got 2147483648"
    expect_error({"logits": logits, "top_k": 2}, message)


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_on_another_device(name):
    arguments = valid_arguments("cpu") | valid_outputs("cpu")
    arguments |= {"correction_bias": torch.ones(EXPERTS)}
    arguments[name] = arguments[name].to("meta")
    message = f"`{name}` must be on cpu, where `logits` is, got meta"
    expect_error(arguments, message, "topk_routing_out")


@pytest.mark.gpu
@pytest.mark.parametrize("name", TENSORS)
def test_a_cpu_tensor_beside_cuda_ones(name):
    arguments = valid_arguments("cuda") | valid_outputs("cuda")
    arguments |= {"correction_bias": torch.ones(EXPERTS, device="cuda")}
    arguments[name] = arguments[name].cpu()
    message = f"`{name}` must be on cuda:0, where `logits` is, got cpu"
    expect_error(arguments, message, "topk_routing_out")


def test_a_refused_call_leaves_its_outputs():
    outputs = valid_outputs("cpu")
    versions = [tensor._version for tensor in outputs.values()]
    with pytest.raises(ValueError, match="`weights` must have shape"):
        moe_ext.topk_routing_out(torch.ones(2, EXPERTS), TOP_K, **outputs)
    assert [tensor._version for tensor in outputs.values()] == versions
    assert all(bool((tensor == 1).all()) for tensor in outputs.values())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring": 4}, "`scoring` must be in [0, 3], got 4"),
        ({"scoring": -1}, "`scoring` must be in [0, 3], got -1"),
        ({"num_groups": 33}, "`num_groups` must be in [1, 32], got 33"),
        ({"num_groups": 5}, "`num_groups` must divide 12 experts, got 5"),
        ({"topk_groups": 2}, "`topk_groups` must be in [1, 1], got 2"),
        ({"weights": (TOKENS, 0)}, "`top_k` must be in [1, 12], got 0"),
        ({"weights": (TOKENS, 13)}, "`top_k` must be in [1, 12], got 13"),
        ({"ids": (TOKENS, 5)}, "`ids` must have size 4 in dimension 1, got 5"),
    ],
)
def test_the_inner_op_checks_for_itself(change, message):
    moe_ext.topk_routing(**valid_arguments("cuda"))  # loads the library
    arguments = {
        "logits": torch.ones(TOKENS, EXPERTS, device="cuda"),
        "correction_bias": None,
        **valid_outputs("cuda"),
        "scoring": 0,
        "renormalize": True,
        "num_groups": 1,
        "topk_groups": 1,
        "scale": 1.0,
    }
    for name, new in change.items():
        old = arguments[name]
        arguments[name] = old.new_ones(new) if isinstance(new, tuple) else new
    with pytest.raises(ValueError, match=re.escape(message)):
        torch.ops.moe_ext.topk_routing_configured(**arguments)
