"""`sort_tokens` and `combine_tokens` as PyTorch sees them: opcheck, fakes, gradients, compile."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from support.tokens import draw_ids
from torch._subclasses.fake_tensor import FakeTensorMode

SORT = torch.ops.moe_ext.sort_tokens.default
COMBINE = torch.ops.moe_ext.combine_tokens.default


def combine_arguments(device, num_tokens=5, top_k=3, hidden=32):
    _, _, slot_row = moe_ext.sort_tokens(draw_ids(num_tokens, top_k, 6, strange=0.2), 6)
    y = torch.randn(num_tokens * top_k, hidden).bfloat16()
    weights = torch.rand(num_tokens, top_k)
    return y.to(device), slot_row.to(device), weights.to(device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_opcheck_sort(device, dtype):
    ids = draw_ids(9, 4, 6, dtype, device, strange=0.2)
    expert_map = torch.tensor([2, -1, 0, 1], dtype=torch.int32, device=device)
    torch.library.opcheck(SORT, (ids, 6))
    torch.library.opcheck(SORT, (ids, 6), {"first_expert": 2})
    torch.library.opcheck(SORT, (ids, 3), {"expert_map": expert_map})


def test_opcheck_combine(device):
    y, slot_row, weights = combine_arguments(device)
    torch.library.opcheck(COMBINE, (y, slot_row, None), {"top_k": 3})
    options = {
        "top_k": 3,
        "addend": torch.randn(5, 32, device=device),
        "routed_scale": 2.5,
        "out_dtype": torch.float32,
    }
    torch.library.opcheck(COMBINE, (y, slot_row, weights), options)


@pytest.mark.parametrize("fake_device", ["cpu", "cuda"])
def test_fakes_give_shapes_dtypes_and_device(fake_device):
    with FakeTensorMode():
        ids = torch.empty(7, 4, dtype=torch.int64, device=fake_device)
        results = moe_ext.sort_tokens(ids, 60)
        y = torch.empty(28, 64, dtype=torch.bfloat16, device=fake_device)
        out = moe_ext.combine_tokens(y, results[2], None, top_k=4, out_dtype=torch.float32)
        plain = moe_ext.combine_tokens(y, results[2], None, top_k=4)
    assert [tuple(result.shape) for result in results] == [(60,), (28,), (28,)]
    assert {result.dtype for result in results} == {torch.int32}
    assert (tuple(out.shape), out.dtype) == ((7, 64), torch.float32)
    assert (tuple(plain.shape), plain.dtype) == ((7, 64), torch.bfloat16)
    assert {tensor.device.type for tensor in (*results, out)} == {fake_device}


@pytest.mark.parametrize("wanted", ["y", "topk_weights", "addend"])
def test_backward_raises_inference_only(device, wanted):
    y, slot_row, weights = combine_arguments(device)
    addend = torch.randn(5, 32, device=device)
    {"y": y, "topk_weights": weights, "addend": addend}[wanted].requires_grad_()
    out = moe_ext.combine_tokens(y, slot_row, weights, top_k=3, addend=addend)
    with pytest.raises(RuntimeError, match=r"^combine_tokens: backward .* inference only, got"):
        out.float().sum().backward()


def ends_of_a_layer(ids, hidden, weights):
    _, row_slot, slot_row = moe_ext.sort_tokens(ids, 6)
    rows = hidden[row_slot.clamp_min(0) // ids.shape[1]]
    return moe_ext.combine_tokens(rows, slot_row, weights, top_k=ids.shape[1]) + 1


def check_compiled(device, backend):
    torch._dynamo.reset()
    compiled = torch.compile(ends_of_a_layer, fullgraph=True, dynamic=True, backend=backend)
    for num_tokens in (2, 7, 130):
        ids = draw_ids(num_tokens, 3, 6, device=device, strange=0.2)
        hidden = torch.randn(num_tokens, 32, device=device).bfloat16()
        weights = torch.rand(num_tokens, 3, device=device)
        expected = ends_of_a_layer(ids, hidden, weights)
        assert torch.equal(compiled(ids, hidden, weights), expected)
        assert not torch.equal(expected, torch.ones_like(expected))


def test_compiled_results_are_the_same(device):
    check_compiled(device, "aot_eager")


@pytest.mark.gpu
def test_results_of_inductor_are_the_same():
    pytest.importorskip("triton")
    check_compiled("cuda", "inductor")
