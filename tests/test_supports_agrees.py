"""`supports` and the ops agree on what runs on the CPU, whatever an option or a size is set to."""

from __future__ import annotations

import math

import moe_ext
import pytest
import torch

BF16, FP8, FP32, INT32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int32


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


def gemm(num_rows, num_groups, n, k, dtype, **options):
    a, b = zeros(num_rows, k, dtype=dtype), zeros(num_groups, n, k, dtype=dtype)
    moe_ext.grouped_gemm(a, b, zeros(num_groups, dtype=INT32), **options)


def masked_gemm(max_rows, num_groups, n, k, dtype, **options):
    a, b = zeros(num_groups, max_rows, k, dtype=dtype), zeros(num_groups, n, k, dtype=dtype)
    moe_ext.grouped_gemm_masked(a, b, zeros(num_groups, dtype=INT32), **options)


def experts(hidden_size, intermediate_size, num_experts, dtype, **options):
    """The weights, then all options with tensors for the scales that words stand for."""
    w13 = zeros(num_experts, 2 * intermediate_size, hidden_size, dtype=dtype)
    w2 = zeros(num_experts, hidden_size, intermediate_size, dtype=dtype)
    for name in ("w13_scale", "w2_scale"):
        if options.get(name) == "tensor":
            options[name] = zeros(num_experts, dtype=FP32)
    return {"w13": w13, "w2": w2, **options}


def layer(num_tokens, top_k, hidden_size, **others):
    routing = {
        "topk_weights": zeros(num_tokens, top_k, dtype=FP32),
        "topk_ids": zeros(num_tokens, top_k, dtype=INT32),
    }
    moe_ext.fused_moe(zeros(num_tokens, hidden_size), **routing, **experts(hidden_size, **others))


def masked_layer(max_rows, hidden_size, num_experts, **others):
    hidden, counts = zeros(num_experts, max_rows, hidden_size), zeros(num_experts, dtype=INT32)
    others = experts(hidden_size, num_experts=num_experts, **others)
    moe_ext.fused_moe_masked(hidden, counts=counts, **others)


def quantise(dtype, shape, **options):
    moe_ext.quantize_fp8(zeros(*shape, dtype=dtype), **options)


def route(num_tokens, num_experts, **options):
    moe_ext.topk_routing(zeros(num_tokens, num_experts), **options)


def sort(num_tokens, top_k, **options):
    moe_ext.sort_tokens(zeros(num_tokens, top_k, dtype=INT32), **options)


def combine(num_tokens, top_k, hidden_size, **options):
    y, rows = zeros(num_tokens * top_k, hidden_size), zeros(num_tokens * top_k, dtype=INT32)
    moe_ext.combine_tokens(y, rows, zeros(num_tokens, top_k), top_k=top_k, **options)


GEMM = {"num_groups": 2, "n": 16, "k": 32, "dtype": BF16}
LAYER = {"hidden_size": 16, "intermediate_size": 16, "num_experts": 2, "dtype": BF16}
SCALED = {"dtype": FP8, "w13_scale": "tensor", "w2_scale": "tensor"}
TOKENS = {"num_tokens": 3, "top_k": 2}
MATRIX = {"dtype": BF16, "shape": (3, 16)}
# op, what calls it on the tensors of a problem, the problem
PROBLEMS = {
    "gemm": ("grouped_gemm", gemm, GEMM | {"num_rows": 3}),
    "gemm_fp8": ("grouped_gemm", gemm, GEMM | {"num_rows": 3, "dtype": FP8}),
    "masked_gemm": ("grouped_gemm_masked", masked_gemm, GEMM | {"max_rows": 3}),
    "layer": ("fused_moe", layer, TOKENS | LAYER),
    "layer_oai": ("fused_moe", layer, TOKENS | LAYER | {"activation": "swiglu_oai"}),
    "layer_fp8": ("fused_moe", layer, TOKENS | LAYER | SCALED),
    "masked_layer": ("fused_moe_masked", masked_layer, LAYER | {"max_rows": 3}),
    "quantise": ("quantize_fp8", quantise, MATRIX | {"granularity": "tensor"}),
    "quantise_rows": ("quantize_fp8", quantise, MATRIX | {"granularity": "row"}),
    "route": ("topk_routing", route, TOKENS | {"num_experts": 8}),
    "sort": ("sort_tokens", sort, TOKENS | {"num_experts": 8}),
    "combine": ("combine_tokens", combine, TOKENS | {"hidden_size": 16}),
}
DTYPES = (torch.float16, FP32, torch.int64)
VALUES = (
    *(None, True, False, 0, 1, 2, 3, -1, 2**31, 2**62, 2**64, 10**400),
    *(0.0, 1.0, 2.0, 0.5, -0.5, 2.5, 1e39, 1e300, math.inf, -math.inf, math.nan),
    *("", "x", "fast", "promoted", "interleaved", "geglu", "sigmoid", "row", "128x128"),
    *((0, 0), (1, 2), (1,), [], [1, 2], (0.5, 0), ("x", 0), torch.tensor(1), object()),
)
NO_TENSORS = (0.5, 3, "x", FP32, object())
SIZES = (None, -1, 0, 1, 3, 8, 12, 33, 4097, 2.0, 2.5, math.nan, "x", (1,), object())


def runs(call, problem):
    try:
        call(**problem)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    return True


def says(op, problem):
    try:
        return bool(moe_ext.supports(op, device="cpu", **problem))
    except TypeError:
        return False


def disagreements(name, part, values):
    """What the op does and what `supports` says, where these differ."""
    op, call, problem = PROBLEMS[name]
    found = []
    for value in values:
        changed = problem | {part: value}
        answers = runs(call, changed), says(op, changed)
        if answers[0] != answers[1]:
            found.append(f"{part}={value!r}: runs {answers[0]}, supports {answers[1]}")
    return found


def arguments(op):
    return {one.name: one.type for one in getattr(torch.ops.moe_ext, op).default._schema.arguments}


def options(name):
    """Of a problem's op, in pairs of its name and whether it is a tensor, but for those in it."""
    op, _, problem = PROBLEMS[name]
    own = {one: str(kind) == "Optional[Tensor]" for one, kind in arguments(op).items()}
    sizes = {one for one, value in problem.items() if isinstance(value, int)}
    return {
        one: tensor
        for one, tensor in own.items()
        if one not in sizes and (tensor or "Tensor" not in str(arguments(op)[one]))
    }


OPTIONS = [(name, *option) for name in PROBLEMS for option in options(name).items()]
OTHERS = {option for _, option, _ in OPTIONS} | {"out", "workspace", "masked", "has_memory"}
SIZES_OF = [
    (name, part)
    for name, (_, _, problem) in PROBLEMS.items()
    for part, value in problem.items()
    if isinstance(value, int)
]


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_problems_run(name):
    op, call, problem = PROBLEMS[name]
    call(**problem)
    assert moe_ext.supports(op, device="cpu", **problem)


@pytest.mark.parametrize(("name", "option", "is_tensor"), OPTIONS)
def test_options(name, option, is_tensor):
    # Elsewhere torch takes a dtype for the number that it has inside.
    values = (*VALUES, *DTYPES) if option == "out_dtype" else VALUES
    assert disagreements(name, option, NO_TENSORS if is_tensor else values) == []


@pytest.mark.parametrize("name", PROBLEMS)
def test_options_of_other_ops(name):
    strange = OTHERS - set(arguments(PROBLEMS[name][0])) - set(PROBLEMS[name][2])
    assert [found for option in strange for found in disagreements(name, option, (1, None))] == []


@pytest.mark.parametrize(("name", "size"), SIZES_OF)
def test_sizes(name, size):
    assert disagreements(name, size, SIZES) == []


@pytest.mark.parametrize("name", [name for name, row in PROBLEMS.items() if "dtype" in row[2]])
def test_dtypes(name):
    assert disagreements(name, "dtype", (1, "x", object(), BF16, FP8, *DTYPES)) == []
