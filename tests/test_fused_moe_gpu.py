"""`fused_moe` on the GPU against the reference: layouts, activations, options, hard sizes."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from moe_ext.reference import fused_moe_reference
from support.fused_moe import (
    ACTIVATIONS,
    GATED,
    LAYOUTS,
    Sizes,
    assert_layer_is_right,
    integer_layer,
    is_gated,
    random_layer,
)
from support.inputs import in_poison, poisoned
from support.tolerance import assert_same_bits, assert_untouched

pytestmark = pytest.mark.gpu

layouts = pytest.mark.parametrize("layout", LAYOUTS)
activations = pytest.mark.parametrize("activation", ACTIVATIONS)

MEDIUM = Sizes(num_tokens=37, num_experts=12, top_k=4, hidden=512, intermediate=256)
# Tensor-parallel shards, gpt-oss' and Nemotron's sizes, and what no tile divides.
SIZES = {
    "one_token": Sizes(1, 12, 8, 512, 256),
    "two_tokens": Sizes(2, 12, 8, 2048, 192),
    "I_192": Sizes(65, 8, 4, 384, 192),
    "I_176": Sizes(65, 8, 4, 384, 176),
    "I_96": Sizes(65, 8, 4, 384, 96),
    "I_360": Sizes(65, 8, 4, 384, 360),
    "I_1440_H_2880": Sizes(33, 4, 4, 2880, 1440),
    "H_2880": Sizes(33, 8, 4, 2880, 192),
    "H_64_I_64": Sizes(130, 8, 2, 64, 64),
    "H_2688_I_464": Sizes(20, 8, 6, 2688, 464),
    "I_longer_than_2_H": Sizes(50, 4, 2, 256, 1024),
    "top_1": Sizes(129, 8, 1, 256, 128),
    "top_22": Sizes(17, 32, 22, 256, 128),
    "top_32": Sizes(17, 64, 32, 256, 128),
    "1025_experts": Sizes(9, 1025, 8, 128, 64),
    "one_expert": Sizes(300, 1, 1, 256, 128),
    "many_tokens": Sizes(1500, 16, 4, 512, 256),
}


def check(layer, **options):
    out = moe_ext.fused_moe(**layer, **options)
    assert_layer_is_right(out, layer)
    return out


def workspace_size(sizes):
    return moe_ext.fused_moe_workspace_size(
        num_tokens=sizes.num_tokens,
        top_k=sizes.top_k,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_experts=sizes.num_experts,
    )


def biases(sizes, activation="swiglu"):
    n = (2 if is_gated(activation) else 1) * sizes.intermediate
    return {
        "w13_bias": torch.randn(sizes.num_experts, n, device="cuda").bfloat16(),
        "w2_bias": torch.randn(sizes.num_experts, sizes.hidden, device="cuda"),
    }


@layouts
@activations
def test_activations(layout, activation):
    check(random_layer(layout, activation, MEDIUM, "cuda"))


@layouts
@pytest.mark.parametrize("name", SIZES)
def test_sizes(layout, name):
    check(random_layer(layout, "swiglu", SIZES[name], "cuda"))


@layouts
@pytest.mark.parametrize("activation", ["swiglu_oai", "relu2"])
@pytest.mark.parametrize("name", ["I_176", "I_360", "H_2880"])
def test_activations_at_odd_sizes(layout, activation, name):
    check(random_layer(layout, activation, SIZES[name], "cuda") | biases(SIZES[name], activation))


@pytest.mark.parametrize("layout", ["bf16", "tensor", "channel", "block"])
@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("sizes", [MEDIUM, SIZES["I_176"]], ids=["medium", "I_176"])
def test_interleaved(layout, activation, sizes):
    layer = random_layer(layout, activation, sizes, "cuda") | {"gate_up_layout": "interleaved"}
    check(layer | biases(sizes, activation))


@layouts
@activations
def test_biases(layout, activation):
    check(random_layer(layout, activation, MEDIUM, "cuda") | biases(MEDIUM, activation))


@layouts
@pytest.mark.parametrize(
    ("activation", "options"),
    [
        ("swiglu", {"limit": 1.0}),
        ("swiglu", {"limit": 10.0}),
        ("swiglu_oai", {"limit": 0.5, "alpha": 3.0}),
    ],
)
def test_alpha_and_limit(layout, activation, options):
    check(random_layer(layout, activation, MEDIUM, "cuda") | options)


@layouts
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("on_input", [False, True])
def test_router_weights(layout, weights_dtype, ids_dtype, on_input):
    layer = random_layer(layout, "swiglu", MEDIUM, "cuda")
    layer["topk_weights"] = layer["topk_weights"].to(weights_dtype)
    layer["topk_ids"] = layer["topk_ids"].to(ids_dtype)
    check(layer | {"apply_router_weight_on_input": on_input})


@layouts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_addend_and_scale(layout, dtype):
    layer = random_layer(layout, "swiglu", MEDIUM, "cuda")
    addend = torch.randn(MEDIUM.num_tokens, MEDIUM.hidden, device="cuda").to(dtype)
    check(layer | {"addend": in_poison(addend), "routed_scale": 2.5})


@layouts
def test_first_expert(layout):
    layer = random_layer(layout, "swiglu", MEDIUM, "cuda")
    for first in (0, 5, 11, 12, 2**31 - 1):
        check(layer | {"first_expert": first})


@layouts
def test_expert_map(layout):
    layer = random_layer(layout, "swiglu", MEDIUM, "cuda")
    for table in ([3, -1, 0, 12, 11, -(2**31), 2**31 - 1, 5, 5], [-1], list(range(11, -1, -1))):
        check(layer | {"expert_map": torch.tensor(table, dtype=torch.int32, device="cuda")})


@pytest.mark.parametrize("layout", ["tensor", "expert"])
def test_static_scales(layout):
    layer = random_layer(layout, "swiglu", MEDIUM, "cuda")
    for shape in ((), (1,)):
        first, second = (torch.full(shape, size, device="cuda") for size in (0.02, 0.03))
        check(layer | {"a1_scale": first, "a2_scale": second})
        check(layer | {"a1_scale": first})
        check(layer | {"a2_scale": second})


@pytest.mark.parametrize("first", LAYOUTS[1:])
@pytest.mark.parametrize("second", LAYOUTS[1:-1])
def test_stages_with_different_layouts(first, second):
    layer, other = (random_layer(name, "swiglu", MEDIUM, "cuda") for name in (first, second))
    check(layer | {"w2": other["w2"], "w2_scale": other["w2_scale"]})


@pytest.mark.parametrize("layout", ["tensor", "channel"])
def test_fast_accumulation_runs(layout):
    layer = random_layer(layout, "swiglu", MEDIUM, "cuda")
    out = moe_ext.fused_moe(**layer, accumulate="fast")
    expected = fused_moe_reference(**layer, out_dtype=torch.float32)
    assert (out - expected).norm() < 0.01 * expected.norm()


@layouts
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("intermediate", [96, 176, 192, 360, 256])
def test_integers_are_exact(layout, num_tokens, intermediate):
    sizes = Sizes(num_tokens, 7, 3, 320, intermediate)
    layer = integer_layer(layout, sizes, "cuda")
    assert_same_bits(moe_ext.fused_moe(**layer), fused_moe_reference(**layer))


@layouts
def test_only_what_belongs_to_the_layer_counts(layout):
    """Operands in the middle of NaN, a workspace and an output full of it."""
    for sizes in (MEDIUM, SIZES["I_176"], SIZES["I_longer_than_2_H"]):
        layer = random_layer(layout, "swiglu", sizes, "cuda")
        layer["topk_ids"][::3, 1:] = -1
        layer["topk_ids"][4] = sizes.num_experts
        clean = {
            name: value.clone() if torch.is_tensor(value) else value
            for name, value in layer.items()
        }
        layer["hidden_states"][4], layer["topk_weights"][4] = float("nan"), float("nan")
        layer |= {name: in_poison(layer[name]) for name in ("hidden_states", "w13", "w2")}
        size = workspace_size(sizes)
        workspace = torch.full((size + 4096,), 0xFF, dtype=torch.uint8, device="cuda")
        out = poisoned((sizes.num_tokens, sizes.hidden + 16), torch.bfloat16, "cuda")
        view = out[:, : sizes.hidden]
        moe_ext.fused_moe_out(**layer, out=view, workspace=workspace[:size])
        assert_layer_is_right(view, clean)
        assert_untouched(out[:, sizes.hidden :])
        assert bool((workspace[size:] == 0xFF).all())
        assert view[4].eq(0).all()


@layouts
@pytest.mark.parametrize("value", [1e30, float("inf"), float("nan")])
def test_a_token_has_no_part_in_the_scales_of_others(layout, value):
    for sizes in (MEDIUM, SIZES["I_longer_than_2_H"], SIZES["many_tokens"]):
        layer = random_layer(layout, "swiglu", sizes, "cuda")
        expected = moe_ext.fused_moe(**layer)
        layer["hidden_states"][4] = value
        others = torch.arange(sizes.num_tokens, device="cuda") != 4
        assert_same_bits(moe_ext.fused_moe(**layer)[others], expected[others])


@layouts
def test_zero_tokens(layout):
    out = moe_ext.fused_moe(**random_layer(layout, "swiglu", Sizes(num_tokens=0), "cuda"))
    assert (out.shape, out.device.type) == ((0, 192), "cuda")
    torch.cuda.synchronize()


@layouts
def test_all_tokens_to_one_expert(layout):
    layer = random_layer(layout, "swiglu", SIZES["many_tokens"], "cuda")
    layer["topk_ids"].fill_(-1)
    layer["topk_ids"][:, 2] = 13
    check(layer)


@layouts
def test_no_expert_here_gives_the_addend(layout):
    layer = random_layer(layout, "swiglu", MEDIUM, "cuda")
    layer["topk_ids"] += 100
    assert moe_ext.fused_moe(**layer).eq(0).all()
    addend = torch.randn(MEDIUM.num_tokens, MEDIUM.hidden, device="cuda").bfloat16()
    assert_same_bits(moe_ext.fused_moe(**layer, addend=addend), addend)


@pytest.mark.parametrize("layout", ["bf16", "tensor", "block"])
def test_any_ids(layout):
    """Sentinels, garbage, and the same id several times in a row."""
    layer = integer_layer(layout, Sizes(64, 7, 4, 256, 128), "cuda")
    values = torch.tensor([-(2**63), -(2**31), -1, 0, 3, 3, 6, 7, 2**31, 2**32 + 3, 2**63 - 1])
    for _ in range(5):
        ids = values[torch.randint(0, len(values), (64, 4))]
        layer["topk_ids"] = ids.cuda()
        assert_same_bits(moe_ext.fused_moe(**layer), fused_moe_reference(**layer))
    layer["topk_ids"] = torch.full((64, 4), 3, dtype=torch.int32, device="cuda")
    assert_same_bits(moe_ext.fused_moe(**layer), fused_moe_reference(**layer))


@pytest.mark.parametrize("layout", ["bf16", "block"])
def test_more_than_65535_slots(layout):
    layer = integer_layer(layout, Sizes(70_000, 256, 1, 64, 64), "cuda")
    assert_same_bits(moe_ext.fused_moe(**layer), fused_moe_reference(**layer))


@pytest.mark.slow
def test_weights_of_more_than_2_31_values():
    """The last of 512 experts of 4096 x 2048: 64-bit offsets."""
    experts, hidden, inner = 512, 2048, 2048
    w13 = torch.empty(experts, 2 * inner, hidden, dtype=torch.bfloat16, device="cuda")
    w2 = torch.empty(experts, hidden, inner, dtype=torch.bfloat16, device="cuda")
    for expert in range(experts):
        w13[expert].normal_(std=hidden**-0.5)
        w2[expert].normal_(std=inner**-0.5)
    layer = {
        "hidden_states": torch.randn(3, hidden, device="cuda").bfloat16(),
        "w13": w13,
        "w2": w2,
        "topk_weights": torch.rand(3, 2, device="cuda"),
        "topk_ids": torch.tensor([[511, 0], [510, 511], [255, 256]], device="cuda"),
    }
    check(layer)


@layouts
def test_batch_invariant(layout):
    """A token alone gives the bits that it gives among others."""
    sizes = Sizes(300, 12, 4, 512, 256)
    layer = random_layer(layout, "swiglu", sizes, "cuda")
    whole = check(layer, batch_invariant=True)
    for part in (slice(0, 1), slice(7, 9), slice(100, 164), slice(0, 257)):
        own = layer | {
            name: layer[name][part] for name in ("hidden_states", "topk_weights", "topk_ids")
        }
        assert_same_bits(moe_ext.fused_moe(**own, batch_invariant=True), whole[part])


def test_batch_invariant_and_fast():
    """Which kernels the second GEMM has "fast" ones of depends on the number of rows."""
    options = {"batch_invariant": True, "accumulate": "fast"}
    layer = random_layer("channel", "swiglu", Sizes(640, 10, 4, 512, 256), "cuda")
    whole = moe_ext.fused_moe(**layer, **options)
    for tokens in (1, 20, 160):
        own = layer | {
            name: layer[name][:tokens] for name in ("hidden_states", "topk_weights", "topk_ids")
        }
        assert_same_bits(moe_ext.fused_moe(**own, **options), whole[:tokens])


@layouts
def test_the_same_bits_every_time(layout):
    layer = random_layer(layout, "swiglu", SIZES["many_tokens"], "cuda")
    first = moe_ext.fused_moe(**layer)
    for _ in range(10):
        assert_same_bits(moe_ext.fused_moe(**layer), first)
