"""`moe_ext.nn.MoELayer` against plain modules of Mixtral, Qwen2-MoE, gpt-oss and DeepSeek."""

from __future__ import annotations

import pytest
import torch
from moe_ext.nn import Experts, MoELayer
from support.fused_moe import Sizes, plain_layer, random_layer
from support.nn import options_of, packed, per_expert
from support.tolerance import assert_close_to_reference, assert_same_bits
from torch import nn
from torch.nn import functional

HIDDEN, INNER, EXPERTS = 192, 96, 8


class PlainMLP(nn.Module):
    """gate, up, down; computed in float32, with the intermediate rounded as kernels do."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False, dtype=dtype)

    def forward(self, x):
        gate = functional.linear(x.float(), self.gate_proj.weight.float())
        up = functional.linear(x.float(), self.up_proj.weight.float())
        inner = (functional.silu(gate) * up).bfloat16().float()
        return functional.linear(inner, self.down_proj.weight.float())


def inputs(*leading):
    return torch.randn(*leading, HIDDEN).bfloat16()


def router(dtype=torch.bfloat16):
    return nn.Linear(HIDDEN, EXPERTS, bias=False, dtype=dtype).requires_grad_(False)


def weighted(mlps, x, weights, ids):
    """The loop over tokens that models without kernels have."""
    out = torch.zeros(x.shape)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            out[token] += weight * mlps[expert](x[token]).bfloat16().float()
    return out


@pytest.fixture
def mlps():
    return nn.ModuleList(PlainMLP() for _ in range(EXPERTS)).requires_grad_(False)


def test_mixtral(mlps):
    x, gate = inputs(3, 5), router()
    layer = MoELayer(gate, Experts.from_linears(mlps), top_k=2)
    rows = x.reshape(15, HIDDEN)
    probabilities = functional.softmax(gate(rows), dim=1, dtype=torch.float)
    weights, ids = torch.topk(probabilities, 2, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    out = layer(x)
    assert out.shape == x.shape
    assert_close_to_reference(out.reshape(15, HIDDEN), weighted(mlps, rows, weights, ids))
    assert [tensor.shape for tensor in layer.route(x)] == [(3, 5, 2)] * 2


@pytest.mark.parametrize("gated", [True, False])
def test_qwen2_moe(mlps, gated):
    x, gate, shared = inputs(15), router(), PlainMLP().requires_grad_(False)
    shared_gate = nn.Linear(HIDDEN, 1, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    layer = MoELayer(
        gate,
        Experts.from_linears(mlps),
        top_k=4,
        renormalize=False,
        shared_expert=shared,
        shared_expert_gate=shared_gate if gated else None,
    )
    weights, ids = torch.topk(functional.softmax(gate(x).float(), dim=1), 4, dim=-1)
    expected = weighted(mlps, x, weights, ids)
    factor = functional.sigmoid(shared_gate(x)) if gated else 1
    assert_close_to_reference(layer(x), expected + factor * shared(x))


def test_gpt_oss():
    sizes = Sizes(num_tokens=15, num_experts=EXPERTS, hidden=HIDDEN, intermediate=INNER)
    arguments = random_layer("bf16", "swiglu_oai", sizes) | {
        "gate_up_layout": "interleaved",
        "w13_bias": torch.randn(EXPERTS, 2 * INNER).bfloat16(),
        "w2_bias": torch.randn(EXPERTS, HIDDEN).bfloat16(),
    }
    experts = Experts.from_state_dict(packed(arguments, transposed=True), **options_of(arguments))
    gate = nn.Linear(HIDDEN, EXPERTS, dtype=torch.bfloat16).requires_grad_(False)
    layer = MoELayer(gate, experts, top_k=4, scoring="softmax_topk")
    x = arguments["hidden_states"]
    logits, ids = torch.topk(gate(x).float(), 4, dim=-1)
    routing = {"topk_weights": logits.softmax(-1), "topk_ids": ids}
    assert_close_to_reference(layer(x), plain_layer(arguments | routing))


def test_deepseek_v3():
    sizes = Sizes(num_tokens=15, num_experts=EXPERTS, hidden=HIDDEN, intermediate=INNER)
    arguments = random_layer("segments", "swiglu", sizes)
    experts = Experts.from_state_dict(
        per_expert(arguments, "experts.", scale="weight_scale_inv"), prefix="experts"
    )
    gate, bias = router(torch.float32), torch.rand(EXPERTS)
    shared = PlainMLP().requires_grad_(False)
    layer = MoELayer(
        gate,
        experts,
        top_k=3,
        scoring="sigmoid",
        correction_bias=bias,
        num_groups=4,
        topk_groups=2,
        scale=2.5,
        shared_expert=shared,
    )
    x = arguments["hidden_states"]
    scores = gate(x.float()).sigmoid()
    choice = scores + bias
    groups = choice.reshape(15, 4, 2).topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros(15, 4).scatter_(1, groups.topk(2, dim=-1).indices, 1).bool()
    choice = choice.masked_fill(~kept.repeat_interleave(2, dim=1), float("-inf"))
    ids = choice.topk(3, dim=-1).indices
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5
    full = {name: getattr(experts, name) for name in experts.state_dict()}
    routing = {"topk_weights": weights, "topk_ids": ids, "addend": shared(x)}
    assert_close_to_reference(layer(x), plain_layer(arguments | full | routing))


def test_llama4_weighs_the_input(mlps):
    x, gate, shared = inputs(15), router(), PlainMLP().requires_grad_(False)
    experts = Experts.from_linears(mlps, apply_router_weight_on_input=True)
    layer = MoELayer(
        gate, experts, top_k=1, scoring="sigmoid", renormalize=False, shared_expert=shared
    )
    logits, ids = gate(x).float().max(dim=1)
    rows = (x.float() * logits.sigmoid()[:, None]).bfloat16()
    routed = torch.stack(
        [mlps[i](row).bfloat16().float() for i, row in zip(ids, rows, strict=True)]
    )
    assert_close_to_reference(layer(x), routed + shared(x))


def test_ranks_with_the_shared_expert_on_one_sum_to_the_whole(mlps):
    x, gate, shared = inputs(15), router(), PlainMLP().requires_grad_(False)
    whole = MoELayer(gate, Experts.from_linears(mlps), top_k=4, shared_expert=shared)
    ranks = [
        MoELayer(
            gate,
            Experts.from_linears(mlps, first_expert=first, num_local=4),
            top_k=4,
            shared_expert=shared if first == 0 else None,
        )
        for first in (0, 4)
    ]
    assert_close_to_reference(sum(rank(x).float() for rank in ranks), whole(x).float())


def test_out_and_workspace_are_passed_on(mlps):
    x = inputs(15)
    layer = MoELayer(router(), Experts.from_linears(mlps), top_k=2)
    out = torch.full((15, HIDDEN), float("nan")).bfloat16()
    workspace = torch.empty(layer.experts.workspace_size(15, 2), dtype=torch.uint8)
    assert layer(x, out=out, workspace=workspace) is out
    assert_same_bits(out, layer(x))
    with pytest.raises(ValueError, match="`workspace` must have at least"):
        layer(x, workspace=workspace[:1])
    assert layer(x[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_gives_one_graph(mlps, backend):
    torch._dynamo.reset()
    shared = PlainMLP().requires_grad_(False)
    layer = MoELayer(
        router(),
        Experts.from_linears(mlps, quantize="channel"),
        top_k=2,
        correction_bias=torch.rand(EXPERTS),
        shared_expert=shared,
        shared_expert_gate=nn.Linear(HIDDEN, 1).requires_grad_(False),
    )
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for shape in ((15,), (7,), (3, 5)):
        x = inputs(*shape)
        assert_same_bits(compiled(x).reshape(-1, HIDDEN), layer(x).reshape(-1, HIDDEN))


@torch.no_grad()
@pytest.mark.parametrize("with_workspace", [False, True])
def test_inductor_compiles_a_layer(mlps, with_workspace):
    """Of products and ops, so that there is nothing to fuse and no C++ to compile."""
    torch._dynamo.reset()
    shared = nn.Linear(HIDDEN, HIDDEN, dtype=torch.bfloat16)
    experts = Experts.from_linears(mlps, quantize="channel")
    layer = MoELayer(router().bfloat16(), experts, top_k=2, shared_expert=shared)
    size = experts.workspace_size(15, 2)
    workspace = torch.empty(size, dtype=torch.uint8) if with_workspace else None
    compiled = torch.compile(layer, fullgraph=True)
    x = inputs(15)
    assert_same_bits(compiled(x, workspace=workspace), layer(x))


def test_state_dict_round_trip(mlps):
    def made(experts):
        return MoELayer(
            router(),
            experts,
            top_k=2,
            correction_bias=torch.rand(EXPERTS),
            shared_expert=PlainMLP(),
        )

    layer = made(Experts.from_linears(mlps, quantize="channel"))
    other = made(Experts(EXPERTS, HIDDEN, INNER, dtype=torch.float8_e4m3fn, scales="channel"))
    other.load_state_dict(layer.state_dict())
    x = inputs(15)
    with torch.no_grad():
        assert_same_bits(other.bfloat16()(x), layer.bfloat16()(x))


def test_repr_says_how_experts_are_chosen(mlps):
    layer = MoELayer(
        router(), Experts.from_linears(mlps), top_k=2, scoring="sigmoid", num_groups=2, scale=2.5
    )
    assert layer.extra_repr() == 'top_k=2, scoring="sigmoid", num_groups=2, scale=2.5'


ERRORS = {
    "experts": (
        {"experts": nn.ModuleList()},
        "MoELayer: `experts` must be of Experts, got ModuleList",
    ),
    "columns": (
        {"router": nn.Linear(32, EXPERTS)},
        "MoELayer: `router` must have 192 columns, the hidden size of `experts`, got 32",
    ),
    "rows": (
        {"router": nn.Linear(HIDDEN, 4)},
        "MoELayer: `router` must have at least 8 rows, for the experts 0 to 7 that are here, got 4",
    ),
    "gate": (
        {"shared_expert_gate": nn.Linear(HIDDEN, 1)},
        "MoELayer: `shared_expert_gate` must be None where `shared_expert` is, got Linear",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    changes, message = ERRORS[name]
    arguments = {"router": router(), "experts": Experts(EXPERTS, HIDDEN, INNER)} | changes
    with pytest.raises(ValueError) as error:  # noqa: PT011
        MoELayer(arguments.pop("router"), arguments.pop("experts"), top_k=2, **arguments)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 9}, "top_k"),
        ({"top_k": 2, "scoring": "tanh"}, "scoring"),
        ({"top_k": 2, "num_groups": 3}, "num_groups"),
        ({"top_k": 2, "correction_bias": torch.zeros(7)}, "correction_bias"),
    ],
)
def test_routing_options_are_checked_when_the_layer_is_made(options, words):
    with pytest.raises(ValueError, match=f"^topk_routing: .*`{words}`"):
        MoELayer(router(), Experts(EXPERTS, HIDDEN, INNER), **options)
