"""Where the C++ op of a layer decides: remembered choices, memory of its own, refusals."""

from __future__ import annotations

import itertools
import re

import moe_ext
import pytest
import torch
from moe_ext import _fused_moe_launch
from moe_ext._fused_moe_checks import check_fused_moe
from moe_ext._fused_moe_kernels import choose_kernels
from support.fused_moe import LAYOUTS, OPERANDS, Sizes, random_layer
from support.tolerance import assert_same_bits
from test_fused_moe_errors import ERRORS, OUT_ERRORS, valid_arguments

pytestmark = pytest.mark.gpu
SCALES = ("w13_scale", "w2_scale", "a1_scale", "a2_scale")
TENSORS = (*OPERANDS, *SCALES, "w13_bias", "w2_bias", "expert_map", "addend", "workspace", "out")
BY_PYTHON = ("activation", "alpha", "limit", "gate_up_layout", "accumulate")


@pytest.fixture
def choices(monkeypatch):
    """Calls of the choice of kernels."""
    asked = []
    choose = _fused_moe_launch.choose_kernels

    def noted(*key):
        asked.append(key)
        return choose(*key)

    monkeypatch.setattr(_fused_moe_launch, "choose_kernels", noted)
    return asked


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_choice_is_made_once_for_a_problem(layout, choices):
    # Sizes of no other test, nor of another layout, so that nothing is remembered of them.
    num_tokens = 1009 + LAYOUTS.index(layout)
    sizes = Sizes(num_tokens, num_experts=7, top_k=3, hidden=208, intermediate=144)
    layer = random_layer(layout, "swiglu", sizes, "cuda")
    changes = (
        {},
        {"limit": 2.0},
        {"batch_invariant": True},
        {"w13_bias": torch.zeros(7, 288).cuda()},
    )
    for asked, options in enumerate(changes, 1):
        first = moe_ext.fused_moe(**layer, **options)
        assert len(choices) == asked
        out = torch.empty_like(first)
        size = moe_ext.fused_moe_workspace_size(
            num_tokens=num_tokens, top_k=3, hidden_size=208, intermediate_size=144, num_experts=7
        )
        workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        moe_ext.fused_moe_out(**layer, **options, out=out, workspace=workspace)
        assert len(choices) == asked
        assert_same_bits(out, first)
        assert_same_bits(moe_ext.fused_moe(**layer, **options, routed_scale=1.0), first)


def kernels_run(call):
    """Return the ids of the kernels of a layer's two GEMMs, as they ran."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found = [re.search(r"configs::(\w+)", event.name) for event in profile.events()]
    return [match[1] for match in found if match]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_token_counts_are_chosen_for_without_asking(layout, choices):
    # Sizes of no other test, whose rule is remembered for every number of tokens.
    num_experts = 17 + LAYOUTS.index(layout)
    sm_count = moe_ext._library.device_kernels(0).sm_count
    counts = (9, 1, 2, 17, 64, 150, 700, 2300)
    for num_tokens in counts:
        sizes = Sizes(num_tokens, num_experts, top_k=4, hidden=512, intermediate=384)
        layer = random_layer(layout, "swiglu", sizes, "cuda")
        checked = check_fused_moe("fused_moe", None, **layer)
        expected = choose_kernels(checked, "promoted", False, False, sm_count)
        ran = kernels_run(lambda layer=layer: moe_ext.fused_moe(**layer))
        assert ran == [moe_ext.kernels()[index].id for index in expected]
        assert len(choices) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"choices": [1]}, "of pairs"),
        ({"costs": [1.0]}, "of 7 costs"),
        ({"common": [0.0]}, "of 3"),
        ({"problems": [1.0] * 4}, "of 5 numbers a problem"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_table_of_another_form(changed, message):
    index = kernel(("either",), "fp32", "bf16")
    table = {
        "number": 1000,
        "choices": [index, index],
        "costly": [index],
        "costs": [1.0] * 7,
        "common": [0.0] * 3,
        "problems": [8.0, 4.0, 64.0, 64.0, 3.0],
        "sm_count": 132,
        "radius": 1.5,
        "shrink": 0.3,
    }
    teach = moe_ext._library.device_kernels(0).fused_moe_teach
    teach(**table)
    with pytest.raises(ValueError, match=message):
        teach(**table | changed)


def kernel(outputs, accumulate, dtype):
    """Return the index of some kernel that takes every layout of block scales."""
    return next(
        config.index
        for config in moe_ext.kernels()
        if (config.accumulate, config.dtype) == (accumulate, dtype)
        and config.output in outputs
        and config.swapped
    )


@pytest.mark.parametrize("name", [*ERRORS, *OUT_ERRORS])
def test_cpp_refuses_every_documented_error(name):
    """Also with kernels given, so that it is not for want of a choice."""
    changes = {argument: make("cuda") for argument, make in (ERRORS | OUT_ERRORS)[name][0].items()}
    options = {option: changes.pop(option) for option in BY_PYTHON if option in changes}
    if options.keys() & {"activation", "alpha", "limit"}:
        pytest.skip("Python's to refuse")
    layout = options.get("gate_up_layout", "concatenated")
    accumulate = options.get("accumulate", "promoted")
    flags = _fused_moe_launch.layer_flags("swiglu", layout, False, accumulate, False)
    if flags is None:
        pytest.skip("Python's to refuse")
    arguments = dict.fromkeys(TENSORS) | valid_arguments("cuda") | changes
    first_expert = arguments.pop("first_expert", 0)
    routed_scale = arguments.pop("routed_scale", 1.0)
    before = torch.cuda.memory_allocated()
    fp8 = arguments["w13"].dtype is torch.float8_e4m3fn
    dtype = "fp8" if fp8 else "bf16"
    firsts = ("promoted", "block") if fp8 else ("fp32",)
    seconds = ("promoted", "block", "fast") if fp8 else ("fp32",)
    op = moe_ext._library.device_kernels(0).fused_moe_configured
    for first, second in itertools.product(firsts, seconds):
        kernels = kernel(("gated", "either"), first, dtype), kernel(("rows",), second, dtype)
        tensors = [arguments[tensor] for tensor in TENSORS]
        with pytest.raises(ValueError, match="must"):
            op(*tensors, flags, 0.0, 0.0, routed_scale, first_expert, *kernels, [1.0] * 6, -1, 0)
    assert torch.cuda.memory_allocated() == before
