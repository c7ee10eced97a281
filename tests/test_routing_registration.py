"""`topk_routing` as PyTorch sees it: opcheck, fake tensors, gradients, torch.compile, versions."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from support.routing import SCORINGS, normal_logits, some_bias
from torch._subclasses.fake_tensor import FakeTensorMode

OP = torch.ops.moe_ext.topk_routing.default
OUT_OP = torch.ops.moe_ext.topk_routing_out.default


def outputs(num_tokens, top_k, device):
    return {
        "weights": torch.zeros(num_tokens, top_k, device=device),
        "ids": torch.zeros(num_tokens, top_k, dtype=torch.int32, device=device),
    }


@pytest.mark.parametrize("scoring", SCORINGS)
def test_opcheck(device, scoring):
    logits = normal_logits(5, 16, device=device)
    torch.library.opcheck(OP, (logits, 4), {"scoring": scoring})
    torch.library.opcheck(OUT_OP, (logits, 4), {"scoring": scoring, **outputs(5, 4, device)})


def test_opcheck_with_all_arguments(device):
    options = {
        "scoring": "sigmoid",
        "correction_bias": some_bias(16, device=device),
        "renormalize": False,
        "num_groups": 4,
        "topk_groups": 2,
        "scale": 2.5,
    }
    logits = normal_logits(5, 16, torch.bfloat16, device)
    torch.library.opcheck(OP, (logits, 4), options)
    # Not "test_aot_dispatch_dynamic", which calls backward.
    torch.library.opcheck(
        OP,
        (logits.float().requires_grad_(), 4),
        options,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("fake_device", ["cpu", "cuda"])
def test_fake_gives_shapes_strides_and_device(fake_device):
    with FakeTensorMode():
        logits = torch.empty(7, 36, dtype=torch.bfloat16, device=fake_device)
        weights, ids = moe_ext.topk_routing(logits, 5)
    for tensor, dtype in ((weights, torch.float32), (ids, torch.int32)):
        assert (tensor.shape, tensor.stride(), tensor.dtype) == ((7, 5), (5, 1), dtype)
        assert tensor.device.type == fake_device


def test_real_outputs_have_the_strides_of_the_fake(device):
    for num_tokens in (0, 1, 7):
        logits = normal_logits(num_tokens, 40, device=device)[:, :36]
        assert all(tensor.is_contiguous() for tensor in moe_ext.topk_routing(logits, 5))


def test_backward_raises_inference_only(device):
    logits = normal_logits(3, 16, device=device).requires_grad_()
    weights, ids = moe_ext.topk_routing(logits, 4)
    assert not ids.requires_grad
    with pytest.raises(RuntimeError, match=r"^topk_routing: backward .* inference only, got"):
        weights.sum().backward()


def test_backward_through_out_raises_inference_only(device):
    logits = normal_logits(3, 16, device=device).requires_grad_()
    written = outputs(3, 4, device)
    moe_ext.topk_routing_out(logits, 4, **written)
    with pytest.raises(RuntimeError, match=r"^topk_routing_out: backward .* inference only, got"):
        written["weights"].sum().backward()


def test_forward_mode_is_refused():
    logits = normal_logits(3, 16)
    with pytest.raises(RuntimeError, match=r"^topk_routing: inputs must have no tangent"):
        torch.func.jvp(
            lambda x: moe_ext.topk_routing(x, 4)[0], (logits,), (torch.ones_like(logits),)
        )


def test_outputs_count_as_changed_in_place(device):
    written = outputs(3, 4, device)
    versions = {name: tensor._version for name, tensor in written.items()}
    moe_ext.topk_routing_out(normal_logits(3, 16, device=device), 4, **written)
    assert all(tensor._version > versions[name] for name, tensor in written.items())


def layer(logits, bias):
    weights, ids = moe_ext.topk_routing(
        logits * 2,
        4,
        scoring="sigmoid",
        correction_bias=bias,
        num_groups=4,
        topk_groups=2,
        scale=2.5,
    )
    return weights + 1, ids * 2


def check_compiled(device, backend):
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    bias = some_bias(16, device=device)
    for num_tokens in (2, 7, 130):
        logits = normal_logits(num_tokens, 16, device=device)
        for actual, expected in zip(compiled(logits, bias), layer(logits, bias), strict=True):
            assert torch.equal(actual, expected)


def test_compiled_results_are_the_same(device):
    check_compiled(device, "aot_eager")


@pytest.mark.gpu
def test_results_of_inductor_are_the_same():
    pytest.importorskip("triton")
    check_compiled("cuda", "inductor")


def test_a_graph_holds_one_node_for_any_number_of_tokens():
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    bias = some_bias(16)
    for num_tokens in (2, 7, 500):
        compiled(normal_logits(num_tokens, 16), bias)
    (targets,) = graphs
    assert sum("topk_routing" in str(target) for target in targets) == 1


def test_compiled_out_writes_in_place(device):
    torch._dynamo.reset()
    logits = normal_logits(3, 16, device=device)
    written = outputs(3, 4, device)

    def write(weights, ids):
        moe_ext.topk_routing_out(logits, 4, weights=weights, ids=ids)
        return ids + 1

    compiled = torch.compile(write, fullgraph=True, dynamic=True, backend="aot_eager")
    weights, ids = moe_ext.topk_routing(logits, 4)
    assert torch.equal(compiled(**written), ids + 1)
    assert torch.equal(written["ids"], ids)
    assert torch.equal(written["weights"], weights)
