"""The ops behind `fused_moe_mixed` as PyTorch sees them: opcheck, fakes, gradients, compile."""

from __future__ import annotations

import pytest
import torch
from moe_ext.precision import fused_moe_mixed
from moe_ext.precision._mixed_layer import DEFAULTS, OPERANDS, layer_of
from support.bank import PAIRS, integer_bank, plan_of_pairs
from support.fused_moe import Sizes
from support.tolerance import assert_same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

OP = torch.ops.moe_ext.fused_moe_mixed.default
WORKSPACE_OP = torch.ops.moe_ext.fused_moe_mixed.workspace
OUT_OP = torch.ops.moe_ext.fused_moe_mixed_out.default
SIZES = Sizes(num_tokens=4, num_experts=4, top_k=2, hidden=16, intermediate=16)
# The schema check compares arguments before and after, which PyTorch cannot do in FP8.
CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def made(device):
    bank, inputs = integer_bank("channel", plan_of_pairs(4, PAIRS), SIZES, device)
    return bank, (*inputs, *layer_of(bank)[: len(OPERANDS)])


def test_the_schema_has_the_options_and_their_defaults():
    for op in (OP, WORKSPACE_OP, OUT_OP):
        arguments = op._schema.arguments
        names = [argument.name for argument in arguments if not argument.kwarg_only]
        assert names == ["hidden_states", "topk_weights", "topk_ids", *OPERANDS]
        options = {argument.name: argument.default_value for argument in arguments}
        assert {name: options[name] for name in DEFAULTS} == DEFAULTS


def test_opcheck(device):
    _, arguments = made(device)
    torch.library.opcheck(OP, arguments, test_utils=CHECKS)


def test_opcheck_with_options(device):
    _, arguments = made(device)
    options = {
        "routed_scale": 2.0,
        "batch_invariant": True,
        "expert_map": torch.arange(4, dtype=torch.int32, device=device),
        "addend": torch.ones(4, 16, device=device),
    }
    torch.library.opcheck(OP, arguments, options, test_utils=CHECKS)


def test_opcheck_with_a_workspace(device):
    bank, arguments = made(device)
    memory = torch.zeros(bank.workspace_size(4, 2), dtype=torch.uint8, device=device)
    checks = CHECKS if device == "cpu" else CHECKS[:2]  # what it holds afterwards is unspecified
    torch.library.opcheck(WORKSPACE_OP, arguments, {"workspace": memory}, test_utils=checks)


def test_opcheck_out(device):
    _, arguments = made(device)
    out = torch.zeros(4, 16, device=device).bfloat16()
    torch.library.opcheck(OUT_OP, arguments, {"out": out}, test_utils=CHECKS)


@pytest.mark.parametrize("fake_device", ["cpu", "cuda"])
def test_fake_gives_shape_dtype_and_device(fake_device):
    _, arguments = made("cpu")
    with FakeTensorMode():
        fakes = [
            torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=fake_device)
            if isinstance(own, torch.Tensor)
            else own
            for own in arguments
        ]
        out = OP(*fakes)
    assert (out.shape, out.dtype) == ((4, 16), torch.bfloat16)
    assert out.device.type == fake_device


def test_backward_raises_inference_only(device):
    bank, (hidden, *rest) = made(device)
    out = fused_moe_mixed(hidden.requires_grad_(), bank, *rest[:2])
    with pytest.raises(RuntimeError, match=r"^fused_moe_mixed: backward .* inference only, got"):
        out.sum().backward()


def test_compiled_into_given_memory(device):
    torch._dynamo.reset()
    bank, arguments = made(device)
    inputs = arguments[:3]
    expected = bank(*inputs)
    memory = torch.zeros(bank.workspace_size(4, 2), dtype=torch.uint8, device=device)
    out = torch.zeros_like(inputs[0])

    def function(hidden, weights, ids):
        bank(hidden, weights, ids, out=out, workspace=memory)
        return bank(hidden, weights, ids, workspace=memory) + out

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(*inputs), expected + expected)
    assert_same_bits(out, expected)
