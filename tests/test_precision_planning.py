"""`plan_precision`: greedy, deterministic, growing with the budget, and near the bound."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from moe_ext.precision import ExpertBank, LayerPlan, PrecisionStats, plan_precision
from moe_ext.precision.layer_plan import STAGES
from moe_ext.precision.planning import stage_bytes
from support.precision import layer_stats

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

ERRORS = st.floats(0, 1e6, allow_subnormal=False) | st.sampled_from([0.0, 1.0, 2.0])


@st.composite
def statistics(draw, max_experts=6, max_layers=3):
    layers = {}
    for index in range(draw(st.integers(1, max_layers))):
        pairs = st.tuples(ERRORS, ERRORS)
        errors = draw(st.lists(pairs, min_size=1, max_size=max_experts))
        sizes = draw(st.sampled_from([(64, 32), (128, 72), (256, 192)]))
        layers[f"l{index}"] = layer_stats(
            errors,
            hidden_size=sizes[0],
            intermediate_size=sizes[1],
            gated=draw(st.booleans()),
            halves=False,
            down_scales=draw(st.sampled_from(["block", "channel", "tensor"])),
            signal=draw(st.floats(1, 1e9)),
        )
    return PrecisionStats(layers)


def chosen(planned):
    return [(choice.layer, choice.expert, choice.stage) for choice in planned.choices]


@hypothesis.settings(deadline=None)
@given(statistics(), st.floats(0, 1.2), st.floats(0, 1.2))
def test_plans_grow_with_the_byte_budget(stats, one, other):
    small, large = sorted((one, other))
    smaller, larger = (plan_precision(stats, byte_budget=b) for b in (small, large))
    assert chosen(larger)[: len(chosen(smaller))] == chosen(smaller)
    assert set(smaller.plan.bf16()) <= set(larger.plan.bf16())
    assert larger.error <= smaller.error <= smaller.fp8_error
    assert larger.bound <= smaller.bound


@hypothesis.settings(deadline=None)
@given(statistics(), st.floats(0, 1e4), st.floats(0, 1e4))
def test_plans_grow_as_the_error_budget_falls(stats, one, other):
    small, large = sorted((one, other))
    strict, loose = (plan_precision(stats, error_budget=b) for b in (small, large))
    assert chosen(strict)[: len(chosen(loose))] == chosen(loose)
    assert strict.error <= small * (1 + 1e-12)
    assert strict.extra_bytes >= loose.extra_bytes


@hypothesis.settings(deadline=None)
@given(statistics(), st.floats(0, 1.2))
def test_budgets_are_kept_and_plans_say_what_they_choose(stats, budget):
    planned = plan_precision(stats, byte_budget=budget)
    assert planned.extra_bytes <= budget * planned.fp8_bytes
    assert planned.extra_bytes == sum(choice.extra_bytes for choice in planned.choices)
    assert sorted(planned.plan.bf16()) == sorted(chosen(planned))
    assert planned.plan.names == tuple(stats.layers)
    ratios = [choice.removed / choice.extra_bytes for choice in planned.choices]
    assert ratios == sorted(ratios, reverse=True)
    assert plan_precision(stats, byte_budget=budget) == planned


@hypothesis.settings(deadline=None)
@given(statistics(), st.floats(0, 1.2))
def test_the_bound_is_missed_by_less_than_one_stage(stats, budget):
    planned = plan_precision(stats, byte_budget=budget)
    everything = plan_precision(stats, byte_budget=1e9)
    following = everything.choices[len(planned.choices) :]
    largest = following[0].removed if following else 0.0
    assert 0 <= planned.gap <= largest * (1 + 1e-9)
    assert planned.bound <= planned.error
    if planned.fp8_error:
        by_bound = (planned.error**2 - planned.bound**2) / planned.fp8_error**2
        assert planned.gap == pytest.approx(by_bound, abs=1e-9)


@hypothesis.settings(max_examples=40, deadline=None)
@given(statistics(max_experts=3, max_layers=2), st.floats(0, 1))
def test_no_choice_is_better_than_the_bound(stats, budget):
    planned = plan_precision(stats, byte_budget=budget)
    everything = plan_precision(stats, byte_budget=1e9).choices
    left = 1.0
    for count in range(len(everything) + 1):
        for some in itertools.combinations(everything, count):
            if sum(choice.extra_bytes for choice in some) <= budget * planned.fp8_bytes:
                left = min(left, 1 - math.fsum(choice.removed for choice in some))
    best = math.sqrt(max(left, 0.0)) * planned.fp8_error
    slack = 1e-7 * planned.fp8_error
    assert planned.bound - slack <= best <= planned.error + slack


@hypothesis.settings(deadline=None)
@given(statistics(), st.floats(0, 1e4))
def test_an_error_budget_takes_no_more_than_it_must(stats, budget):
    planned = plan_precision(stats, error_budget=budget)
    assert planned.error <= budget * (1 + 1e-12)
    if planned.choices:
        last = planned.choices[-1]
        before = planned.error**2 + last.removed * planned.fp8_error**2
        assert before >= budget**2 * (1 - 1e-9)
        assert planned.bound >= planned.extra_bytes - last.extra_bytes - 1e-6
    assert planned.bound <= planned.extra_bytes + 1e-6
    assert planned.gap == pytest.approx(
        (planned.extra_bytes - planned.bound) / planned.fp8_bytes, abs=1e-9
    )


def test_order_is_by_error_per_byte():
    # The down stage has half the bytes of gate and up.
    stats = PrecisionStats({"a": layer_stats([(10.0, 6.0), (14.0, 4.0), (0.0, 0.0)])})
    planned = plan_precision(stats, byte_budget=2.0)
    assert chosen(planned) == [
        ("a", 1, "gate_up"),
        ("a", 0, "down"),
        ("a", 0, "gate_up"),
        ("a", 1, "down"),
    ]
    assert planned.error == 0
    assert {choice.expert for choice in planned.choices} == {0, 1}  # nothing without an error


def test_equal_ones_are_in_the_order_of_layers_experts_and_stages():
    sizes = {"hidden_size": 128, "intermediate_size": 128, "gated": False, "halves": False}
    layer = layer_stats([(1.0, 1.0), (1.0, 1.0)], **sizes)
    planned = plan_precision(PrecisionStats({"b": layer, "a": layer}), byte_budget=2.0)
    assert chosen(planned) == list(itertools.product("ba", (0, 1), STAGES))


def test_layers_are_weighed_by_their_outputs():
    loud = layer_stats([(0.0, 4.0)], signal=100.0)
    quiet = layer_stats([(0.0, 1.0)], signal=10.0)
    planned = plan_precision(PrecisionStats({"loud": loud, "quiet": quiet}), byte_budget=2.0)
    assert [choice.layer for choice in planned.choices] == ["quiet", "loud"]
    assert planned.fp8_error == pytest.approx(math.sqrt((4 / 100 + 1 / 10) / 2))


def test_layers_are_weighed_by_the_models_output_where_that_was_measured():
    loud = layer_stats([(0.0, 4.0)], signal=100.0, model_signal=50.0, model_noise=3.0)
    quiet = layer_stats([(0.0, 1.0)], signal=10.0, model_signal=50.0, model_noise=2.0)
    planned = plan_precision(PrecisionStats({"quiet": quiet, "loud": loud}), byte_budget=2.0)
    assert [choice.layer for choice in planned.choices] == ["loud", "quiet"]
    assert planned.fp8_error == pytest.approx(math.sqrt(5.0 / 50.0))
    assert [choice.removed for choice in planned.choices] == pytest.approx([0.6, 0.4])


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("scales", ["block", "channel", "tensor"])
def test_bytes_are_those_of_a_bank(activation, scales):
    gated = activation == "swiglu"
    stats = layer_stats(
        [(0.0, 0.0)] * 3,
        hidden_size=136,
        intermediate_size=72,
        gated=gated,
        halves=gated,
        gate_up_scales=scales,
        down_scales=scales,
    )
    plan = LayerPlan(3).with_fp8(scales=scales)
    for own in (plan, plan.with_bf16(), plan.with_bf16(experts=1, stages="down")):
        bank = ExpertBank(own, 136, 72, activation=activation)
        expected = sum(
            stage_bytes(stats, stage, own[expert, stage].kind == "bf16")
            for expert in range(3)
            for stage in STAGES
        )
        assert bank.num_bytes == expected
    planned = plan_precision(PrecisionStats({"a": stats}), byte_budget=1.0)
    assert planned.fp8_bytes == ExpertBank(plan, 136, 72, activation=activation).num_bytes


def refused(stats, **budget):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        plan_precision(stats, **budget)
    return str(error.value)


def test_what_is_refused():
    stats = PrecisionStats({"a": layer_stats([(1.0, 1.0)])})
    assert refused({}, byte_budget=1.0) == (
        "plan_precision: `stats` must be PrecisionStats, got dict"
    )
    assert refused(stats) == (
        "plan_precision: one of `byte_budget` and `error_budget` must be given, got neither"
    )
    assert refused(stats, byte_budget=1.0, error_budget=1.0).endswith("must be given, got both")
    assert refused(stats, byte_budget=-0.1) == (
        "plan_precision: `byte_budget` must be finite and not negative, got -0.1"
    )
    assert refused(stats, error_budget=math.nan) == (
        "plan_precision: `error_budget` must be finite and not negative, got nan"
    )
    assert refused(stats, byte_budget="3%") == (
        'plan_precision: `byte_budget` must be None or a number, got "3%"'
    )
    wrong = dataclasses.replace(stats.layers["a"], error=torch.tensor([[1.0, math.nan]]))
    assert refused(PrecisionStats({"a": wrong}), byte_budget=1.0) == (
        'plan_precision: the error of "a", expert 0, down must be finite and not negative, got nan'
    )
