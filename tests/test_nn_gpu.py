"""`moe_ext.nn` on a GPU: moves, values against the reference, CUDA graphs, compiled layers."""

from __future__ import annotations

import pytest
import torch
from moe_ext.nn import Experts, MoELayer
from support.fused_moe import Sizes, assert_layer_is_right, random_layer
from support.nn import experts_of, inputs_of, packed
from support.tolerance import assert_close_to_reference, assert_same_bits
from torch import nn

pytestmark = pytest.mark.gpu

ODD = Sizes(num_tokens=33, hidden=192, intermediate=232)


@pytest.mark.parametrize("layout", ["bf16", "expert", "channel", "segments"])
def test_experts_moved_to_the_gpu(layout):
    layer = random_layer(layout, "swiglu", ODD, "cuda")
    on_cpu = experts_of({n: t.cpu() if torch.is_tensor(t) else t for n, t in layer.items()})
    experts = on_cpu.to("cuda")
    assert experts.w2.is_cuda
    assert experts.w2.stride(1) * experts.w2.itemsize % 16 == 0
    assert_layer_is_right(experts(*inputs_of(layer)), layer)


def test_a_checkpoint_of_the_cpu_is_quantised_on_the_gpu():
    tensors = packed(random_layer("bf16", "swiglu", ODD))
    experts = Experts.from_state_dict(tensors, device="cuda", quantize="block")
    expected = Experts.from_state_dict(tensors, quantize="block")
    assert_same_bits(experts.w2.data.cpu().flatten(0, 1), expected.w2.data.flatten(0, 1))
    assert torch.equal(experts.w13_scale.cpu(), expected.w13_scale)


def made_layer():
    layer = random_layer("bf16", "swiglu", ODD, "cuda")
    router = nn.Linear(192, 5, bias=False, dtype=torch.bfloat16, device="cuda")
    experts = Experts.from_state_dict(packed(layer), quantize="channel")
    shared = nn.Linear(192, 192, dtype=torch.bfloat16, device="cuda")
    return MoELayer(router, experts, top_k=3, shared_expert=shared), layer["hidden_states"]


@torch.inference_mode()
def test_a_layer_in_a_cuda_graph_sees_new_tokens():
    layer, x = made_layer()
    size = layer.experts.workspace_size(33, 3)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    out = torch.empty_like(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer(x, out=out, workspace=workspace)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x, out=out, workspace=workspace)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert_same_bits(out, layer(x))


@torch.no_grad()
def test_compiled_layer():
    pytest.importorskip("triton")
    torch._dynamo.reset()
    layer, x = made_layer()
    compiled = torch.compile(layer, fullgraph=True)
    # The router and the shared expert may round otherwise there.
    assert_close_to_reference(compiled(x), layer(x).float())
