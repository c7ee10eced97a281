"""`fused_moe_masked` as PyTorch sees it: opcheck, fake tensors, gradients, torch.compile."""

from __future__ import annotations

import inspect

import moe_ext
import pytest
import torch
from moe_ext._fused_moe_masked_checks import check_fused_moe_masked
from support.fused_moe import LAYOUTS, integer_layer
from support.fused_moe_masked import (
    MASKED_OPERANDS,
    assert_rest_untouched,
    in_buffers,
    rows_that_count,
    sizes_of,
)
from support.inputs import poisoned
from support.tolerance import assert_same_bits
from test_fused_moe_registration import ALL_CHECKS, FP8_CHECKS, CountGraphs
from torch._subclasses.fake_tensor import FakeTensorMode

OP = torch.ops.moe_ext.fused_moe_masked.default
OUT_OP = torch.ops.moe_ext.fused_moe_masked_out.default
FULL = (4, 4, 4)  # rows that are not written would differ between the runs of opcheck
SOME = (2, 0, 9)


def arguments(device, layout="bf16", counts=FULL, max_rows=4):
    layer = integer_layer(layout, sizes_of(counts, max_rows, 16, 32), device)
    return in_buffers(layer, counts, max_rows)


def split(layer):
    """Positional and other arguments, as opcheck takes them."""
    options = {name: value for name, value in layer.items() if name not in MASKED_OPERANDS}
    return tuple(layer[name] for name in MASKED_OPERANDS), options


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
        "batch_invariant": True,
        "expected_rows": 2,
    }
    torch.library.opcheck(OP, args, options)


def test_opcheck_out(device):
    args, options = split(arguments(device, counts=SOME))
    out = torch.zeros(3, 4, 16, device=device).bfloat16()
    torch.library.opcheck(OUT_OP, args, options | {"out": out, "expected_rows": 2})


def test_the_op_takes_operands_by_name(device):
    layer = arguments(device)
    assert_same_bits(OP(**layer), moe_ext.fused_moe_masked(**layer))


def test_defaults_are_the_same_everywhere():
    schema = OP._schema.arguments
    defaults = {one.name: one.default_value for one in schema if one.kwarg_only}
    for function in (moe_ext.fused_moe_masked, moe_ext.fused_moe_masked_out):
        assert function.__kwdefaults__ == defaults
    assert check_fused_moe_masked.__kwdefaults__ == defaults | {"has_memory": True}
    operands = [one.name for one in schema if not one.kwarg_only]
    assert list(inspect.signature(moe_ext.fused_moe_masked).parameters)[:4] == operands


@pytest.mark.parametrize("fake_device", ["cpu", "cuda"])
def test_fake_gives_shape_dtype_and_device(fake_device):
    with FakeTensorMode():
        layer = {
            name: torch.empty(value.shape, dtype=value.dtype, device=fake_device)
            for name, value in arguments("cpu").items()
        }
        out = moe_ext.fused_moe_masked(**layer)
    assert (out.shape, out.dtype) == ((3, 4, 16), torch.bfloat16)
    assert out.device.type == fake_device


@pytest.mark.parametrize("name", ["hidden_states", "w13", "w2", "w13_bias"])
def test_backward_raises_inference_only(device, name):
    layer = arguments(device)
    layer[name] = layer[name].detach().clone().requires_grad_()
    out = moe_ext.fused_moe_masked(**layer)
    assert out.requires_grad
    with pytest.raises(RuntimeError, match=r"^fused_moe_masked: backward .* inference only, got"):
        out.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_give_plain_results_without_gradients(device, mode):
    layer = arguments(device)
    expected = moe_ext.fused_moe_masked(**layer)
    layer["w13"].requires_grad_()
    with mode():
        out = moe_ext.fused_moe_masked(**layer)
    assert not out.requires_grad
    assert_same_bits(out, expected)


def test_what_is_written_counts_as_changed(device):
    layer = arguments(device)
    out = torch.zeros(3, 4, 16, device=device).bfloat16()
    before = out._version
    moe_ext.fused_moe_masked_out(**layer, out=out)
    assert out._version > before


def layer_of(layer):
    return moe_ext.fused_moe_masked(**layer) * 2


@pytest.mark.parametrize("layout", ["bf16", "segments"])
def test_compile_gives_one_node_in_one_graph(device, layout):
    torch._dynamo.reset()
    backend = CountGraphs()
    compiled = torch.compile(layer_of, fullgraph=True, dynamic=True, backend=backend)
    # Not first a number that is another size of the layer too: torch would take them for one.
    for max_rows in (7, 2, 4, 65):
        layer = arguments(device, layout, SOME, max_rows)
        out, expected = compiled(layer), layer_of(layer)
        assert_same_bits(rows_that_count(out, layer), rows_that_count(expected, layer))
    assert len(backend.graphs) == 1
    targets = [node.target for node in backend.graphs[0].graph.nodes]
    assert targets.count(OP) == 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_ops_alone(device, backend, dynamic):
    """Nothing to fuse, so nothing for a compiler; a graph's passes run all the same."""
    layer = arguments(device, counts=SOME)
    expected = moe_ext.fused_moe_masked(**layer)

    def write(out):
        moe_ext.fused_moe_masked_out(**layer, out=out)
        return moe_ext.fused_moe_masked(**layer)

    torch._dynamo.reset()
    compiled = torch.compile(write, fullgraph=True, dynamic=dynamic, backend=backend)
    out = poisoned((3, 4, 16), torch.bfloat16, device)
    for result in (compiled(out), out):
        assert_same_bits(rows_that_count(result, layer), rows_that_count(expected, layer))
    assert_rest_untouched(out, layer)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_with_expected_rows(device, dynamic):
    """Of a number, and of one that follows from a size."""

    def half_full(layer, expected_rows):
        likely = layer["hidden_states"].shape[1] // 2
        first = moe_ext.fused_moe_masked(**layer, expected_rows=expected_rows)
        return first, moe_ext.fused_moe_masked(**layer, expected_rows=likely)

    torch._dynamo.reset()
    compiled = torch.compile(half_full, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for max_rows, expected_rows in ((7, 0), (7, 5), (9, 100)):
        layer = arguments(device, counts=SOME, max_rows=max_rows)
        expected = rows_that_count(moe_ext.fused_moe_masked(**layer), layer)
        for out in compiled(layer, expected_rows):
            assert_same_bits(rows_that_count(out, layer), expected)
    with pytest.raises(Exception, match="`expected_rows` must not be negative, got -1"):
        compiled(layer, -1)


def test_export(device):
    layer = arguments(device)

    class Layer(torch.nn.Module):
        def forward(self, hidden_states, w13, w2, counts, w13_bias):
            return torch.ops.moe_ext.fused_moe_masked(
                hidden_states, w13, w2, counts, w13_bias=w13_bias
            )

    names = (*MASKED_OPERANDS, "w13_bias")
    shapes = dict.fromkeys(names)
    shapes["hidden_states"] = {1: torch.export.Dim("max_rows", min=2, max=4096)}
    layer["hidden_states"] = layer["hidden_states"].contiguous()
    with torch.no_grad():
        args = tuple(layer[name] for name in names)
        program = torch.export.export(Layer(), args, dynamic_shapes=shapes)
    other = arguments(device, counts=(9, 9, 9), max_rows=9)
    other["hidden_states"] = other["hidden_states"].contiguous()
    args = tuple(other[name] for name in names)
    assert_same_bits(program.module()(*args), moe_ext.fused_moe_masked(**other))
