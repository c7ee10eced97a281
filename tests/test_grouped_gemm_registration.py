"""The op as PyTorch sees it: opcheck, fake tensors, gradients, torch.compile, versions."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from support.inputs import offs_of
from support.tolerance import assert_same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

ROWS = (2, 0, 5)
NUM_ROWS = sum(ROWS)
ALL_CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def arguments(device, dtype=torch.bfloat16, num_rows=NUM_ROWS):
    """Offsets cover every row: opcheck compares whole outputs."""
    a = torch.randint(-4, 5, (num_rows, 32), device=device).to(dtype)
    b = torch.randint(-4, 5, (len(ROWS), 16, 32), device=device).to(dtype)
    rows = (2, 0, num_rows - 2) if num_rows > 2 else (num_rows, 0, 0)
    return a, b, offs_of(rows, device)


def options(device, dtype):
    if dtype is torch.bfloat16:
        return {}
    scale_b = torch.tensor([0.5, 1.0, 2.0], device=device)
    return {"scale_a": torch.ones((), device=device), "scale_b": scale_b, "accumulate": "fast"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_opcheck(device, dtype):
    args, kwargs = arguments(device, dtype), options(device, dtype)
    # opcheck compares the inputs before and after, which PyTorch cannot do in FP8.
    checks = ALL_CHECKS if dtype is torch.bfloat16 else ALL_CHECKS[1:]
    op = torch.ops.moe_ext.grouped_gemm.default
    torch.library.opcheck(op, args, kwargs, test_utils=checks)


def test_opcheck_out(device):
    out = torch.zeros(NUM_ROWS, 16, dtype=torch.float32, device=device)
    op = torch.ops.moe_ext.grouped_gemm_out.default
    torch.library.opcheck(op, arguments(device), {"out": out})


def test_opcheck_with_parameters(device):
    a, b, offs = arguments(device)
    b.requires_grad_()
    op = torch.ops.moe_ext.grouped_gemm.default
    with torch.no_grad():
        torch.library.opcheck(op, (a, b, offs))
    # The remaining check calls backward, which raises by contract.
    torch.library.opcheck(op, (a, b, offs), test_utils=ALL_CHECKS[:-1])


def test_opcheck_out_with_parameters(device):
    a, b, offs = arguments(device)
    out = torch.zeros(NUM_ROWS, 16, dtype=torch.bfloat16, device=device)
    op = torch.ops.moe_ext.grouped_gemm_out.default
    torch.library.opcheck(op, (a, b.requires_grad_(), offs), {"out": out})


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fake_device", ["cpu", "cuda"])
def test_fake_gives_shape_dtype_and_device(fake_device, out_dtype):
    with FakeTensorMode():
        a = torch.empty(7, 32, dtype=torch.float8_e4m3fn, device=fake_device)
        b = torch.empty(3, 16, 32, dtype=torch.float8_e4m3fn, device=fake_device)
        offs = torch.empty(3, dtype=torch.int32, device=fake_device)
        out = moe_ext.grouped_gemm(a, b, offs, out_dtype=out_dtype)
    assert out.shape == (7, 16)
    assert out.dtype is (out_dtype or torch.bfloat16)
    assert out.device.type == fake_device


def test_backward_raises_inference_only(device):
    a, b, offs = arguments(device)
    out = moe_ext.grouped_gemm(a, b.requires_grad_(), offs)
    assert out.requires_grad
    with pytest.raises(RuntimeError, match="inference only, got a gradient of shape"):
        out.sum().backward()


def test_backward_through_out_raises_inference_only(device):
    a, b, offs = arguments(device)
    out = torch.zeros(NUM_ROWS, 16, device=device)
    moe_ext.grouped_gemm_out(a.requires_grad_(), b, offs, out=out)
    with pytest.raises(RuntimeError, match="inference only"):
        out.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_give_plain_results_without_gradients(device, mode):
    a, b, offs = arguments(device)
    expected = moe_ext.grouped_gemm(a, b, offs)
    b.requires_grad_()
    with mode():
        out = moe_ext.grouped_gemm(a, b, offs)
    assert not out.requires_grad
    assert_same_bits(out, expected)


def test_out_counts_as_changed_in_place(device):
    out = torch.zeros(NUM_ROWS, 16, device=device)
    before = out._version
    moe_ext.grouped_gemm_out(*arguments(device), out=out)
    assert out._version > before


def layer(a, b, offs):
    return moe_ext.grouped_gemm(a, b, offs) * 2


class CountGraphs:
    """A backend that counts the graphs it is given and runs them eagerly."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward


def test_compile_gives_one_graph_for_two_or_more_rows(device):
    torch._dynamo.reset()
    backend = CountGraphs()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for num_rows in (2, 3, 7, 64, 300):
        args = arguments(device, num_rows=num_rows)
        assert_same_bits(compiled(*args), layer(*args))
    assert len(backend.graphs) == 1
    targets = [node.target for node in backend.graphs[0].graph.nodes]
    assert torch.ops.moe_ext.grouped_gemm.default in targets
    compiled(*arguments(device, num_rows=1))
    assert len(backend.graphs) == 2


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiled_results_are_the_same(device, backend):
    if backend == "inductor":
        pytest.importorskip("triton")
        if device == "cpu":
            pytest.skip("covered by aot_eager, without minutes of C++ compilation")
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    a, b, offs = arguments(device)
    assert_same_bits(compiled(a, b, offs), layer(a, b, offs))
    shard = torch.randint(-4, 5, (3, 32, 64), device=device).bfloat16()[:, 8:24, 16:48]
    assert_same_bits(compiled(a, shard, offs), layer(a, shard, offs))


def test_compiled_with_parameters_raises_only_in_backward(device):
    torch._dynamo.reset()
    a, b, offs = arguments(device)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    out = compiled(a, b.requires_grad_(), offs)
    assert_same_bits(out.detach(), layer(a, b, offs).detach())
    with pytest.raises(RuntimeError, match="inference only"):
        out.sum().backward()


def test_compiled_out_writes_in_place(device):
    torch._dynamo.reset()
    a, b, offs = arguments(device)
    out = torch.zeros(NUM_ROWS, 16, dtype=torch.bfloat16, device=device)

    def write(out):
        moe_ext.grouped_gemm_out(a, b, offs, out=out)
        return out + 1

    compiled = torch.compile(write, fullgraph=True, dynamic=True, backend="aot_eager")
    expected = moe_ext.grouped_gemm(a, b, offs)
    assert_same_bits(compiled(out), expected + 1)
    assert_same_bits(out, expected)


def test_export(device):
    a, b, offs = arguments(device)

    class Layer(torch.nn.Module):
        def forward(self, a, b, offs):
            return torch.ops.moe_ext.grouped_gemm(a, b, offs)

    num_rows = torch.export.Dim("num_rows", min=2, max=4096)
    with torch.no_grad():
        shapes = {"a": {0: num_rows}, "b": None, "offs": None}
        program = torch.export.export(Layer(), (a, b, offs), dynamic_shapes=shapes)
    other = arguments(device, num_rows=9)
    assert_same_bits(program.module()(*other), moe_ext.grouped_gemm(*other))


def test_forward_mode_is_refused():
    a, b = torch.randn(3, 16).bfloat16(), torch.randn(1, 8, 16).bfloat16()
    offs = torch.tensor([3], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"inputs must have no tangent.*inference only"):
        torch.func.jvp(lambda x: moe_ext.grouped_gemm(x, b, offs), (a,), (torch.ones_like(a),))


def test_a_refused_call_leaves_the_version_of_out():
    a, b = torch.randn(3, 16).bfloat16(), torch.randn(1, 8, 16).bfloat16()
    out = torch.empty(3, 16).bfloat16()
    version = out._version
    with pytest.raises(ValueError, match="`out` must have shape"):
        moe_ext.grouped_gemm_out(a, b, torch.tensor([3], dtype=torch.int32), out=out)
    assert out._version == version


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b": torch.empty(2, 8, 32).bfloat16()}, "16. to match `a`"),
        ({"a": torch.empty(3, 16)}, "`a` must be bfloat16 or float8_e4m3fn"),
        ({"offs": torch.empty(2)}, "`offs` must be int32"),
        ({"offs": torch.empty(3, dtype=torch.int32)}, "`offs` must have shape"),
        ({"b": torch.empty(2, 9, 16).bfloat16()}, "n a multiple of 8"),
        ({"bias": torch.empty(2, 9)}, "`bias` must have shape"),
        ({"scale_a": torch.empty(())}, "`scale_a` must be None"),
        ({"out": torch.empty(3, 9).bfloat16()}, "`out` must have shape"),
        ({"out": torch.empty(8, 3).bfloat16().T}, "`out` must have a contiguous last"),
        ({"out": torch.empty(3, 8).half()}, "grouped_gemm_out: `out` must be bfloat16 or float32"),
    ],
)
def test_fakes_are_checked_as_real_tensors_are(changes, message):
    arguments = {
        "a": torch.empty(3, 16).bfloat16(),
        "b": torch.empty(2, 8, 16).bfloat16(),
        "offs": torch.empty(2, dtype=torch.int32),
    } | changes
    arguments = {name: tensor.to("meta") for name, tensor in arguments.items()}
    op = moe_ext.grouped_gemm_out if "out" in arguments else moe_ext.grouped_gemm
    with pytest.raises(ValueError, match=message):
        op(**arguments)


@pytest.mark.parametrize("name", ["a", "b", "offs", "scale_a", "scale_b", "out"])
def test_a_meta_tensor_among_real_ones_is_refused(name):
    arguments = {
        "a": torch.ones(3, 16).to(FP8),
        "b": torch.ones(2, 8, 16).to(FP8),
        "offs": torch.tensor([1, 3], dtype=torch.int32),
        "scale_a": torch.ones(()),
        "scale_b": torch.ones(2),
    }
    op = moe_ext.grouped_gemm
    if name == "out":
        op, arguments["out"] = moe_ext.grouped_gemm_out, torch.ones(3, 8).bfloat16()
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match="where `a` is, got"):
        op(**arguments)
