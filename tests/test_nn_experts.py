"""`moe_ext.nn.Experts`: the call, its shapes, how tensors are kept, and what is refused."""

from __future__ import annotations

import copy
import io

import moe_ext
import pytest
import torch
from moe_ext.nn import Experts
from support.fused_moe import ACTIVATIONS, Sizes, is_gated, plain_layer, random_layer
from support.nn import experts_of, inputs_of
from support.tolerance import assert_close_to_reference, assert_same_bits

FP8 = torch.float8_e4m3fn
# Layouts that `Experts` makes empty, with an intermediate size that is no multiple of 128.
LAYOUTS = ("bf16", "expert", "channel", "segments")
ODD = Sizes(hidden=192, intermediate=232)  # rows of w2 of 232 bytes


def with_biases(layer, sizes):
    n = (2 if is_gated(layer["activation"]) else 1) * sizes.intermediate
    return layer | {
        "w13_bias": torch.randn(sizes.num_experts, n).bfloat16(),
        "w2_bias": torch.randn(sizes.num_experts, sizes.hidden).bfloat16(),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward(layout, activation):
    if layout == "segments" and not is_gated(activation):
        layout = "block"
    layer = with_biases(random_layer(layout, activation, Sizes()), Sizes())
    out = experts_of(layer)(*inputs_of(layer))
    assert_close_to_reference(out, plain_layer(layer))


def test_options_reach_the_op():
    layer = random_layer("bf16", "swiglu_oai", Sizes()) | {
        "alpha": 1.2,
        "limit": 3.0,
        "gate_up_layout": "interleaved",
        "apply_router_weight_on_input": True,
    }
    more = {"first_expert": 1, "routed_scale": 2.5}
    layer |= {"addend": torch.randn(9, 192)}
    out = experts_of(layer, **more)(*inputs_of(layer), addend=layer["addend"])
    assert_close_to_reference(out, plain_layer(layer | more))


def test_an_expert_map_takes_the_place_of_first_expert():
    layer = random_layer("bf16", "swiglu", Sizes())
    table = torch.tensor([3, -1, 0, 9, 4], dtype=torch.int32)
    out = experts_of(layer, first_expert=2)(*inputs_of(layer), expert_map=table)
    assert_close_to_reference(out, plain_layer(layer | {"expert_map": table}))


@pytest.mark.parametrize("leading", [(), (1,), (12,), (3, 4), (2, 3, 2), (0,), (0, 5)])
def test_leading_dimensions(leading):
    layer = random_layer("bf16", "swiglu", Sizes(num_tokens=max(1, torch.Size(leading).numel())))
    count = torch.Size(leading).numel()
    experts = experts_of(layer)
    flat = [tensor[:count] for tensor in inputs_of(layer)]
    addend = torch.randn(count, 192)
    shaped = [tensor.reshape(*leading, tensor.shape[-1]) for tensor in (*flat, addend)]
    expected = experts(*flat, addend=addend)
    out = experts(*shaped[:3], addend=shaped[3])
    assert out.shape == (*leading, 192)
    assert torch.equal(out.reshape(-1, 192), expected)
    memory = torch.full((*leading, 192), float("nan")).bfloat16()
    assert experts(*shaped[:3], addend=shaped[3], out=memory) is memory
    assert torch.equal(memory, out)


def test_a_workspace_may_be_shared():
    layer = random_layer("bf16", "swiglu", Sizes())
    experts = experts_of(layer)
    workspace = torch.empty(experts.workspace_size(9, 3), dtype=torch.uint8)
    assert_same_bits(experts(*inputs_of(layer), workspace=workspace), experts(*inputs_of(layer)))
    with pytest.raises(ValueError, match=r"^fused_moe: `workspace` must have at least \d+ bytes"):
        experts(*inputs_of(layer), workspace=workspace[:-1])


def test_no_tensor_requires_grad_and_backward_raises():
    layer = random_layer("bf16", "swiglu", Sizes())
    experts = experts_of(with_biases(layer, Sizes()))
    assert not any(p.requires_grad for p in experts.parameters())
    hidden, *routing = inputs_of(layer)
    assert not experts(hidden, *routing).requires_grad
    out = experts(hidden.requires_grad_(), *routing)
    with pytest.raises(RuntimeError, match="inference only"):
        out.sum().backward()


def is_padded(experts):
    return experts.w2.stride() == (192 * 240, 240, 1)


MOVES = {
    "to": lambda experts: experts.to("cpu"),
    "dtype": lambda experts: experts.to(torch.bfloat16),
    "half": lambda experts: experts.half(),
    "in a parent": lambda experts: torch.nn.Sequential(experts).float()[0],
    "deepcopy": copy.deepcopy,
    "saved": lambda experts: torch.load(saved(experts), weights_only=False),
}


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("layout", ["channel", "segments"])
@pytest.mark.parametrize("move", MOVES)
def test_moves_keep_values_dtypes_and_aligned_rows(layout, move):
    layer = random_layer(layout, "swiglu", ODD)
    experts = experts_of(layer)
    assert is_padded(experts)
    before = experts(*inputs_of(layer))
    moved = MOVES[move](experts)
    assert is_padded(moved)
    assert (moved.w13.dtype, moved.w2_scale.dtype) == (FP8, torch.float32)
    assert_same_bits(moved(*inputs_of(layer)), before)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_dict_round_trip(layout, assign):
    layer = random_layer(layout, "swiglu", ODD)
    experts = experts_of(layer)
    tensors = torch.load(saved(experts.state_dict()))
    assert set(tensors) == {"w13", "w2"} | (
        set() if layout == "bf16" else {"w13_scale", "w2_scale"}
    )
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with torch.device("meta" if assign else "cpu"):
        other = experts_like(experts)
    other.load_state_dict(contiguous, assign=assign)
    assert layout == "bf16" or is_padded(other)
    assert not other.w2.requires_grad
    assert_same_bits(other(*inputs_of(layer)), experts(*inputs_of(layer)))


def experts_like(experts):
    scale = experts.w13_scale
    layout = None if scale is None else {1: "tensor", 2: "channel"}.get(scale.dim(), "block")
    sizes = (experts.num_experts, experts.hidden_size, experts.intermediate_size)
    return Experts(*sizes, dtype=experts.w13.dtype, scales=layout)


def test_to_empty_of_meta_tensors_is_aligned():
    experts = Experts(5, 192, 232, dtype=FP8, scales="channel", device="meta").to_empty(
        device="cpu"
    )
    assert experts.w2.device.type == "cpu"
    assert is_padded(experts)


def test_scales_of_other_dtypes_are_loaded_exactly():
    experts = Experts(2, 128, 128, dtype=FP8, scales="block")
    tensors = experts.state_dict()
    exponents = torch.tensor([[[127], [130]], [[120], [126]]], dtype=torch.uint8)
    tensors["w13_scale"] = exponents
    tensors["w2_scale"] = torch.full((2, 1, 1), 0.75).bfloat16()
    for assign in (False, True):
        experts.load_state_dict(tensors, assign=assign)
        assert experts.w13_scale.dtype is experts.w2_scale.dtype is torch.float32
        assert experts.w13_scale.flatten().tolist() == [1.0, 8.0, 2**-7, 0.5]
        assert experts.w2_scale.flatten().tolist() == [0.75, 0.75]


def test_weights_of_another_dtype_are_not_converted_unseen():
    experts = Experts(2, 64, 64, dtype=FP8, scales="tensor")
    tensors = experts.state_dict() | {"w2": torch.ones(2, 64, 64).bfloat16()}
    with pytest.raises(RuntimeError, match=r"Experts: `w2` must be float8_e4m3fn, got bfloat16"):
        experts.load_state_dict(tensors)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("layout", ["bf16", "segments"])
def test_compile_gives_one_graph_with_one_node(layout, backend):
    torch._dynamo.reset()
    graphs, first = [], 0

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    layer = random_layer(layout, "swiglu", Sizes(num_tokens=12))
    experts = experts_of(layer)
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend=count)
    for tokens in (12, 6, 7):
        inputs = [tensor[:tokens].clone() for tensor in inputs_of(layer)]
        assert_same_bits(compiled(*inputs), experts(*inputs))
        # The first may have been started over, for its floats.
        first = len(graphs) if tokens == 12 else first
    assert len(graphs) == first
    targets = [node.target for node in graphs[-1].graph.nodes]
    assert targets.count(torch.ops.moe_ext.fused_moe.default) == 1
    shaped = [tensor.reshape(3, 4, -1) for tensor in inputs_of(layer)]
    out, workspace = torch.zeros(3, 4, 192).bfloat16(), torch.empty(1 << 20, dtype=torch.uint8)
    compiled(*shaped, out=out, workspace=workspace)
    assert_same_bits(out.reshape(12, 192), experts(*inputs_of(layer)))


def test_repr_says_what_differs_from_the_defaults():
    experts = Experts(4, 64, 32, dtype=FP8, scales="channel", bias=True, first_expert=8, limit=7.0)
    assert repr(experts) == (
        "Experts(num_experts=4, hidden_size=64, intermediate_size=32, dtype=float8_e4m3fn, "
        'activation="swiglu", w13_scale=(4, 64), w2_scale=(4, 64), bias=True, limit=7.0, '
        "first_expert=8)"
    )


def test_the_package_has_the_modules():
    assert moe_ext.nn.Experts is Experts


ERRORS = {
    "sizes": ((0, 64, 32), {}, "Experts: `num_experts` must be an int from 1 to 4096, got 0"),
    "float": (
        (4, 64.0, 32),
        {},
        "Experts: `hidden_size` must be a positive int, a multiple of 8, got 64.0",
    ),
    "multiple": (
        (4, 64, 36),
        {},
        "Experts: `intermediate_size` must be a positive int, a multiple of 8, got 36",
    ),
    "dtype": (
        (4, 64, 32),
        {"dtype": torch.float16},
        "Experts: `dtype` must be torch.bfloat16 or torch.float8_e4m3fn, got float16",
    ),
    "activation": (
        (4, 64, 32),
        {"activation": "gelu"},
        'Experts: `activation` must be one of "swiglu", "swiglu_oai", "geglu", "geglu_tanh", '
        '"relu2", "silu", got "gelu"',
    ),
    "scales of bfloat16": (
        (4, 64, 32),
        {"scales": "block"},
        "Experts: `scales` must be given for float8_e4m3fn weights, and for no others, got "
        '"block" for bfloat16',
    ),
    "no scales of FP8": (
        (4, 64, 32),
        {"dtype": FP8},
        "Experts: `scales` must be given for float8_e4m3fn weights, and for no others, got None "
        "for float8_e4m3fn",
    ),
    "scales": (
        (4, 64, 32),
        {"dtype": FP8, "scales": "row"},
        'Experts: `scales` must be None or one of "block", "channel", "tensor", got "row"',
    ),
    "static": (
        (4, 64, 32),
        {"dtype": FP8, "scales": "block", "static_scales": True},
        'Experts: `static_scales` must be False unless `scales` is "tensor", got True with "block"',
    ),
    "accumulate": (
        (4, 64, 32),
        {"accumulate": "fast"},
        'Experts: `accumulate` must be "promoted" (the default) with bfloat16 weights, which '
        'always accumulate in float32, got "fast"',
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_the_constructor(name):
    sizes, options, message = ERRORS[name]
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Experts(*sizes, **options)
    assert str(error.value) == message


def test_errors_of_the_call():
    layer = random_layer("bf16", "swiglu", Sizes())
    experts = experts_of(layer)
    hidden, weights, ids = inputs_of(layer)
    for arguments, options, message in (
        (
            (hidden[:, :-8], weights, ids),
            {},
            "Experts: `hidden_states` must have shape (..., hidden_size) = (*, 192), got (9, 184)",
        ),
        (
            (hidden, weights, ids[:-1]),
            {},
            "Experts: `topk_ids` must have the leading dimensions (9,) of `hidden_states`, got "
            "shape (8, 3)",
        ),
        (
            (hidden[None], weights[None], ids[None]),
            {"addend": hidden},
            "Experts: `addend` must have the leading dimensions (1, 9) of `hidden_states`, got "
            "shape (9, 192)",
        ),
        (
            (hidden[None], weights[None], ids[None]),
            {"out": torch.empty(1, 9, 200).bfloat16()[..., :192]},
            "Experts: `out` must be contiguous where it has 3 dimensions, got strides (1800, 200, "
            "1) for shape (1, 9, 192)",
        ),
        (
            (hidden.float(), weights, ids),
            {},
            "fused_moe: `hidden_states` must be bfloat16, got float32",
        ),
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            experts(*arguments, **options)
        assert str(error.value) == message
