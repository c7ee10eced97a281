"""`fused_moe` as PyTorch sees it: opcheck, fake tensors, gradients, torch.compile, versions."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from support.fused_moe import LAYOUTS, OPERANDS, Sizes, integer_layer
from support.tolerance import assert_same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

OP = torch.ops.moe_ext.fused_moe.default
WORKSPACE_OP = torch.ops.moe_ext.fused_moe.workspace
OUT_OP = torch.ops.moe_ext.fused_moe_out.default
SIZES = Sizes(num_tokens=4, num_experts=3, top_k=2, hidden=16, intermediate=16)
# The schema check compares arguments before and after, which PyTorch cannot do in FP8.
FP8_CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
ALL_CHECKS = ("test_schema", *FP8_CHECKS)


def split(layer):
    """Positional and other arguments, as opcheck takes them."""
    options = {name: value for name, value in layer.items() if name not in OPERANDS}
    return tuple(layer[name] for name in OPERANDS), options


def arguments(device, layout="bf16", num_tokens=4):
    sizes = Sizes(num_tokens=num_tokens, num_experts=3, top_k=2, hidden=16, intermediate=16)
    return integer_layer(layout, sizes, device)


def workspace(device, num_tokens=4):
    size = moe_ext.fused_moe_workspace_size(
        num_tokens=num_tokens, top_k=2, hidden_size=16, intermediate_size=16, num_experts=3
    )
    return torch.zeros(size, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(device, layout):
    args, options = split(arguments(device, layout))
    checks = ALL_CHECKS if layout == "bf16" else FP8_CHECKS
    torch.library.opcheck(OP, args, options, test_utils=checks)


def test_opcheck_with_all_arguments(device):
    args, options = split(arguments(device))
    options |= {
        "w2_bias": torch.ones(3, 16, device=device),
        "activation": "swiglu_oai",
        "alpha": 1.0,
        "limit": 8.0,
        "gate_up_layout": "interleaved",
        "apply_router_weight_on_input": True,
        "expert_map": torch.arange(3, dtype=torch.int32, device=device),
        "addend": torch.ones(4, 16, device=device).bfloat16(),
        "routed_scale": 2.0,
        "batch_invariant": True,
    }
    torch.library.opcheck(OP, args, options)


def test_opcheck_with_a_workspace(device):
    args, options = split(arguments(device))
    # On CUDA what the workspace holds afterwards is unspecified, and opcheck compares it.
    checks = ALL_CHECKS if device == "cpu" else ("test_autograd_registration", "test_faketensor")
    options["workspace"] = workspace(device)
    torch.library.opcheck(WORKSPACE_OP, args, options, test_utils=checks)


def test_opcheck_out(device):
    args, options = split(arguments(device))
    out = torch.zeros(4, 16, device=device).bfloat16()
    torch.library.opcheck(OUT_OP, args, options | {"out": out})


def test_opcheck_with_parameters(device):
    layer = arguments(device)
    layer["w13"].requires_grad_()
    args, options = split(layer)
    with torch.no_grad():
        torch.library.opcheck(OP, args, options)
    # The remaining check calls backward, which raises by contract.
    torch.library.opcheck(OP, args, options, test_utils=ALL_CHECKS[:-1])


@pytest.mark.parametrize("fake_device", ["cpu", "cuda"])
def test_fake_gives_shape_dtype_and_device(fake_device):
    with FakeTensorMode():
        layer = {
            name: torch.empty(value.shape, dtype=value.dtype, device=fake_device)
            for name, value in arguments("cpu").items()
        }
        out = moe_ext.fused_moe(**layer)
    assert (out.shape, out.dtype) == ((4, 16), torch.bfloat16)
    assert out.device.type == fake_device


@pytest.mark.parametrize("name", ["hidden_states", "w13", "w2", "topk_weights", "w13_bias"])
def test_backward_raises_inference_only(device, name):
    layer = arguments(device)
    layer[name].requires_grad_()
    out = moe_ext.fused_moe(**layer, workspace=workspace(device))
    assert out.requires_grad
    with pytest.raises(RuntimeError, match=r"^fused_moe: backward .* inference only, got"):
        out.sum().backward()


def test_backward_through_out_raises_inference_only(device):
    layer = arguments(device)
    out = torch.zeros(4, 16, device=device).bfloat16()
    layer["w2"].requires_grad_()
    moe_ext.fused_moe_out(**layer, out=out)
    with pytest.raises(RuntimeError, match=r"^fused_moe_out: backward .* inference only, got"):
        out.sum().backward()


def test_forward_mode_is_refused():
    layer = arguments("cpu")
    x = layer.pop("hidden_states")

    def function(x):
        return moe_ext.fused_moe(x, **layer)

    with pytest.raises(RuntimeError, match=r"^fused_moe: inputs must have no tangent"):
        torch.func.jvp(function, (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_give_plain_results_without_gradients(device, mode):
    layer = arguments(device)
    expected = moe_ext.fused_moe(**layer)
    layer["w13"].requires_grad_()
    with mode():
        out = moe_ext.fused_moe(**layer)
    assert not out.requires_grad
    assert_same_bits(out, expected)


@pytest.mark.parametrize("with_grad", [False, True])
def test_what_is_written_counts_as_changed(device, with_grad):
    layer, scratch = arguments(device), workspace(device)
    layer["w13"].requires_grad_(with_grad)
    out = torch.zeros(4, 16, device=device).bfloat16()
    before = out._version, scratch._version
    moe_ext.fused_moe_out(**layer, out=out, workspace=scratch)
    assert out._version > before[0]
    assert scratch._version > before[1]
    before = scratch._version
    moe_ext.fused_moe(**layer, workspace=scratch)
    assert scratch._version > before


def layer_of(layer):
    return moe_ext.fused_moe(**layer) * 2


class CountGraphs:
    """A backend that counts the graphs it is given and runs them eagerly."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward


@pytest.mark.parametrize("layout", ["bf16", "segments"])
def test_compile_gives_one_node_in_one_graph(device, layout):
    torch._dynamo.reset()
    backend = CountGraphs()
    compiled = torch.compile(layer_of, fullgraph=True, dynamic=True, backend=backend)
    # Not first a number that is another size of the layer too: torch would take them for one.
    for num_tokens in (7, 2, 3, 64, 300):
        layer = arguments(device, layout, num_tokens)
        assert_same_bits(compiled(layer), layer_of(layer))
    assert len(backend.graphs) == 1
    targets = [node.target for node in backend.graphs[0].graph.nodes]
    assert targets.count(OP) == 1
    compiled(arguments(device, layout, 1))
    assert len(backend.graphs) == 2


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiled_results_are_the_same(device, backend):
    if backend == "inductor":
        pytest.importorskip("triton")
        if device == "cpu":
            pytest.skip("covered by aot_eager, without minutes of C++ compilation")
    torch._dynamo.reset()
    compiled = torch.compile(layer_of, fullgraph=True, dynamic=True, backend=backend)
    for changes in ({}, {"workspace": workspace(device)}, {"apply_router_weight_on_input": True}):
        layer = arguments(device) | changes
        assert_same_bits(compiled(layer), layer_of(layer))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("with_workspace", [False, True])
def test_inductor_compiles_the_ops_alone(device, with_workspace, dynamic):
    """Nothing to fuse, so on the CPU nothing for a C++ compiler; a graph's passes run all the same.

    They fail on an op with one result and an optional argument that it writes and does not get.
    """
    layer = arguments(device)
    scratch = workspace(device) if with_workspace else None
    expected = moe_ext.fused_moe(**layer)

    def write(out, scratch):
        moe_ext.fused_moe_out(**layer, out=out, workspace=scratch)
        return moe_ext.fused_moe(**layer, workspace=scratch)

    torch._dynamo.reset()
    compiled = torch.compile(write, fullgraph=True, dynamic=dynamic, backend="inductor")
    out = torch.zeros(4, 16, device=device).bfloat16()
    assert_same_bits(compiled(out, scratch), expected)
    assert_same_bits(out, expected)


def test_the_packet_finds_the_op_with_a_workspace(device):
    args, options = split(arguments(device))
    expected = torch.ops.moe_ext.fused_moe(*args, **options)
    out = torch.ops.moe_ext.fused_moe(*args, **options, workspace=workspace(device))
    assert_same_bits(out, expected)


def test_compiled_out_writes_in_place(device):
    torch._dynamo.reset()
    layer, scratch = arguments(device), workspace(device)
    out = torch.zeros(4, 16, device=device).bfloat16()

    def write(out, scratch):
        moe_ext.fused_moe_out(**layer, out=out, workspace=scratch)
        return out + 1

    compiled = torch.compile(write, fullgraph=True, dynamic=True, backend="aot_eager")
    expected = moe_ext.fused_moe(**layer)
    assert_same_bits(compiled(out, scratch), expected + 1)
    assert_same_bits(out, expected)


def test_export(device):
    layer = arguments(device)
    names = (*OPERANDS, "w13_bias")

    class Layer(torch.nn.Module):
        def forward(self, hidden_states, w13, w2, topk_weights, topk_ids, w13_bias):
            return torch.ops.moe_ext.fused_moe(
                hidden_states, w13, w2, topk_weights, topk_ids, w13_bias=w13_bias
            )

    num_tokens = torch.export.Dim("num_tokens", min=2, max=4096)
    shapes = dict.fromkeys(names)
    for name in ("hidden_states", "topk_weights", "topk_ids"):
        shapes[name] = {0: num_tokens}
    with torch.no_grad():
        args = tuple(layer[name] for name in names)
        program = torch.export.export(Layer(), args, dynamic_shapes=shapes)
    other = arguments(device, num_tokens=9)
    args = tuple(other[name] for name in names)
    assert_same_bits(program.module()(*args), moe_ext.fused_moe(**other))
