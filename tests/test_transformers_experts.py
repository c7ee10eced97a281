"""One module of experts of Transformers on moe_ext: every form of it, what is refused, packing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

pytest.importorskip("transformers")

from moe_ext.integrations.transformers import register
from support.tolerance import assert_close_to_reference, assert_same_bits, dissimilarity
from support.transformers_experts import (
    EXPERTS,
    HIDDEN,
    dequantized,
    expected_of,
    make_experts,
    make_fp8_experts,
    routed,
)

# What Transformers warns of is not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

MAX_FP8_DISSIMILARITY = 4e-3  # activations are rounded to FP8 twice

register()


def halves(gate_up):
    return gate_up.chunk(2, dim=-1)


def oai_gate(self, gate_up):
    gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if self.interleaved else halves(gate_up)
    gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
    return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


def clamped_gate(self, gate_up):
    gate, up = halves(gate_up)
    return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def clamped_behind_gate(self, gate_up):
    gate, up = halves(gate_up)
    return self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


FORMS = {
    "plain": {},
    "transposed": {"is_transposed": True},
    "biased": {"has_bias": True},
    "ungated_relu2": {"has_gate": False, "act": "relu2"},
    "ungated_silu_transposed_biased": {
        "has_gate": False,
        "is_transposed": True,
        "has_bias": True,
    },
    "gelu": {"act": "gelu"},
    "gelu_tanh": {"act": "gelu_pytorch_tanh"},
    "gpt_oss": {
        "gate": oai_gate,
        "attributes": {"alpha": 1.702, "limit": 7.0, "interleaved": True},
        "is_concatenated": False,
        "is_transposed": True,
        "has_bias": True,
    },
    "oai_concatenated": {
        "gate": oai_gate,
        "attributes": {"alpha": 1.5, "limit": 1.0, "interleaved": False},
    },
    "clamped": {"gate": clamped_gate, "attributes": {"limit": 0.5}},
    "infinite_limit": {"gate": clamped_gate, "attributes": {"limit": float("inf")}},
}


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_forms(form, device):
    experts, (x, ids, weights) = make_experts(device, **FORMS[form]), routed(device)
    out = experts(x, ids, weights)
    assert_close_to_reference(out, expected_of(experts, x, ids, weights))
    assert_same_bits(experts(x, ids, weights), out)


@torch.no_grad()
def test_ids_of_other_ranks_add_nothing(device):
    experts, (x, ids, weights) = make_experts(device), routed(device)
    ids[::2, 0], ids[1::3, 1], ids[3] = EXPERTS, EXPERTS + 5, EXPERTS
    out = experts(x, ids, weights)
    assert_close_to_reference(out, expected_of(experts, x, ids, weights))
    assert not out[3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_weights_of_all_experts(dtype, device):
    experts, (x, ids, weights) = make_experts(device), routed(device)
    ids[2, 0] = EXPERTS
    weights = weights.to(dtype)
    every = torch.zeros(len(ids), EXPERTS + 1, dtype=dtype, device=device)
    every = every.scatter(1, ids, weights)[:, :EXPERTS].contiguous()
    assert_same_bits(experts(x, ids, every), experts(x, ids, weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@torch.no_grad()
def test_hidden_states_keep_their_dtype(dtype, device):
    experts, (x, ids, weights) = make_experts(device), routed(device)
    out = experts(x.to(dtype), ids.int(), weights)
    assert out.dtype is dtype
    assert_same_bits(out, experts(x, ids, weights).to(dtype))


@torch.no_grad()
def test_no_tokens(device):
    experts, (x, ids, weights) = make_experts(device), routed(device)
    assert experts(x[:0], ids[:0], weights[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"act": "tanh"}, "activation of OwnExperts must be one of SiLUActivation, .*got Tanh"),
        ({"act": "relu2"}, "must be one of SiLUActivation"),
        ({"act": "gelu_pytorch_tanh", "has_gate": False}, "must be one of SiLUActivation"),
        (
            {"gate": clamped_behind_gate, "attributes": {"limit": 7.0}},
            "activation of OwnExperts must be one of fused_moe's, got one that differs",
        ),
    ],
)
def test_unknown_gates_are_refused(form, message):
    experts, inputs = make_experts(**form), routed()
    with pytest.raises(ValueError, match=message):
        experts(*inputs)


def test_other_dtypes_are_refused():
    experts, inputs = make_experts(), routed()
    with pytest.raises(
        ValueError, match=r"gate_up_proj of OwnExperts must be bfloat16 or .*float32"
    ):
        experts.float()(*inputs)
    known = make_experts()
    known(*inputs)
    with pytest.raises(ValueError, match="must be bfloat16 or float8_e4m3fn, got float16"):
        known.half()(*inputs)


@torch.no_grad()
def test_packing_keeps_values_and_leaves_one_copy(device):
    experts, inputs = make_experts(device, **FORMS["gpt_oss"]), routed(device)
    before = copy.deepcopy(experts.state_dict())
    given = [
        StorageWeakRef(getattr(experts, name).untyped_storage())
        for name in ("gate_up_proj", "down_proj")
    ]
    out = experts(*inputs)
    for name, parameter in experts.named_parameters():
        assert parameter.shape == before[name].shape
        assert_same_bits(parameter.data.flatten(0, 1), before[name].flatten(0, 1))
    for name in ("gate_up_proj", "down_proj"):
        parameter = getattr(experts, name)
        assert parameter.stride(1) == 1
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    assert all(storage.expired() for storage in given)
    packed = experts.gate_up_proj.data_ptr()
    assert_same_bits(experts(*inputs), out)
    assert experts.gate_up_proj.data_ptr() == packed
    experts.load_state_dict(before)
    assert_same_bits(experts(*inputs), out)
    assert experts.gate_up_proj.data_ptr() == packed


def test_packing_in_inference_mode_leaves_usable_parameters(device):
    experts, inputs = make_experts(device, is_transposed=True), routed(device)
    with torch.inference_mode():
        out = experts(*inputs)
    experts.gate_up_proj.mul_(1)
    with torch.no_grad():
        assert_same_bits(experts(*inputs), out.clone())


@torch.no_grad()
def test_moves_and_copies_of_packed_experts(device):
    experts, inputs = make_experts(device, is_transposed=True), routed(device)
    out = experts(*inputs)
    assert_same_bits(copy.deepcopy(experts)(*inputs), out)
    there_and_back = copy.deepcopy(experts).to("cpu").to(device)
    assert_same_bits(there_and_back(*inputs), out)


def test_compilation_before_packing_is_refused():
    torch._dynamo.reset()
    experts, inputs = make_experts(is_transposed=True), routed()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"OwnExperts must be packed before torch\.compile"):
        compiled(*inputs)


def test_compilation_before_an_own_gate_was_checked_is_refused():
    torch._dynamo.reset()
    experts, inputs = make_experts(**FORMS["clamped"]), routed()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="its own _apply_gate has not been checked"):
        compiled(*inputs)


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@torch.no_grad()
def test_compiled(warm, device):
    torch._dynamo.reset()
    experts, inputs = make_experts(device), routed(device)
    if warm:
        experts(*inputs)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(*inputs), experts(*inputs))


@pytest.mark.gpu
@torch.no_grad()
def test_compiled_by_inductor():
    pytest.importorskip("triton")
    torch._dynamo.reset()
    experts, inputs = make_experts("cuda"), routed("cuda")
    compiled = torch.compile(experts, fullgraph=True)
    assert_same_bits(compiled(*inputs), experts(*inputs))


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"intermediate": 64},  # gate and up share 128 rows and have scales of their own
        {"intermediate": 384, "hidden": 192},
        {"block_size": None},
        {"swiglu_limit": 0.5},
        {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    ],
    ids=["block", "halves", "short_block", "matrix", "limit", "oai"],
)
@torch.no_grad()
def test_fp8(form, device):
    experts = make_fp8_experts(device, **form)
    x, ids, weights = routed(device, form.get("hidden", 256))
    ids[1, 0] = EXPERTS
    out = experts(x, ids, weights)
    exact = dequantized(experts)
    assert dissimilarity(out, expected_of(exact, x, ids, weights)) < MAX_FP8_DISSIMILARITY


@torch.no_grad()
def test_fp8_scales_that_are_powers_of_two(device):
    experts = make_fp8_experts(device)
    inputs = routed(device, 256)
    for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv"):
        rounded = getattr(experts, name).log2().round().exp2()
        setattr(experts, name, torch.nn.Parameter(rounded, requires_grad=False))
    other = copy.deepcopy(experts)
    for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv"):
        bits = (getattr(other, name).log2() + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
        setattr(other, name, torch.nn.Parameter(bits, requires_grad=False))
    assert_same_bits(other(*inputs), experts(*inputs))
    assert other.down_proj_scale_inv.dtype is torch.float32


def test_fp8_formats_without_kernels_are_refused():
    inputs = routed("cpu", 256)
    with pytest.raises(ValueError, match=r"block_size of FP8Experts must be \(128, 128\) or None"):
        make_fp8_experts(block_size=(64, 64))(*inputs)
    with pytest.raises(ValueError, match="activation_scheme of FP8Experts must be 'dynamic'"):
        make_fp8_experts(activation_scheme="static")(*inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["plain", "gpt_oss"])
@torch.no_grad()
def test_a_cuda_graph_sees_new_tokens(form):
    experts, (x, ids, weights) = make_experts("cuda", **FORMS[form]), routed("cuda")
    experts(x, ids, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(x, ids, weights)
    for shift in (1, 2):
        x.copy_(x.roll(1, 0))
        ids.copy_((ids + shift) % EXPERTS)
        graph.replay()
        assert_same_bits(out, experts(x, ids, weights))


@pytest.mark.gpu
@torch.no_grad()
def test_a_capture_before_packing_is_refused():
    experts, inputs = make_experts("cuda", is_transposed=True), routed("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match=r"must be packed before torch\.compile or a CUDA"):
            experts(*inputs)
        inputs[0].clone()  # a graph of nothing warns
    assert experts(*inputs).shape == inputs[0].shape
