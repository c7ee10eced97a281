"""Every documented argument error of `sort_tokens` and `combine_tokens`, on the CPU and on CUDA."""

from __future__ import annotations

import re

import pytest
import torch

NUM_TOKENS, TOP_K, HIDDEN, ROWS = 3, 2, 16, 6
BF16 = torch.bfloat16


def tensor(*shape, dtype):
    return lambda device: torch.ones(shape, dtype=dtype, device=device)


def value(constant):
    return lambda device: constant


def ids(*shape, dtype=torch.int64):
    return tensor(*shape, dtype=dtype)


def int32(*shape):
    return tensor(*shape, dtype=torch.int32)


def misaligned(device):
    return torch.ones(ROWS * HIDDEN + 1, dtype=BF16, device=device)[1:].view(ROWS, HIDDEN)


SORT_ERRORS = {
    "ids_dtype": (
        {"topk_ids": ids(NUM_TOKENS, TOP_K, dtype=torch.int16)},
        "`topk_ids` must be int32 or int64, got int16",
    ),
    "ids_unsigned": (
        {"topk_ids": ids(NUM_TOKENS, TOP_K, dtype=torch.uint8)},
        "`topk_ids` must be int32 or int64, got uint8",
    ),
    "ids_float": (
        {"topk_ids": ids(NUM_TOKENS, TOP_K, dtype=torch.float32)},
        "`topk_ids` must be int32 or int64, got float32",
    ),
    "ids_rank": (
        {"topk_ids": ids(NUM_TOKENS)},
        "`topk_ids` must have shape (num_tokens, top_k) with top_k in [1, 32], got (3,)",
    ),
    "no_choices": (
        {"topk_ids": ids(NUM_TOKENS, 0)},
        "`topk_ids` must have shape (num_tokens, top_k) with top_k in [1, 32], got (3, 0)",
    ),
    "top_k": (
        {"topk_ids": ids(NUM_TOKENS, 33)},
        "`topk_ids` must have shape (num_tokens, top_k) with top_k in [1, 32], got (3, 33)",
    ),
    "ids_columns": (
        {"topk_ids": lambda device: torch.ones(TOP_K, NUM_TOKENS, device=device).long().T},
        "`topk_ids` must have a contiguous last dimension, got strides (1, 3) for shape (3, 2)",
    ),
    "no_experts": ({"num_experts": value(0)}, "`num_experts` must be in [1, 4096], got 0"),
    "negative_experts": ({"num_experts": value(-1)}, "`num_experts` must be in [1, 4096], got -1"),
    "experts": ({"num_experts": value(4097)}, "`num_experts` must be in [1, 4096], got 4097"),
    "first_expert": (
        {"first_expert": value(-1)},
        "`first_expert` must be in [0, 2147483647], got -1",
    ),
    "large_first_expert": (
        {"first_expert": value(2**31)},
        "`first_expert` must be in [0, 2147483647], got 2147483648",
    ),
    "first_expert_with_map": (
        {"first_expert": value(2), "expert_map": int32(8)},
        "`first_expert` must be 0 where `expert_map` says which experts are here, got 2",
    ),
    "map_dtype": ({"expert_map": ids(8)}, "`expert_map` must be int32, got int64"),
    "map_rank": (
        {"expert_map": int32(2, 4)},
        "`expert_map` must have shape (num_global,) and be contiguous, got shape (2, 4) and "
        "strides (4, 1)",
    ),
    "map_strides": (
        {"expert_map": lambda device: int32(8)(device)[::2]},
        "`expert_map` must have shape (num_global,) and be contiguous, got shape (4,) and "
        "strides (2,)",
    ),
}
COMBINE_ERRORS = {
    "y_dtype": (
        {"y": tensor(ROWS, HIDDEN, dtype=torch.float16)},
        "`y` must be bfloat16, got float16",
    ),
    "y_rank": (
        {"y": tensor(1, ROWS, HIDDEN, dtype=BF16)},
        "`y` must have shape (num_rows, hidden_size) with hidden_size a multiple of 8 below 2**31, "
        "got (1, 6, 16)",
    ),
    "hidden_size": (
        {"y": tensor(ROWS, 12, dtype=BF16)},
        "hidden_size a multiple of 8 below 2**31, got (6, 12)",
    ),
    "y_columns": (
        {"y": lambda device: torch.ones(HIDDEN, ROWS, device=device).to(BF16).T},
        "`y` must have a contiguous last dimension, got strides (1, 6) for shape (6, 16)",
    ),
    "y_rows": (
        {"y": lambda device: torch.ones(ROWS, 20, device=device).to(BF16)[:, :16]},
        "`y` must have a multiple of 8 (16 bytes) between its rows, got strides (20, 1)",
    ),
    "top_k": ({"top_k": value(33)}, "`top_k` must be in [1, 32], got 33"),
    "no_choices": ({"top_k": value(0)}, "`top_k` must be in [1, 32], got 0"),
    "slot_row_dtype": (
        {"slot_row": ids(NUM_TOKENS * TOP_K)},
        "`slot_row` must be int32, got int64",
    ),
    "slot_row_rank": (
        {"slot_row": int32(NUM_TOKENS, TOP_K)},
        "`slot_row` must have shape (num_tokens * top_k,) with top_k = 2 and be contiguous, got "
        "shape (3, 2) and strides (2, 1)",
    ),
    "slot_row_size": (
        {"slot_row": int32(7)},
        "`slot_row` must have shape (num_tokens * top_k,) with top_k = 2 and be contiguous, got "
        "shape (7,) and strides (1,)",
    ),
    "slot_row_strides": (
        {"slot_row": lambda device: int32(12)(device)[::2]},
        "and be contiguous, got shape (6,) and strides (2,)",
    ),
    "weights_dtype": (
        {"topk_weights": tensor(NUM_TOKENS, TOP_K, dtype=torch.float16)},
        "`topk_weights` must be bfloat16 or float32, got float16",
    ),
    "weights_shape": (
        {"topk_weights": tensor(NUM_TOKENS + 1, TOP_K, dtype=torch.float32)},
        "`topk_weights` must have shape (3, 2) to match `y`, `slot_row` and `top_k`, got (4, 2)",
    ),
    "addend_dtype": (
        {"addend": tensor(NUM_TOKENS, HIDDEN, dtype=torch.float64)},
        "`addend` must be bfloat16 or float32, got float64",
    ),
    "addend_shape": (
        {"addend": tensor(NUM_TOKENS, 8, dtype=torch.float32)},
        "`addend` must have shape (3, 16) to match `y`, `slot_row` and `top_k`, got (3, 8)",
    ),
    "addend_rows": (
        {"addend": lambda device: torch.ones(NUM_TOKENS, 18, device=device)[:, :16]},
        "`addend` must have a multiple of 4 (16 bytes) between its rows, got strides (18, 1)",
    ),
    "routed_scale_nan": (
        {"routed_scale": value(float("nan"))},
        "`routed_scale` must be finite in float32, got nan",
    ),
    "routed_scale_infinite": (
        {"routed_scale": value(-float("inf"))},
        "`routed_scale` must be finite in float32, got -inf",
    ),
    "out_dtype": (
        {"out_dtype": value(torch.float16)},
        "`out_dtype` must be bfloat16 or float32, got float16",
    ),
}
ERRORS = [("sort_tokens", name) for name in SORT_ERRORS]
ERRORS += [("combine_tokens", name) for name in COMBINE_ERRORS]
TENSORS = {
    "sort_tokens": {"expert_map": int32(8)},
    "combine_tokens": {
        "slot_row": int32(NUM_TOKENS * TOP_K),
        "topk_weights": tensor(NUM_TOKENS, TOP_K, dtype=torch.float32),
        "addend": tensor(NUM_TOKENS, HIDDEN, dtype=torch.float32),
    },
}
PLACES = [(op, name) for op, tensors in TENSORS.items() for name in tensors]

errors = pytest.mark.parametrize(("op", "name"), ERRORS)


def valid_arguments(op, device):
    if op == "sort_tokens":
        return {"topk_ids": ids(NUM_TOKENS, TOP_K)(device), "num_experts": 4}
    return {
        "y": torch.ones(ROWS, HIDDEN, dtype=BF16, device=device),
        "slot_row": int32(NUM_TOKENS * TOP_K)(device),
        "topk_weights": None,
        "top_k": TOP_K,
    }


def expect_error(op, arguments, message):
    with pytest.raises(ValueError, match="^" + op + ": .*" + re.escape(message)):
        getattr(torch.ops.moe_ext, op)(**arguments)


def changed(op, name, device):
    changes, message = (SORT_ERRORS if op == "sort_tokens" else COMBINE_ERRORS)[name]
    changes = {argument: make(device) for argument, make in changes.items()}
    return valid_arguments(op, device) | changes, message


@errors
def test_error(op, name, device):
    expect_error(op, *changed(op, name, device))


@errors
def test_fakes_are_checked_as_real_tensors_are(op, name):
    expect_error(op, *changed(op, name, "meta"))


@pytest.mark.parametrize("op", TENSORS)
def test_the_arguments_that_errors_change_are_valid(op, device):
    getattr(torch.ops.moe_ext, op)(**valid_arguments(op, device))


@pytest.mark.parametrize("argument", ["y", "addend"])
def test_misaligned(argument, device):
    arguments = valid_arguments("combine_tokens", device)
    arguments["slot_row"] = int32(ROWS * TOP_K)(device)
    arguments[argument] = misaligned(device)
    message = f"`{argument}` must begin at a multiple of 16 bytes, got an address 2 bytes past one"
    expect_error("combine_tokens", arguments, message)


def test_more_slots_than_the_device_counts():
    many = torch.empty(1, 32, dtype=torch.int32, device="meta").expand(2**26, 32)
    expect_error(
        "sort_tokens",
        {"topk_ids": many, "num_experts": 4},
        "`topk_ids` must have at most 2147418111 elements, got 2147483648 for shape (67108864, 32)",
    )


@pytest.mark.parametrize(("op", "name"), PLACES)
def test_a_tensor_on_another_device(op, name):
    arguments = valid_arguments(op, "cpu") | {name: TENSORS[op][name]("meta")}
    first = "topk_ids" if op == "sort_tokens" else "y"
    expect_error(op, arguments, f"`{name}` must be on cpu, where `{first}` is, got meta")


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "name"), PLACES)
def test_a_cpu_tensor_beside_cuda_ones(op, name):
    arguments = valid_arguments(op, "cuda") | {name: TENSORS[op][name]("cpu")}
    first = "topk_ids" if op == "sort_tokens" else "y"
    expect_error(op, arguments, f"`{name}` must be on cuda:0, where `{first}` is, got cpu")
