"""`fused_moe_masked` on the GPU against the reference: layouts, activations, counts, hard sizes."""

from __future__ import annotations

import inspect

import moe_ext
import pytest
import torch
from moe_ext import _fused_moe_masked_run
from moe_ext._configs import all_configs
from moe_ext._fused_moe_kernels import choose_kernels
from moe_ext.reference import fused_moe_masked_reference
from support.fused_moe import ACTIVATIONS, GATED, LAYOUTS, integer_layer
from support.fused_moe_masked import (
    MASKED_OPERANDS,
    as_tokens,
    assert_masked_is_right,
    assert_rest_untouched,
    in_buffers,
    masked_layer,
    rows_that_count,
    sizes_of,
)
from support.inputs import in_poison, poisoned
from support.tolerance import assert_same_bits, assert_untouched
from test_fused_moe_masked_errors import ERRORS, OUT_ERRORS, valid_arguments
from test_layer_kernels_gpu import JOINING, rows_kernel

pytestmark = pytest.mark.gpu

layouts = pytest.mark.parametrize("layout", LAYOUTS)
activations = pytest.mark.parametrize("activation", ACTIVATIONS)

COUNTS = (0, 1, 7, 65, 129, 40, 0, 130, 3, 0)
MAX_ROWS = 130
EXPECTED_ROWS = (None, 0, 1, 8, 40, 128, 512, 2**62)
# Experts' counts, rows of a buffer, hidden and intermediate size.
SIZES = {
    "one_row": ((1, 0, 1, 1), 1, 512, 256),
    "max_rows_8": ((8, 0, 3, 8, 1), 8, 2048, 192),
    "max_rows_63": ((63, 62, 0, 1, 31), 63, 384, 192),
    "I_176": ((40, 0, 64), 64, 384, 176),
    "I_96": ((40, 0, 64), 64, 384, 96),
    "I_360": ((40, 0, 64), 64, 384, 360),
    "H_2880_I_1440": ((9, 33), 33, 2880, 1440),
    "H_2880": ((9, 0, 33), 33, 2880, 192),
    "H_2688_I_464": ((9, 0, 33), 33, 2688, 464),
    "I_longer_than_H": ((50, 7), 64, 256, 1024),
    "H_264": ((50, 7), 64, 264, 256),
    "one_expert": ((300,), 512, 256, 128),
    "large_buffers": ((1000, 0, 700, 13), 1024, 512, 256),
    "hardly_used_buffers": ((1, 0, 2, 0), 4096, 512, 256),
    "1025_experts": (tuple(expert % 3 for expert in range(1025)), 2, 128, 64),
}


def sized(layout, name, activation="swiglu"):
    counts, max_rows, hidden, intermediate = SIZES[name]
    return masked_layer(layout, activation, counts, max_rows, hidden, intermediate, "cuda")


def medium(layout, activation="swiglu"):
    return masked_layer(layout, activation, COUNTS, MAX_ROWS, 512, 256, "cuda")


def integers(layout, counts=COUNTS, max_rows=MAX_ROWS, hidden=320, intermediate=192, seed=1):
    sizes = sizes_of(counts, max_rows, hidden, intermediate)
    return in_buffers(integer_layer(layout, sizes, "cuda", seed), counts, max_rows)


def biases(layer):
    num_experts, n, _ = layer["w13"].shape
    hidden = layer["w2"].shape[1]
    return {
        "w13_bias": torch.randn(num_experts, n, device="cuda").bfloat16(),
        "w2_bias": torch.randn(num_experts, hidden, device="cuda"),
    }


def run(layer, **options):
    """Run into an output of NaN between NaN."""
    *outer, hidden = layer["hidden_states"].shape
    out = poisoned((*outer, hidden + 16), torch.bfloat16, "cuda")
    moe_ext.fused_moe_masked_out(**layer, out=out[..., :hidden], **options)
    assert_untouched(out[..., hidden:].flatten(0, 1))
    assert_rest_untouched(out[..., :hidden], layer)
    return out[..., :hidden]


def check(layer, **options):
    out = run(layer, **options)
    assert_masked_is_right(out, layer)
    return out


def assert_exact(layer):
    expected = fused_moe_masked_reference(**layer)
    assert_same_bits(rows_that_count(run(layer), layer), rows_that_count(expected, layer))


@layouts
@activations
def test_activations(layout, activation):
    layer = medium(layout, activation)
    check(layer)
    check(layer | biases(layer))


@layouts
@pytest.mark.parametrize("name", SIZES)
def test_sizes(layout, name):
    check(sized(layout, name))


@layouts
@pytest.mark.parametrize("activation", ["swiglu_oai", "relu2"])
@pytest.mark.parametrize("name", ["I_176", "I_360", "H_2880"])
def test_activations_at_odd_sizes(layout, activation, name):
    layer = sized(layout, name, activation)
    check(layer | biases(layer))


@pytest.mark.parametrize("layout", ["bf16", "tensor", "channel", "block"])
@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("name", ["max_rows_63", "I_176"])
def test_interleaved(layout, activation, name):
    if (layout, activation, name) == ("channel", "geglu", "max_rows_63"):
        torch.manual_seed(2)  # with the usual one two rows have a large feature on a tie of FP8
    layer = sized(layout, name, activation) | {"gate_up_layout": "interleaved"}
    check(layer | biases(layer))


@layouts
@pytest.mark.parametrize(
    ("activation", "options"),
    [("swiglu", {"limit": 1.0}), ("swiglu_oai", {"limit": 0.5, "alpha": 3.0})],
)
def test_alpha_and_limit(layout, activation, options):
    check(medium(layout, activation) | options)


@pytest.mark.parametrize("layout", ["tensor", "expert"])
def test_static_scales(layout):
    layer = medium(layout)
    for shape in ((), (1,)):
        first, second = (torch.full(shape, size, device="cuda") for size in (0.02, 0.03))
        check(layer | {"a1_scale": first, "a2_scale": second})
        check(layer | {"a1_scale": first})
        check(layer | {"a2_scale": second})


@pytest.mark.parametrize("first", LAYOUTS[1:])
@pytest.mark.parametrize("second", LAYOUTS[1:-1])
def test_stages_with_different_layouts(first, second):
    layer, other = medium(first), medium(second)
    check(layer | {"w2": other["w2"], "w2_scale": other["w2_scale"]})


@pytest.mark.parametrize("layout", ["tensor", "channel"])
def test_fast_accumulation_runs(layout):
    layer = medium(layout)
    rows = rows_that_count(run(layer, accumulate="fast"), layer).float()
    expected = rows_that_count(fused_moe_masked_reference(**layer), layer).float()
    assert (rows - expected).norm() < 0.01 * expected.norm()


@layouts
@pytest.mark.parametrize("max_rows", [1, 8, 63, 300])
@pytest.mark.parametrize("intermediate", [96, 176, 192, 360, 256])
def test_integers_are_exact(layout, max_rows, intermediate):
    counts = (0, max_rows, max_rows // 2, 0, 1, max_rows - 1, 0)
    assert_exact(integers(layout, counts, max_rows, intermediate=intermediate))


@layouts
def test_any_counts(layout):
    generator = torch.Generator().manual_seed(3)
    values = torch.tensor([-(2**31), -1, 0, 1, 2, 63, 64, 65, 66, 2**31 - 1])
    for _ in range(5):
        counts = values[torch.randint(0, len(values), (9,), generator=generator)]
        assert_exact(integers(layout, tuple(counts.tolist()), 65))


@layouts
def test_no_row_counts(layout):
    layer = masked_layer(layout, "swiglu", (0, -1, 0), 70, 512, 256, "cuda")
    run(layer)
    torch.cuda.synchronize()


@layouts
def test_buffers_without_rows(layout):
    layer = masked_layer(layout, "swiglu", (0, 3), 0, device="cuda")
    out = moe_ext.fused_moe_masked(**layer)
    assert (out.shape, out.device.type) == ((2, 0, 192), "cuda")
    moe_ext.fused_moe_masked_out(**layer, out=out)
    torch.cuda.synchronize()


@layouts
@pytest.mark.parametrize("name", ["max_rows_63", "I_176", "H_2880"])
def test_weights_in_poison(layout, name):
    layer = sized(layout, name)
    expected = run(layer)
    strided = layer | {weight: in_poison(layer[weight]) for weight in ("w13", "w2")}
    assert_same_bits(run(strided).flatten(0, 1), expected.flatten(0, 1))


@layouts
@pytest.mark.parametrize("name", ["max_rows_63", "I_360", "large_buffers", "one_row"])
def test_bits_are_those_of_the_layer(layout, name):
    """Rows as tokens of `fused_moe`: other tiles, other kernels, the same bits."""
    layer = sized(layout, name)
    rows = rows_that_count(run(layer, batch_invariant=True), layer)
    assert_same_bits(rows, moe_ext.fused_moe(**as_tokens(layer), batch_invariant=True))


@layouts
def test_batch_invariant(layout):
    """The same rows in buffers of another size."""
    counts = (3, 0, 40, 64)
    layer = masked_layer(layout, "swiglu", counts, 64, 512, 256, "cuda")
    rows = rows_that_count(run(layer, batch_invariant=True), layer)
    larger = torch.full((4, 1000, 512), float("nan"), device="cuda").bfloat16()
    larger[:, :64] = layer["hidden_states"]
    layer["hidden_states"] = larger
    assert_same_bits(rows_that_count(run(layer, batch_invariant=True), layer), rows)


@layouts
def test_expected_rows_change_no_result(layout):
    """Kernels for few rows on full buffers too: the number says nothing of what is there."""
    for name in ("large_buffers", "hardly_used_buffers", "H_2880_I_1440"):
        layer = sized(layout, name)
        layer |= biases(layer)
        expected = rows_that_count(run(layer, batch_invariant=True), layer)
        for expected_rows in EXPECTED_ROWS:
            check(layer, expected_rows=expected_rows)
            out = run(layer, batch_invariant=True, expected_rows=expected_rows)
            assert_same_bits(rows_that_count(out, layer), expected)


@layouts
def test_integers_are_exact_whatever_is_expected(layout):
    layer = integers(layout)
    expected = rows_that_count(fused_moe_masked_reference(**layer), layer)
    for expected_rows in EXPECTED_ROWS:
        out = run(layer, expected_rows=expected_rows)
        assert_same_bits(rows_that_count(out, layer), expected)


@layouts
def test_a_row_does_not_depend_on_others(layout):
    """One count less and a huge neighbour, with the kernels of the same sizes."""
    layer = medium(layout)
    before = run(layer)
    layer["hidden_states"][4, 5] *= 1e20
    layer["counts"].sub_(1)
    after = run(layer)
    for expert, count in enumerate(layer["counts"].tolist()):
        kept = [row for row in range(max(count, 0)) if (expert, row) != (4, 5)]
        assert_same_bits(after[expert, kept], before[expert, kept])


@layouts
def test_the_same_bits_every_time(layout):
    layer = sized(layout, "large_buffers")
    first = run(layer)
    for _ in range(10):
        assert_same_bits(run(layer).flatten(0, 1), first.flatten(0, 1))


@pytest.mark.parametrize("config", JOINING)
def test_every_gated_kernel(config, monkeypatch):
    """The kernels of the first GEMM, and for the second one that goes with them."""
    gate_up = next(c for c in all_configs() if c.id == config)
    layout = {"fp32": "bf16", "promoted": "channel", "block": "block"}[gate_up.accumulate]
    layer = medium(layout)
    expected = run(layer, batch_invariant=True)
    indices = {"gate_up": gate_up.index, "down": rows_kernel(gate_up).index}
    monkeypatch.setattr(
        _fused_moe_masked_run,
        "choose_kernels",
        lambda *key: choose_kernels(*key)._replace(**indices),
    )
    assert_same_bits(run(layer).flatten(0, 1), expected.flatten(0, 1))


OF_PYTHON = ("alpha", "limit", "expected_rows")  # the op has numbers and kernels made of them


def arguments_of_the_op(layer):
    """Arguments of `fused_moe_masked_configured` up to the scratch, by the Python that calls it."""
    names = [
        name
        for name, parameter in inspect.signature(moe_ext.fused_moe_masked).parameters.items()
        if name in MASKED_OPERANDS or parameter.default is None
    ]
    return [layer.get(name) for name in names if name not in OF_PYTHON]


@pytest.mark.parametrize("name", [*ERRORS, *OUT_ERRORS])
def test_cpp_refuses_what_is_unsafe(name):
    """What Python refuses by tensors alone, the op itself refuses with kernels that would fit."""
    changes = {argument: make("cuda") for argument, make in (ERRORS | OUT_ERRORS)[name][0].items()}
    if changes.keys() & {"activation", "gate_up_layout", "accumulate", *OF_PYTHON}:
        pytest.skip("of options: Python's to refuse")
    layer = valid_arguments("cuda") | changes
    fp8 = layer["w13"].dtype is torch.float8_e4m3fn
    out = layer.pop("out", None)
    out = torch.empty_like(layer["hidden_states"]) if out is None else out
    intermediate = torch.empty(2**14, dtype=torch.bfloat16, device="cuda")
    quantised = torch.empty(2**14, device="cuda").to(torch.float8_e4m3fn) if fp8 else None
    scale = torch.empty(2**10, device="cuda") if fp8 else None
    scratch = intermediate, quantised, scale
    op = moe_ext._library.device_kernels(0).fused_moe_masked_configured
    for accumulate in ("promoted", "block") if fp8 else ("fp32",):
        indices = [
            next(
                config.index
                for config in all_configs()
                if config.accumulate == accumulate
                and config.output in outputs
                and config.swapped
                and config.dtype == ("fp8" if fp8 else "bf16")
            )
            for outputs in (("gated", "either"), ("rows",))
        ]
        with pytest.raises(ValueError, match="must"):
            op(*arguments_of_the_op(layer), *scratch, out, 0, *indices, [1.0] * 6)


def test_cpp_refuses_scratch_that_is_too_small():
    layer = masked_layer("block", "swiglu", (3, 9), 9, device="cuda")
    out = torch.empty_like(layer["hidden_states"], memory_format=torch.contiguous_format)
    gate_up, down = (
        next(c.index for c in all_configs() if c.id == name)
        for name in ("layer_fp8b_w64_t16", "swap_fp8b_w64_t16")
    )
    sizes = {"intermediate": 18 * 96, "quantised": 18 * 192, "scale": 18 * 2}
    dtypes = torch.bfloat16, torch.float8_e4m3fn, torch.float32
    op = moe_ext._library.device_kernels(0).fused_moe_masked_configured
    for short in (*sizes, None):
        scratch = [
            torch.empty(size - (name == short), dtype=dtype, device="cuda")
            for (name, size), dtype in zip(sizes.items(), dtypes, strict=True)
        ]
        rest = (out, 0, gate_up, down, [1.0, 0.0, 0.0, float("inf"), float("inf"), 0.0])
        if short is None:
            op(*arguments_of_the_op(layer), *scratch, *rest)
            assert_masked_is_right(out, layer)
        else:
            with pytest.raises(ValueError, match=f"`{short}` must have at least {sizes[short]}"):
                op(*arguments_of_the_op(layer), *scratch, *rest)
