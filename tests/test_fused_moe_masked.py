"""What `fused_moe_masked` promises, on the CPU: against a plain loop over experts, and to torch."""

from __future__ import annotations

import moe_ext
import pytest
import torch
from moe_ext import _fused_moe_masked_run
from moe_ext._activations import ACTIVATIONS as FORMS
from moe_ext._activations import gating
from moe_ext._fused_moe_kernels import choose_kernels
from moe_ext._fused_moe_masked_checks import check_fused_moe_masked
from moe_ext._fused_moe_masked_reference import fused_moe_masked_reference
from support.fused_moe import (
    ACTIVATIONS,
    GATED,
    LAYOUTS,
    integer_layer,
    is_gated,
    plain_layer,
)
from support.fused_moe_masked import (
    COUNTS,
    MASKED_OPERANDS,
    MAX_ROWS,
    as_tokens,
    assert_rest_untouched,
    in_buffers,
    masked_layer,
    rows_that_count,
    sizes_of,
)
from support.inputs import poisoned
from support.tolerance import assert_close_to_reference, assert_same_bits, assert_untouched
from test_fused_moe_launch import OnCuda

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies  # noqa: E402

activations = pytest.mark.parametrize("activation", ACTIVATIONS)
layouts = pytest.mark.parametrize("layout", LAYOUTS)
EXTREMES = (-(2**31), -1, 0, 1, 2, 3, 4, 2**31 - 1)


def run(layer, **options):
    """Run into an output of NaN between NaN."""
    *outer, hidden = layer["hidden_states"].shape
    device = str(layer["hidden_states"].device)
    out = poisoned((*outer, hidden + 16), torch.bfloat16, device)
    moe_ext.fused_moe_masked_out(**layer, out=out[..., :hidden], **options)
    assert_untouched(out[..., hidden:].flatten(0, 1))
    return out[..., :hidden]


def check(layer, exact=False):
    out = run(layer)
    assert_rest_untouched(out, layer)
    rows, expected = rows_that_count(out, layer), plain_layer(as_tokens(layer))
    if exact:
        assert_same_bits(rows, expected.bfloat16())
    else:
        assert_close_to_reference(rows, expected)
    again = moe_ext.fused_moe_masked(**layer)
    assert (again.shape, again.dtype) == (out.shape, torch.bfloat16)
    assert again.is_contiguous()
    assert_same_bits(rows_that_count(again, layer), rows)
    return rows


def biases(layer):
    n = layer["w13"].shape[1]
    num_experts, hidden, _ = layer["w2"].shape
    return {
        "w13_bias": torch.randn(num_experts, n).bfloat16(),
        "w2_bias": torch.randn(num_experts, hidden),
    }


def integers(layout, counts=COUNTS, max_rows=MAX_ROWS, hidden=256, intermediate=176, seed=1):
    sizes = sizes_of(counts, max_rows, hidden, intermediate)
    return in_buffers(integer_layer(layout, sizes, seed=seed), counts, max_rows)


@layouts
@activations
def test_activations(layout, activation):
    layer = masked_layer(layout, activation)
    check(layer)
    check(layer | biases(layer))


@layouts
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize(("hidden", "intermediate"), [(320, 176), (64, 360), (256, 192)])
def test_sizes(layout, activation, hidden, intermediate):
    check(masked_layer(layout, activation, hidden=hidden, intermediate=intermediate))


@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("layout", ["bf16", "channel", "block"])
def test_interleaved(layout, activation):
    layer = masked_layer(layout, activation) | {"gate_up_layout": "interleaved"}
    check(layer | biases(layer))


@pytest.mark.parametrize(
    ("activation", "options"),
    [("swiglu", {"limit": 0.5}), ("swiglu_oai", {"limit": 0.5, "alpha": 3.0})],
)
def test_alpha_and_limit(activation, options):
    layer = masked_layer("bf16", activation)
    assert not torch.equal(check(layer | options), check(layer))


@pytest.mark.parametrize("layout", ["tensor", "expert"])
def test_static_scales(layout):
    layer = masked_layer(layout)
    for shape in ((), (1,)):
        first, second = torch.full(shape, 0.02), torch.full(shape, 0.03)
        check(layer | {"a1_scale": first, "a2_scale": second})
        check(layer | {"a1_scale": first})
        check(layer | {"a2_scale": second})


@pytest.mark.parametrize("first", LAYOUTS[1:])
@pytest.mark.parametrize("second", LAYOUTS[1:-1])
def test_stages_with_different_layouts(first, second):
    layer, other = masked_layer(first), masked_layer(second)
    check(layer | {"w2": other["w2"], "w2_scale": other["w2_scale"]})


@layouts
@pytest.mark.parametrize("max_rows", [1, 8, 63])
def test_integers_are_exact(layout, max_rows):
    counts = (0, max_rows, max_rows // 2, 0, 1)
    assert check(integers(layout, counts, max_rows), exact=True).abs().max() > 0


@layouts
def test_counts_are_clamped(layout):
    check(integers(layout, (5, -1, 2**31 - 1, -(2**31), 4, 0), max_rows=4), exact=True)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    counts=strategies.lists(strategies.sampled_from(EXTREMES), min_size=1, max_size=6),
    max_rows=strategies.integers(1, 4),
    layout=strategies.sampled_from(LAYOUTS),
)
def test_any_counts(counts, max_rows, layout):
    check(integers(layout, tuple(counts), max_rows, hidden=144, intermediate=24), exact=True)


@layouts
def test_no_row_counts(layout):
    assert check(masked_layer(layout, counts=(0, 0, 0))).shape == (0, 192)


@layouts
def test_buffers_without_rows(layout):
    layer = masked_layer(layout, counts=(0, 3), max_rows=0)
    out = moe_ext.fused_moe_masked(**layer)
    assert (out.shape, out.dtype) == ((2, 0, 192), torch.bfloat16)
    moe_ext.fused_moe_masked_out(**layer, out=out)


@pytest.mark.parametrize("layout", ["tensor", "expert", "channel"])
def test_a_huge_row_changes_no_other(layout):
    """Where a weight has one scale, each row has its own."""
    layer = masked_layer(layout)
    before = rows_that_count(moe_ext.fused_moe_masked(**layer), layer)
    layer["hidden_states"][1, 2] *= 1e20
    after = rows_that_count(moe_ext.fused_moe_masked(**layer), layer)
    assert not torch.equal(after[2], before[2])
    assert_same_bits(torch.cat([after[:2], after[3:]]), torch.cat([before[:2], before[3:]]))


@layouts
def test_rows_are_those_of_the_layer(layout):
    """Between a dispatch and a combine of one's own."""
    layer = masked_layer(layout)
    tokens = as_tokens(layer)
    rows = rows_that_count(moe_ext.fused_moe_masked(**layer), layer)
    assert_same_bits(rows, moe_ext.fused_moe(**tokens))


def test_contiguous_buffers_and_sizes_of_one():
    layer = masked_layer("bf16")
    contiguous = layer | {"hidden_states": layer["hidden_states"].contiguous()}
    assert_same_bits(check(contiguous), check(layer))
    for shape in ((1, 1), (1, 5), (5, 1)):
        check(masked_layer("block", counts=(shape[1],) * shape[0], max_rows=shape[1]))


def test_the_reference_writes_what_it_is_given():
    layer = masked_layer("block")
    out = poisoned(layer["hidden_states"].shape, torch.bfloat16, "cpu")
    assert fused_moe_masked_reference(**layer, out=out) is out
    assert_rest_untouched(out, layer)
    expected = rows_that_count(moe_ext.fused_moe_masked(**layer), layer)
    assert_same_bits(rows_that_count(out, layer), expected)


@layouts
@pytest.mark.parametrize("wrong", [{"limit": 0.5}, {"w2_bias": torch.ones(8, 192)}])
def test_a_wrong_layer_is_found(layout, wrong):
    layer = masked_layer(layout)
    rows = rows_that_count(moe_ext.fused_moe_masked(**layer | wrong), layer)
    with pytest.raises(AssertionError):
        assert_close_to_reference(rows, plain_layer(as_tokens(layer)))


class Kernels:
    """A stand-in for the C++ op: the reference, and what it was told."""

    sm_count = 132

    def __init__(self):
        self.calls = []

    def fused_moe_masked_configured(self, *arguments):
        *operands, w13_scale, w2_scale, a1_scale, a2_scale, w13_bias, w2_bias = arguments[:10]
        *scratch, out, flags, gate_up, down, numbers = arguments[10:]
        activation = tuple(FORMS)[flags >> 8]
        hidden_states = operands[0].as_subclass(torch.Tensor)
        fused_moe_masked_reference(
            hidden_states,
            *operands[1:],
            w13_scale=w13_scale,
            w2_scale=w2_scale,
            a1_scale=a1_scale,
            a2_scale=a2_scale,
            w13_bias=w13_bias,
            w2_bias=w2_bias,
            activation=activation,
            alpha=numbers[0] if activation == "swiglu_oai" else None,
            limit=numbers[3] if activation.startswith("swiglu") else None,
            gate_up_layout="interleaved" if flags & 1 else "concatenated",
            out=out,
        )
        kernels = [moe_ext.kernels()[index] for index in (gate_up, down)]
        self.calls.append((flags & 0xFF, *kernels, scratch))


@pytest.fixture
def kernels(monkeypatch):
    kernels = Kernels()
    monkeypatch.setattr(_fused_moe_masked_run, "device_kernels", lambda index: kernels)
    return kernels


@pytest.fixture
def asked(monkeypatch):
    """What kernels were chosen for."""
    asked = []

    def remember(*key):
        asked.append(key)
        return choose_kernels(*key)

    monkeypatch.setattr(_fused_moe_masked_run, "choose_kernels", remember)
    return asked


def on_cuda(layer):
    hidden_states = layer["hidden_states"].as_subclass(OnCuda)
    options = layer | {"hidden_states": hidden_states}
    operands = [options.pop(name) for name in MASKED_OPERANDS]
    return rows_that_count(_fused_moe_masked_run.run_fused_moe_masked(*operands, **options), layer)


@layouts
@activations
def test_what_the_op_on_cuda_is_told(kernels, layout, activation):
    layer = masked_layer(layout, activation)
    layer |= biases(layer)
    assert_same_bits(on_cuda(layer), rows_that_count(moe_ext.fused_moe_masked(**layer), layer))
    ((flags, gate_up, down, scratch),) = kernels.calls
    assert flags == (0 if is_gated(activation) else 2)
    sums = {"bf16": "fp32", "block": "block", "segments": "block"}.get(layout, "promoted")
    assert gate_up.output in ("gated", "either")
    assert down.output in ("rows", "either")
    assert (gate_up.accumulate, down.accumulate) == (sums, sums)
    sizes = [None if tensor is None else tensor.numel() for tensor in scratch]
    rows = len(COUNTS) * MAX_ROWS
    assert sizes == (
        [rows * 96, None, None] if layout == "bf16" else [rows * 96, rows * 192, rows * 2]
    )


def test_options_for_the_op_on_cuda(kernels):
    layer = masked_layer("tensor", "swiglu_oai") | {"alpha": 1.0, "limit": 2.0}
    layer |= {
        "gate_up_layout": "interleaved",
        "a1_scale": torch.ones(1),
        "a2_scale": torch.ones(()),
    }
    expected = rows_that_count(moe_ext.fused_moe_masked(**layer), layer)
    assert_same_bits(on_cuda(layer | {"accumulate": "fast", "batch_invariant": True}), expected)
    ((flags, gate_up, down, _),) = kernels.calls
    assert flags == 1 | 8 | 16
    assert gate_up.accumulate == "promoted"
    assert down.split_k == 1
    assert gating("swiglu_oai", 1.0, 2.0)[3] == 2.0


def test_buffers_without_rows_are_not_launched(kernels):
    layer = masked_layer("block", counts=(0, 0), max_rows=0)
    for expected_rows in (None, 0, 5):
        assert on_cuda(layer | {"expected_rows": expected_rows}).shape == (0, 192)
    assert kernels.calls == []


@layouts
def test_expected_rows_choose_the_kernels_and_nothing_else(kernels, asked, layout):
    layer = masked_layer(layout)
    rows = rows_that_count(moe_ext.fused_moe_masked(**layer), layer)
    chosen_for = {None: MAX_ROWS, 0: 1, 1: 1, 3: 3, MAX_ROWS: MAX_ROWS, 2**63 - 1: MAX_ROWS}
    for expected_rows in chosen_for:
        assert_same_bits(on_cuda(layer | {"expected_rows": expected_rows}), rows)
    full = check_fused_moe_masked("fused_moe_masked", None, **layer)
    assert full.num_tokens == len(COUNTS) * MAX_ROWS
    likely = [full._replace(num_tokens=len(COUNTS) * number) for number in chosen_for.values()]
    assert asked == [(one, "promoted", False, False, 132) for one in likely]
    for (_, gate_up, down, scratch), key in zip(kernels.calls, asked, strict=True):
        assert (gate_up.index, down.index) == choose_kernels(*key)
        for own, first in zip(scratch, kernels.calls[0][3], strict=True):
            assert (own is None and first is None) or own.shape == first.shape


def test_few_rows_get_kernels_of_their_own(kernels):
    layer = masked_layer("bf16", counts=(1, 2), max_rows=4096)
    for expected_rows in (None, 1):
        on_cuda(layer | {"expected_rows": expected_rows})
    full, few = (gate_up for _, gate_up, _, _ in kernels.calls)
    assert few.tile_tokens < full.tile_tokens


@layouts
def test_expected_rows_change_nothing_on_the_cpu(layout):
    layer = masked_layer(layout)
    expected = rows_that_count(moe_ext.fused_moe_masked(**layer), layer)
    for expected_rows in (0, 1, 10**6):
        out = run(layer, expected_rows=expected_rows)
        assert_rest_untouched(out, layer)
        assert_same_bits(rows_that_count(out, layer), expected)
