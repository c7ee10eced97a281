"""What Python decides of a CUDA call of `fused_moe`, with stand-ins for the C++ ops."""

from __future__ import annotations

import inspect
import sys
import types
from dataclasses import replace

import moe_ext
import pytest
import torch
from moe_ext import _fused_moe_launch, _fused_moe_run
from moe_ext._activations import ACTIVATIONS, gating
from moe_ext._configs import planner
from moe_ext._dispatch_table_layer import LAYER_TABLES
from moe_ext._fused_moe_checks import check_fused_moe
from moe_ext._fused_moe_kernels import Kernels as ForcedKernels
from moe_ext._fused_moe_kernels import choose_kernels, gated_candidates
from moe_ext._fused_moe_options import said
from moe_ext._fused_moe_workspace import workspace_bytes
from moe_ext.reference import fused_moe_reference
from support.fused_moe import OPERANDS, Sizes, random_layer

INTERLEAVED, UNGATED, ON_INPUT, FAST, BATCH_INVARIANT, REMEMBER = (1 << bit for bit in range(6))
SIZES = Sizes(num_tokens=5, num_experts=3, top_k=2, hidden=160, intermediate=136)
NAMES = tuple(ACTIVATIONS)
SCALES = ("w13_scale", "w2_scale")
ARGUMENTS = (
    *OPERANDS,
    *SCALES,
    *("a1_scale", "a2_scale", "w13_bias", "w2_bias", "expert_map", "addend", "workspace", "out"),
    *("flags", "alpha", "limit", "routed_scale", "first_expert"),
)
SELDOM = {
    **dict.fromkeys(("a1_scale", "a2_scale", "w13_bias", "w2_bias", "expert_map", "addend")),
    **{"alpha": 0.0, "limit": 0.0, "routed_scale": 1.0, "first_expert": 0},
}


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = property(lambda self: True)


class Kernels(types.SimpleNamespace):
    """Stand-ins for the C++ ops: the reference, for problems that they were told a choice for."""

    def __init__(self):
        super().__init__(sm_count=132, told={}, ran=[], refused=0, rules=[], taught=[])

    def fused_moe_launch(self, *arguments):
        names = (*OPERANDS, *SCALES, "workspace", "out", "flags")
        return self._run(None, **dict(zip(names, arguments, strict=True)), **SELDOM)

    def fused_moe_launch_with(self, *arguments):
        return self._run(None, **dict(zip(ARGUMENTS, arguments, strict=True)))

    def fused_moe_configured(self, *arguments):
        call = dict(zip(ARGUMENTS, arguments[:-5], strict=True))
        assert call["workspace"] is not None
        assert call["out"] is not None
        self.rules.append(arguments[-2:])
        return self._run(arguments[-5:-2], **call)

    def fused_moe_teach(self, number, *table):
        self.taught.append(number)

    def _run(self, choice, flags, alpha, limit, out, workspace, **call):
        options = flags & ~REMEMBER
        biased = call["w13_bias"] is not None
        shapes = [None if call[name] is None else call[name].shape for name in SCALES]
        slots = call["topk_ids"].numel()
        problem = (slots, call["w13"].shape, call["w13"].dtype, options, *shapes, biased)
        choice = choice or self.told.get((problem, alpha, limit))
        if choice is None or slots == 0 or not call["topk_ids"].dtype.is_signed:
            self.refused += 1
            raise ValueError("fused_moe: not the documented message")
        if flags & REMEMBER:
            self.told[problem, alpha, limit] = choice
        self.ran.append((flags, *choice))
        call["hidden_states"] = call["hidden_states"].as_subclass(torch.Tensor)
        result = fused_moe_reference(
            **call,
            activation=NAMES[flags >> 8],
            alpha=alpha or None,
            limit=limit or None,
            gate_up_layout="interleaved" if flags & INTERLEAVED else "concatenated",
            apply_router_weight_on_input=bool(flags & ON_INPUT),
        )
        return result if out is None else out.copy_(result)


@pytest.fixture
def kernels(monkeypatch):
    kernels = Kernels()
    for module in (_fused_moe_run, _fused_moe_launch):
        monkeypatch.setattr(module, "device_kernels", lambda index: kernels)
    return kernels


def layer_on_cuda(layout="bf16", activation="swiglu"):
    layer = random_layer(layout, activation, SIZES)
    layer["hidden_states"] = layer["hidden_states"].as_subclass(OnCuda)
    return layer


def run(layer, name="run_fused_moe", **changes):
    options = layer | changes
    operands = [options.pop(name) for name in OPERANDS]
    return getattr(_fused_moe_run, name)(*operands, **options)


def expected(layer, **changes):
    plain = layer["hidden_states"].as_subclass(torch.Tensor)
    return fused_moe_reference(**layer | changes | {"hidden_states": plain})


def twice(kernels, layer, **changes):
    """Call twice; return the flags without the activation, and the kernels and gating."""
    first, second = run(layer, **changes), run(layer, **changes)
    assert torch.equal(first, second)
    (flags, *choice), (again, *remembered) = kernels.ran
    assert kernels.refused == 1
    assert remembered == choice
    assert flags == again | REMEMBER
    return first, again & 0xFF, choice


def test_forced_kernels_are_not_remembered(kernels):
    layer = layer_on_cuda()
    layer_kernels = [config.index for config in moe_ext.kernels() if config.output == "either"]
    forced = ForcedKernels(layer_kernels[3], layer_kernels[3])
    operands = [layer[name] for name in OPERANDS]
    parameters = inspect.signature(_fused_moe_run.run_fused_moe).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    del options["out"]
    sizes = SIZES.num_tokens * SIZES.top_k, SIZES.hidden, SIZES.intermediate, SIZES.num_experts
    options["workspace"] = torch.empty(workspace_bytes(*sizes), dtype=torch.uint8)
    out = torch.empty_like(layer["hidden_states"].as_subclass(torch.Tensor))
    checked = check_fused_moe("fused_moe", out, *operands, **options)
    _fused_moe_launch.launch_checked(checked, out, *operands, **options, chosen=forced)
    assert kernels.ran[0][1:3] == forced
    assert kernels.told == {}
    assert torch.equal(out, expected(layer))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_second_call_is_one_launch(kernels, activation):
    layer = layer_on_cuda("bf16", activation)
    out, flags, (gate_up, down, numbers) = twice(kernels, layer)
    assert torch.equal(out, expected(layer))
    form = ACTIVATIONS[activation]
    assert flags == (0 if form.gated else UNGATED)
    limit = float("inf") if form.limit is None else form.limit
    assert numbers == gating(activation, form.alpha or 0.0, limit)
    configs = [moe_ext.kernels()[index] for index in (gate_up, down)]
    assert [config.output for config in configs] == ["either", "either"]
    assert [config.dtype for config in configs] == ["bf16", "bf16"]


@pytest.mark.parametrize(
    ("layout", "accumulates"),
    [
        ("tensor", ("promoted", "promoted")),
        ("channel", ("promoted", "promoted")),
        ("block", ("block", "block")),
        ("segments", ("block", "block")),
    ],
)
def test_the_choice_is_by_the_layouts_of_scales(kernels, layout, accumulates):
    out, flags, (*chosen, _) = twice(kernels, layer := layer_on_cuda(layout))
    assert torch.equal(out, expected(layer))
    assert flags == 0
    assert tuple(moe_ext.kernels()[index].accumulate for index in chosen) == accumulates


def rule_of(kernels, layout, intermediate):
    """Return the table and the choices that C++ is told for a layer met first."""
    layer = random_layer(layout, "swiglu", replace(SIZES, intermediate=intermediate))
    layer["hidden_states"] = layer["hidden_states"].as_subclass(OnCuda)
    run(layer)
    return kernels.rules[-1]


def test_what_a_choice_is_made_by_is_taught_once(kernels):
    rules = [rule_of(kernels, layout, 256) for layout in ("tensor", "channel", "block", "bf16")]
    tables = [table for table, _ in rules]
    assert tables[0] == tables[1]
    assert len(set(tables)) == 3
    assert sorted(kernels.taught) == sorted(set(tables))
    assert all(allowed > 0 for _, allowed in rules)


@pytest.mark.parametrize("layout", ["tensor", "block"])
def test_what_few_k_are_chosen_by_is_not_taught(kernels, layout):
    assert rule_of(kernels, layout, 176) == (-1, 0)
    assert kernels.taught == []


def in_pieces(numbers, length):
    return [tuple(numbers[begin : begin + length]) for begin in range(0, len(numbers), length)]


@pytest.mark.parametrize("table", LAYER_TABLES.values(), ids=map(str, LAYER_TABLES))
def test_what_is_taught_is_the_table(table):
    choices, costly, costs, common, problems = table.taught()
    each = len(costs) // len(costly)
    length = 4 + len(choices) // 2
    finder = planner().MeasuredChoices(
        in_pieces(choices, 2),
        dict(zip(costly, in_pieces(costs, each), strict=True)),
        common,
        [(piece[:4], piece[4:]) for piece in in_pieces(problems, length)],
        *table.limits,
    )
    everything = (1 << len(table.compiled)) - 1
    for rows in (1, 7, 64, 512, 5000):
        for sizes in ((128, 2048, 768), (8, 4096, 14336), (60, 2048, 1408)):
            asked = (rows, *sizes, 132, everything)
            assert finder.choose(*asked) == table.finder.choose(*asked)


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("intermediate", [256, 320, 384])
def test_plain_order_takes_blocks_where_cpp_does(activation, intermediate):
    sizes = Sizes(num_tokens=8000, num_experts=2, top_k=2, hidden=256, intermediate=intermediate)
    layer = random_layer("block", activation, sizes)
    checked = check_fused_moe("fused_moe", None, **layer)
    config = moe_ext.kernels()[choose_kernels(checked, "promoted", False, False, 132).gate_up]
    # The rule of csrc/grouped_gemm/scales.cpp, by the rows of w13.
    takes_plain = layer["w13"].shape[1] % 256 == 0
    assert config.swapped or takes_plain
    candidates = gated_candidates(checked, "block", False)
    assert any(not candidate.swapped for candidate in candidates) == takes_plain


OPTIONS = {
    "interleaved": ({"gate_up_layout": "interleaved"}, INTERLEAVED),
    "on_input": ({"apply_router_weight_on_input": True}, ON_INPUT),
    "first_expert": ({"first_expert": 1}, 0),
    "expert_map": ({"expert_map": torch.tensor([2, -1, 0], dtype=torch.int32)}, 0),
    "addend": ({"addend": torch.ones(5, 160)}, 0),
    "routed_scale": ({"routed_scale": 2.5}, 0),
    "limit": ({"limit": 0.5}, 0),
    "w13_bias": ({"w13_bias": torch.ones(3, 272)}, 0),
    "w2_bias": ({"w2_bias": torch.ones(3, 160)}, 0),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_handed_on(kernels, name):
    changes, expected_flags = OPTIONS[name]
    layer = layer_on_cuda()
    out, flags, _ = twice(kernels, layer, **changes)
    assert torch.equal(out, expected(layer, **changes))
    assert flags == expected_flags


def test_options_that_the_reference_has_not(kernels):
    layer = layer_on_cuda("tensor")
    _, flags, (_, down, _) = twice(kernels, layer, accumulate="fast", batch_invariant=True)
    assert flags == FAST | BATCH_INVARIANT
    # One kernel for both GEMMs; "fast" allows leaving sums in the tensor core, no more.
    assert moe_ext.kernels()[down].accumulate == "promoted"


def test_static_scales(kernels):
    layer = layer_on_cuda("tensor") | {"a1_scale": torch.tensor(0.01), "a2_scale": torch.ones(1)}
    out, _, _ = twice(kernels, layer)
    assert torch.equal(out, expected(layer))


def test_alpha_and_limit_are_remembered_apart(kernels):
    layer = layer_on_cuda("bf16", "swiglu_oai")
    changes = ({}, {"alpha": 1.702}, {"alpha": 1.0}, {"limit": 1.702}, {"alpha": 1, "limit": 3.0})
    for options in (*changes, *changes):
        assert torch.equal(run(layer, **options), expected(layer, **options))
    assert kernels.refused == len(changes)
    assert kernels.ran[: len(changes)] != kernels.ran[len(changes) :]
    numbers = [ran[-1] for ran in kernels.ran]
    assert numbers[: len(changes)] == numbers[len(changes) :]
    assert [number[0] for number in numbers[: len(changes)]] == [1.702, 1.702, 1.0, 1.702, 1]


def test_out_and_workspace(kernels):
    layer = layer_on_cuda()
    workspace = torch.zeros(workspace_bytes(10, 160, 136, 3), dtype=torch.uint8)
    out = torch.zeros(5, 160).bfloat16()
    for _ in range(2):
        out.zero_()
        assert run(layer, "run_fused_moe_out", out=out, workspace=workspace) is None
        assert torch.equal(out, expected(layer))
    assert len(kernels.ran) == 2
    assert kernels.refused == 1
    with pytest.raises(ValueError, match="fused_moe_out: `out` must be a tensor, got None"):
        run(layer, "run_fused_moe_out", out=None)


def test_no_token_is_not_launched(kernels):
    layer = layer_on_cuda()
    for name in ("hidden_states", "topk_weights", "topk_ids"):
        layer[name] = layer[name][:0]
    assert run(layer).shape == (0, 160)
    assert kernels.ran == []


def test_what_is_refused_has_the_documented_message(kernels):
    layer = layer_on_cuda()
    run(layer)
    for message, changes in (
        ("`topk_ids` must be int32 or int64", {"topk_ids": layer["topk_ids"].to(torch.uint8)}),
        ("`w2` must be a tensor, got None", {"w2": None}),
        ("`hidden_states` must be a tensor, got None", {"hidden_states": None}),
        ("`activation` must be one of", {"activation": "gelu"}),
        ("`gate_up_layout` must be one of", {"gate_up_layout": "split"}),
        ("`alpha` must be None for", {"alpha": 1.0}),
        ("`limit` must be positive, got 0.0", {"limit": 0.0}),
        ("`limit` must be positive, got nan", {"limit": float("nan")}),
        ("`limit` must be positive, got -1", {"limit": -1}),
        ("`routed_scale` must be finite in float32, got nan", {"routed_scale": float("nan")}),
        ("`routed_scale` must be finite in float32, got inf", {"routed_scale": float("inf")}),
        ("`accumulate` must be", {"accumulate": "slow"}),
        ("`accumulate` must be", {"accumulate": "fast"}),
    ):
        with pytest.raises(ValueError, match=f"^fused_moe: {message}"):
            run(layer, **changes)
    assert len(kernels.told) == 1


def test_flags_are_those_of_the_c_plus_plus_op():
    module = sys.modules["moe_ext._fused_moe_launch"]
    names = ("_INTERLEAVED", "_UNGATED", "_WEIGHTS_ON_INPUT", "_FAST", "_BATCH_INVARIANT")
    bits = (INTERLEAVED, UNGATED, ON_INPUT, FAST, BATCH_INVARIANT)
    assert tuple(getattr(module, name) for name in names) == bits
    assert (module.REMEMBER, module._ACTIVATION_SHIFT) == (REMEMBER, 8)


def test_what_is_said_is_what_differs_from_the_ops_defaults():
    schema = torch.ops.moe_ext.fused_moe.default._schema
    defaults = {one.name: one.default_value for one in schema.arguments if one.kwarg_only}
    defaults["workspace"] = None  # of the overload that writes one
    assert list(inspect.signature(said).parameters) == list(defaults)
    for function in (moe_ext.fused_moe, moe_ext.fused_moe_out):
        assert dict(function.__kwdefaults__) == defaults
    assert said(**defaults) == {}
    others = {name: object() for name in defaults}
    assert said(**others) == others
