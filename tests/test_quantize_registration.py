"""`quantize_fp8` as PyTorch sees it: opcheck, fake tensors, gradients, torch.compile, versions."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from support.quantize import FP8, GRANULARITIES, assert_bits, scale_shape, spread
from torch._subclasses.fake_tensor import FakeTensorMode

OP = torch.ops.moe_ext.quantize_fp8.default
OUT_OP = torch.ops.moe_ext.quantize_fp8_out.default
# The schema check compares arguments before and after, which PyTorch cannot do in FP8.
CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")

granularities = pytest.mark.parametrize("granularity", GRANULARITIES)


def outputs(granularity, shape, device):
    scale_out = torch.zeros(scale_shape(granularity, shape), device=device)
    return {"q": torch.zeros(shape, device=device).to(FP8), "scale_out": scale_out}


@granularities
@pytest.mark.parametrize("shape", [(5, 200), (2, 5, 256)], ids=str)
def test_opcheck(device, granularity, shape):
    x = spread(shape, torch.bfloat16, device)
    torch.library.opcheck(OP, (x, granularity))
    torch.library.opcheck(
        OUT_OP, (x, granularity), outputs(granularity, shape, device), test_utils=CHECKS
    )


def test_opcheck_with_all_arguments(device):
    x = spread((5, 200), torch.bfloat16, device)
    options = {
        "scale": torch.ones((), device=device),
        "num_valid_rows": torch.tensor(5, dtype=torch.int32, device=device),
    }
    torch.library.opcheck(OP, (x, "tensor"), options)


@granularities
@pytest.mark.parametrize("fake_device", ["cpu", "cuda"])
def test_fake_gives_shapes_strides_and_device(fake_device, granularity):
    with FakeTensorMode():
        x = torch.empty(2, 7, 360, dtype=torch.bfloat16, device=fake_device)
        q, scale = moe_ext.quantize_fp8(x, granularity)
    assert (q.shape, q.stride(), q.dtype) == ((2, 7, 360), (7 * 368, 368, 1), FP8)
    assert scale.shape == scale_shape(granularity, (2, 7, 360))
    assert q.device.type == scale.device.type == fake_device


def test_backward_raises_inference_only(device):
    x = torch.randn(3, 16, device=device, requires_grad=True)
    q, scale = moe_ext.quantize_fp8(x, "row")
    for result in (q.float().sum(), scale.sum()):
        with pytest.raises(RuntimeError, match=r"^quantize_fp8: backward .* inference only, got"):
            result.backward()


def test_backward_through_out_raises_inference_only(device):
    x = torch.randn(3, 16, device=device, requires_grad=True)
    written = outputs("row", (3, 16), device)
    moe_ext.quantize_fp8_out(x, "row", **written)
    with pytest.raises(RuntimeError, match=r"^quantize_fp8_out: backward .* inference only, got"):
        written["scale_out"].sum().backward()


def test_forward_mode_is_refused():
    x = torch.randn(3, 16)
    with pytest.raises(RuntimeError, match=r"^quantize_fp8: inputs must have no tangent"):
        torch.func.jvp(lambda x: moe_ext.quantize_fp8(x, "row")[1], (x,), (torch.ones_like(x),))


def test_outputs_count_as_changed_in_place(device):
    written = outputs("row", (3, 16), device)
    versions = {name: tensor._version for name, tensor in written.items()}
    moe_ext.quantize_fp8_out(torch.randn(3, 16, device=device), "row", **written)
    assert all(tensor._version > versions[name] for name, tensor in written.items())


def layer(x, granularity, count):
    q, scale = moe_ext.quantize_fp8(x * 2, granularity, num_valid_rows=count)
    return q.float() + 1, scale * 2


def check_compiled(device, granularity, backend):
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for rows in (2, 7, 130):
        x = spread((rows, 200), torch.bfloat16, device)
        count = torch.tensor([rows], dtype=torch.int32, device=device)
        results = zip(compiled(x, granularity, count), layer(x, granularity, count), strict=True)
        for actual, expected in results:
            assert_bits(actual, expected)


@granularities
def test_compiled_results_are_the_same(device, granularity):
    check_compiled(device, granularity, "aot_eager")


@pytest.mark.gpu
def test_results_of_inductor_are_the_same():
    pytest.importorskip("triton")
    check_compiled("cuda", "1x128", "inductor")


def test_compiled_out_writes_in_place(device):
    torch._dynamo.reset()
    x = spread((3, 200), torch.bfloat16, device)
    written = outputs("1x128", (3, 200), device)

    def write(q, scale_out):
        moe_ext.quantize_fp8_out(x, "1x128", q=q, scale_out=scale_out)
        return scale_out + 1

    compiled = torch.compile(write, fullgraph=True, dynamic=True, backend="aot_eager")
    q, scale = moe_ext.quantize_fp8(x, "1x128")
    assert_bits(compiled(**written), scale + 1)
    assert_bits(written["scale_out"], scale)
    assert_bits(written["q"], q)
