"""Arguments of another kind than an op takes: said in a line, without the value's contents."""

from __future__ import annotations

import inspect
import re
import sys
from typing import ClassVar

import moe_ext
import pytest
import torch
from moe_ext.precision import ExpertBank, fused_moe_mixed
from support.bank import BASE, PLANS, layer_of
from support.fused_moe import Sizes, random_layer

numpy = pytest.importorskip("numpy")
ONES, INTS = torch.ones(3, 8, dtype=torch.bfloat16), torch.ones(3, dtype=torch.int32)
LONG = [float(i) for i in range(1000)]
OPS = (
    "combine_tokens",
    "fused_moe",
    "fused_moe_masked",
    "fused_moe_masked_out",
    "fused_moe_out",
    "grouped_gemm",
    "grouped_gemm_masked",
    "grouped_gemm_masked_out",
    "grouped_gemm_out",
    "quantize_fp8",
    "quantize_fp8_out",
    "sort_tokens",
    "topk_routing",
    "topk_routing_out",
)
OF_RIGHT_KIND = {"Tensor": ONES, "int": 1, "str": "row"}  # what has no default


@pytest.fixture(autouse=True, params=[True, False], ids=["grad", "no_grad"])
def grad_mode(request):
    """Without gradients a call goes past torch, which is what looks at kinds."""
    with torch.set_grad_enabled(request.param):
        yield


def tensor_arguments():
    for op in OPS:
        for name, parameter in inspect.signature(getattr(moe_ext, op)).parameters.items():
            if parameter.annotation.startswith("Tensor"):
                yield op, name


def arguments_of(op):
    """Give every argument without a default a value of its kind."""
    return {
        name: OF_RIGHT_KIND[parameter.annotation.removesuffix(" | None")]
        for name, parameter in inspect.signature(getattr(moe_ext, op)).parameters.items()
        if parameter.default is inspect.Parameter.empty
    }


@pytest.mark.parametrize(("op", "argument"), list(tensor_arguments()))
@pytest.mark.parametrize("value", [LONG, 0.5, numpy.ones((40, 40))], ids=["list", "float", "array"])
def test_what_is_no_tensor(op, argument, value):
    with pytest.raises(ValueError, match=argument) as raised:
        getattr(moe_ext, op)(**arguments_of(op) | {argument: value})
    said = rf"{op}: `{argument}` must be a tensor( or None)?, got {type(value).__name__}"
    assert re.fullmatch(said, str(raised.value))
    assert raised.value.__suppress_context__  # torch's own words hold the value


@pytest.mark.parametrize(
    ("op", "wrong", "message"),
    [
        ("topk_routing", {"top_k": 2.5}, "`top_k` must be a whole number of 64 bits, got 2.5"),
        ("topk_routing", {"top_k": "2"}, "`top_k` must be a whole number of 64 bits, got '2'"),
        ("topk_routing", {"top_k": None}, "`top_k` must be a whole number of 64 bits, got None"),
        (
            "topk_routing",
            {"top_k": 2**64},
            f"`top_k` must be a whole number of 64 bits, got {2**64}",
        ),
        ("topk_routing", {"top_k": LONG}, "`top_k` must be a whole number of 64 bits, got list"),
        ("topk_routing", {"scale": "2"}, "`scale` must be a number, got '2'"),
        ("topk_routing", {"renormalize": "no"}, "`renormalize` must be True or False, got 'no'"),
        ("quantize_fp8", {"granularity": 128}, "`granularity` must be a str, got 128"),
        (
            "fused_moe",
            {"first_expert": 0.0},
            "`first_expert` must be a whole number of 64 bits, got 0.0",
        ),
        (
            "fused_moe",
            {"apply_router_weight_on_input": "no"},
            "`apply_router_weight_on_input` must be True or False, got 'no'",
        ),
        (
            "grouped_gemm",
            {"n_segments": 1.0},
            "`n_segments` must be a whole number of 64 bits, got 1.0",
        ),
        (
            "fused_moe",
            {"first_expert": 2**70},
            f"`first_expert` must be a whole number of 64 bits, got {2**70}",
        ),
        ("fused_moe", {"limit": 10**400}, "`limit` must be a number or None, got int"),
        *(
            (
                "fused_moe",
                {name: numpy.array([1, 2])},
                f"`{name}` must be {kind}, got array([1, 2])",
            )
            for name, kind in (
                ("activation", "a str"),
                ("first_expert", "a whole number of 64 bits"),
                ("routed_scale", "a number"),
            )
        ),
        ("fused_moe", {"alpha": "1"}, "`alpha` must be a number or None, got '1'"),
        ("grouped_gemm", {"config": 3}, "`config` must be a str or None, got 3"),
        (
            "grouped_gemm",
            {"out_dtype": "bf16"},
            "`out_dtype` must be a torch.dtype or None, got 'bf16'",
        ),
        (
            "grouped_gemm",
            {"scale_b_offset": (0.5, 0)},
            "`scale_b_offset` must be a sequence of whole numbers, got (0.5, 0)",
        ),
        (
            "fused_moe_masked",
            {"expected_rows": 2.5},
            "`expected_rows` must be a whole number of 64 bits or None, got 2.5",
        ),
    ],
    ids=str,
)
def test_what_is_no_option(op, wrong, message):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{op}: {message}')}$"):
        getattr(moe_ext, op)(**arguments_of(op) | wrong)


@pytest.mark.parametrize("argument", ["hidden_states", "topk_weights", "topk_ids", "addend", "out"])
@pytest.mark.parametrize("plan", [PLANS["all four"], BASE.with_bf16()], ids=["mixed", "uniform"])
def test_of_a_bank(argument, plan):
    experts, inputs, _ = layer_of()
    bank = ExpertBank.from_experts(plan, bf16=experts)
    given = dict(zip(("hidden_states", "topk_weights", "topk_ids"), inputs, strict=True))
    message = rf"^fused_moe\w*: `{argument}` must be a tensor( or None)?, got list$"
    with pytest.raises(ValueError, match=message):
        fused_moe_mixed(bank=bank, **given | {argument: LONG})


def test_other_errors_pass(monkeypatch):
    def fail(*operands, **options):
        raise RuntimeError("moe_ext: the driver must be 580 or newer, got 535")

    module = sys.modules["moe_ext.sort_tokens"]
    fail._schema = module._OP._schema
    monkeypatch.setattr(module, "_OP", fail)
    with pytest.raises(RuntimeError, match=r"^moe_ext: the driver must be"):
        moe_ext.sort_tokens(INTS[:, None], 4)


@pytest.mark.parametrize("options", [{"routed_scale": 10**20}, {"limit": 2**64}, {"limit": 3}])
def test_whole_numbers_for_numbers(options):
    layer = random_layer("bf16", "swiglu", Sizes(5, 3, 2, 64, 32), "cpu", 1)
    (name, value), *_ = options.items()
    expected = moe_ext.fused_moe(**layer, **{name: float(value)})
    assert torch.equal(moe_ext.fused_moe(**layer, **options), expected)


def test_a_banks_weights_have_a_say():
    class Subclass(torch.Tensor):
        seen: ClassVar[list[str]] = []

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    experts, inputs, _ = layer_of()
    bank = ExpertBank.from_experts(PLANS["all four"], bf16=experts)
    own = bank.w13_bf16.data.as_subclass(Subclass)
    bank.w13_bf16 = torch.nn.Parameter(own, requires_grad=False)
    Subclass.seen.clear()
    fused_moe_mixed(inputs[0], bank, *inputs[1:])
    assert Subclass.seen[0].startswith("moe_ext.fused_moe_mixed")
