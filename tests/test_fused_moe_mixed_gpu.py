"""`fused_moe_mixed` on a GPU: bit for bit the reference where every step is exact, close elsewhere.

What `test_expert_bank_gpu.py` says of banks; here of all that the chain of kernels tells apart.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from moe_ext._configs import all_configs
from moe_ext.precision import ExpertBank, LayerPlan, fused_moe_mixed_reference
from moe_ext.precision._mixed_kernels import NONE, choose_mixed_kernels
from moe_ext.precision._mixed_layer import layer_of as operands_of
from moe_ext.precision._mixed_run import launch_mixed
from moe_ext.precision._mixed_stages import by_stages
from support.bank import PAIRS, PLANS, integer_bank, layer_of, plan_of_pairs, with_scales
from support.fused_moe import MAX_DISSIMILARITY_BY_TIES, Sizes
from support.tolerance import assert_same_bits, dissimilarity

pytestmark = pytest.mark.gpu

LAYOUTS = ("expert", "channel", "segments")
SIZES = Sizes(num_tokens=33, num_experts=8, top_k=4, hidden=256, intermediate=192)
MIXTURES = {
    f"{'+'.join(f'{a}/{b}' for a, b in pairs)}": pairs
    for count in (1, 2, 3, 4)
    for pairs in itertools.combinations(PAIRS, count)
    if pairs not in ((("fp8", "fp8"),), (("bf16", "bf16"),))
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
mixtures = pytest.mark.parametrize("name", MIXTURES)


def poisoned(bank, num_tokens, top_k, shift=0):
    """A workspace of NaN and what lies around it."""
    size = bank.workspace_size(num_tokens, top_k)
    memory = torch.full((size + 512,), 0xFF, dtype=torch.uint8, device="cuda")
    return memory, memory[shift : shift + size]


def assert_exact(bank, inputs, **options):
    hidden, weights, ids = inputs
    expected = fused_moe_mixed_reference(hidden, bank, weights, ids, **options)
    memory, workspace = poisoned(bank, *ids.shape, shift=8)
    out = torch.full_like(hidden, float("nan"))
    assert bank(*inputs, out=out, workspace=workspace, **options) is out
    assert_same_bits(out, expected)
    assert bool((memory[:8] == 0xFF).all())
    assert bool((memory[8 + workspace.numel() :] == 0xFF).all())
    assert_same_bits(bank(*inputs, **options), expected)
    by_ops = by_stages(hidden, operands_of(bank), weights, ids, **options)
    assert_same_bits(by_ops, expected)


@mixtures
@layouts
def test_every_mixture(layout, name):
    bank, inputs = integer_bank(layout, plan_of_pairs(8, MIXTURES[name]), SIZES, "cuda")
    assert_exact(bank, inputs)


@pytest.mark.parametrize(
    "num_tokens", [1, 2, 7, 8, 9, 16, 17, 63, 64, 65, 127, 128, 129, 300, 1000]
)
@layouts
def test_numbers_of_tokens(layout, num_tokens):
    sizes = Sizes(num_tokens, SIZES.num_experts, SIZES.top_k, SIZES.hidden, SIZES.intermediate)
    bank, inputs = integer_bank(layout, plan_of_pairs(8, PAIRS), sizes, "cuda", seed=num_tokens)
    assert_exact(bank, inputs)


# Of kernels that gather rows themselves and of those that do not: long rows, few and many tokens,
# rows that are no multiple of 16 bytes in FP8, features of the smallest size.
SHAPES = {
    "long rows": Sizes(513, 8, 4, 512, 1152),
    "long rows of few tokens": Sizes(5, 8, 4, 512, 1152),
    "odd rows": Sizes(70, 6, 3, 264, 136),
    "few features": Sizes(70, 6, 3, 136, 8),
    "short rows": Sizes(70, 6, 3, 8, 24),
    "many experts": Sizes(70, 200, 8, 128, 128),
    "one choice": Sizes(200, 8, 1, 256, 128),
    "a sort of three launches": Sizes(9000, 8, 8, 128, 64),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["all", "first and third", "last"])
@layouts
def test_shapes(layout, name, shape):
    sizes = SHAPES[shape]
    if sizes.hidden < 128 or sizes.intermediate < 16:
        layout = {"segments": "channel"}.get(layout, layout)
    pairs = {"all": PAIRS, "first and third": (PAIRS[0], PAIRS[3]), "last": PAIRS[2:3]}[name]
    bank, inputs = integer_bank(layout, plan_of_pairs(sizes.num_experts, pairs), sizes, "cuda")
    assert_exact(bank, inputs)


ROUTINGS = {
    "one BF16 expert": lambda ids: torch.full_like(ids, 3),
    "one FP8 expert": lambda ids: torch.zeros_like(ids),
    "one of gate_up alone": lambda ids: torch.full_like(ids, 1),
    "one of down alone": lambda ids: torch.full_like(ids, 2),
    "two of them": lambda ids: ids % 2 * 3,
    "none here": lambda ids: torch.full_like(ids, -1),
    "many elsewhere": lambda ids: torch.where(ids % 3 == 0, ids, ids + 2**20),
    "few of all": lambda ids: torch.where(ids % 7 == 0, ids, -5),
}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_tokens", [1, 33, 400])
@layouts
def test_any_routing(layout, num_tokens, routing):
    sizes = Sizes(num_tokens, SIZES.num_experts, SIZES.top_k, SIZES.hidden, SIZES.intermediate)
    bank, (hidden, weights, ids) = integer_bank(layout, plan_of_pairs(8, PAIRS), sizes, "cuda")
    assert_exact(bank, (hidden, weights, ROUTINGS[routing](ids).contiguous()))


@pytest.mark.parametrize("name", ["fp8/fp8+bf16/bf16", "fp8/fp8+fp8/bf16+bf16/fp8+bf16/bf16"])
@layouts
def test_options(layout, name):
    plan = plan_of_pairs(8, MIXTURES[name])
    bank, (hidden, weights, ids) = integer_bank(layout, plan, SIZES, "cuda")
    table = torch.tensor([2, -1, 5, 0, 9, 4, 1, 3, 7, 6], dtype=torch.int32, device="cuda")
    assert_exact(bank, (hidden, weights, (ids * 5 + 1) % 11), expert_map=table)
    addend = torch.randint(-8, 8, hidden.shape, device="cuda").float()
    assert_exact(bank, (hidden, weights.bfloat16(), ids.int()), addend=addend)
    later, inputs = integer_bank(layout, plan, SIZES, "cuda", first_expert=40)
    assert_exact(later, (inputs[0], inputs[1], inputs[2] + 38))


# Their GEMM then comes second, in room that the one in FP8 leaves where tokens are few.
FEW = {
    "one expert": LayerPlan(24).with_bf16(experts=5),
    "down alone": LayerPlan(24).with_bf16(experts=(5, 6), stages="down"),
    "by stage": LayerPlan(24)
    .with_bf16(experts=(5, 11), stages="gate_up")
    .with_bf16(experts=(11, 17), stages="down"),
}
FEW_ROUTINGS = {
    "as drawn": torch.clone,
    "BF16 alone": lambda ids: torch.full_like(ids, 5),
    "FP8 alone": lambda ids: torch.where((ids == 5) | (ids == 11) | (ids == 17), 0, ids),
    "none here": lambda ids: torch.full_like(ids, -1),
}


@pytest.mark.parametrize("routing", FEW_ROUTINGS)
@pytest.mark.parametrize("num_tokens", [1, 5, 33, 400])
@pytest.mark.parametrize("name", FEW)
@layouts
def test_few_experts_in_bf16(layout, name, num_tokens, routing):
    sizes = Sizes(num_tokens, 24, 4, SIZES.hidden, SIZES.intermediate)
    bank, (hidden, weights, ids) = integer_bank(layout, FEW[name], sizes, "cuda")
    assert_exact(bank, (hidden, weights, FEW_ROUTINGS[routing](ids).contiguous()))


@pytest.mark.parametrize("name", ["few", "more"])
@pytest.mark.parametrize("num_tokens", [4, 16])
@layouts
def test_room_is_left(layout, num_tokens, name):
    """With more tiles than there are CTAs, of which the GEMMs in FP8 leave some."""
    sizes = Sizes(num_tokens, 128, 8, 512, 768)
    experts = {"few": (3, 77, 127), "more": tuple(range(0, 120, 4))}[name]
    bank, inputs = integer_bank(layout, LayerPlan(128).with_bf16(experts=experts), sizes, "cuda")
    assert_exact(bank, inputs)


@layouts
@pytest.mark.parametrize("num_tokens", [3, 150])
def test_weights_on_input(layout, num_tokens):
    sizes = Sizes(num_tokens, 8, 4, 256, 192)
    plan = plan_of_pairs(8, PAIRS)
    bank, (hidden, weights, ids) = integer_bank(
        layout, plan, sizes, "cuda", apply_router_weight_on_input=True
    )
    assert_exact(bank, (hidden, torch.ones_like(weights), ids))


@pytest.mark.parametrize("num_tokens", [130, 400])  # quantised apart, and in place
def test_static_scales(num_tokens):
    experts, inputs, _ = layer_of("tensor", Sizes(num_tokens, 6, 3, 384, 256))
    for name in ("all four", "by expert"):
        plan = with_scales(PLANS[name], "tensor")
        bank = ExpertBank.from_experts(plan, bf16=experts)
        for kind, scale in (("a1_scale", 0.02), ("a2_scale", 0.01)):
            bank.register_buffer(kind, torch.tensor(scale))
        bank = bank.to("cuda")
        hidden, weights, ids = (tensor.to("cuda") for tensor in inputs)
        expected = fused_moe_mixed_reference(hidden, bank, weights, ids, out_dtype=torch.float32)
        assert dissimilarity(bank(hidden, weights, ids), expected) < MAX_DISSIMILARITY_BY_TIES


def test_an_intermediate_too_long_for_its_own_place_is_refused():
    experts, inputs, _ = layer_of("channel", Sizes(3, 2, 1, 64, 32776))
    inputs = tuple(tensor.to("cuda") for tensor in inputs)
    plan = with_scales(plan_of_pairs(2, (PAIRS[0], PAIRS[3])), "channel")
    bank = ExpertBank.from_experts(plan, bf16=experts).to("cuda")
    message = "the intermediate size must be at most 32768 where `w2_fp8` is given, got 32776"
    with pytest.raises(ValueError, match=f"^fused_moe_mixed: {message}$"):
        bank(*inputs)
    plan = with_scales(plan_of_pairs(2, (PAIRS[1], PAIRS[3])), "channel")
    bank = ExpertBank.from_experts(plan, bf16=experts).to("cuda")
    expected = fused_moe_mixed_reference(inputs[0], bank, *inputs[1:], out_dtype=torch.float32)
    assert dissimilarity(bank(*inputs), expected) < MAX_DISSIMILARITY_BY_TIES


def forced(bank, inputs, chosen):
    _, workspace = poisoned(bank, *inputs[2].shape)
    out = torch.full_like(inputs[0], float("nan"))
    layer = operands_of(bank)
    launch_mixed(layer, inputs, None, None, workspace, out, checked=True, chosen=tuple(chosen))
    return out


KINDS = {"expert": "promoted", "channel": "promoted", "segments": "block"}
ROLES = ("gate_up fp8", "gate_up bf16", "down fp8", "down bf16")


@pytest.mark.parametrize("config", [config.id for config in all_configs()])
@pytest.mark.parametrize("name", ["fp8/fp8+bf16/bf16", "fp8/fp8+fp8/bf16+bf16/fp8+bf16/bf16"])
@layouts
def test_every_kernel(layout, name, config):
    """In each place that it can take, over a range that begins at row 0 or not, beside another."""
    kernel = next(own for own in all_configs() if own.id == config)
    kind = KINDS[layout] if kernel.dtype == "fp8" else "fp32"
    if kernel.accumulate != kind:
        pytest.skip("a kernel of another kind")
    sizes = Sizes(201, 8, 4, 512, 256)
    plan = plan_of_pairs(8, MIXTURES[name])
    # Kernels of plain order with scales per block have no registers for a bias.
    takes_bias = kind != "block" or kernel.output == "rows" or kernel.swapped
    if takes_bias:
        bank, inputs = integer_bank(layout, plan, sizes, "cuda")
    else:
        experts, inputs, _ = layer_of("plain", sizes)
        bank = ExpertBank.from_experts(plan, bf16=experts).to("cuda")
        inputs = tuple(tensor.to("cuda") for tensor in inputs)
    layer = operands_of(bank)
    expected = fused_moe_mixed_reference(
        inputs[0], bank, *inputs[1:], out_dtype=torch.bfloat16 if takes_bias else torch.float32
    )
    default = choose_mixed_kernels(layer, inputs[2].numel(), 132)
    assert NONE not in default
    for index, role in enumerate(ROLES):
        stage, dtype = role.split()
        outputs = ("gated", "either") if stage == "gate_up" else ("rows", "either")
        if kernel.dtype == dtype and kernel.output in outputs:
            chosen = list(default)
            chosen[index] = kernel.index
            out = forced(bank, inputs, chosen)
            if takes_bias:
                assert_same_bits(out, expected)
            else:
                assert dissimilarity(out, expected) < MAX_DISSIMILARITY_BY_TIES
