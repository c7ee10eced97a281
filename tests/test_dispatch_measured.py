"""A table of measured problems: estimates of kernels, corrected by what was timed nearby."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from moe_ext import _dispatch, _fused_moe_kernels, _preload
from moe_ext._configs import all_configs, config_indices, matching_configs, planner
from moe_ext._dispatch_measured import Measured

from bench.candidates import layer_of
from bench.cases import STAGES, get_case
from bench.ops import LAYER
from bench.problem import Cell
from bench.providers.base import Variant

USUAL = (2.0, 1.0, 0.12, 1.1, 1.05, 0.6, 0.3)
NARROW, MIDDLE, WIDE = "swap_fp8p_w64_t16", "swap_fp8p_w128_t64", "plain_fp8p_w256_t128"
NAMES = (NARROW, MIDDLE, WIDE)
ALL = 2**64 - 1


def make(problems="", choices=NAMES, **options):
    names = {name for choice in choices for name in choice.split("+")}
    costs = dict.fromkeys(names, USUAL)
    return Measured(
        "fp8",
        "promoted",
        choices=choices,
        costs=costs,
        problems=problems,
        where="rows.jsonl",
        **options,
    )


def test_narrow_tiles_are_for_few_rows_and_wide_ones_for_many():
    table = make()
    few, many = (table.layer(rows, 128, 4096, 1536, 132, ALL) for rows in (128, 1 << 17))
    assert few.choice in (NARROW, MIDDLE)
    assert many.choice == WIDE
    assert few.nearest is many.nearest is None
    assert 0 < few.us < many.us


def test_estimates_are_made_of_terms_that_grow_with_the_sizes():
    index = config_indices()[MIDDLE]
    sizes = {"rows": 512, "groups": 64, "n": 3072, "k": 4096}
    terms = planner().gemm_terms(index, *sizes.values(), 132)
    assert len(terms) == len(USUAL) - 1
    for name in ("rows", "n", "k"):
        more = planner().gemm_terms(index, *(sizes | {name: 4 * sizes[name]}).values(), 132)
        assert all(large >= small for large, small in zip(more, terms, strict=True))
    weights = 64 * (1 - (1 - 1 / 64) ** 512) * 3072 * 4096
    assert terms[3] == pytest.approx(weights / 4.5e6)
    halved = planner().gemm_terms(index, *sizes.values(), 66)
    assert halved[2] == pytest.approx(2 * terms[2], rel=0.1)


def test_a_measured_problem_answers_for_itself_and_what_is_like_it():
    table = make("128 4096 1536 1024 100.0 0 300 400\n128 4096 1536 65536 900.0 500 300 0")
    for rows in (1024, 65536):  # what estimates alone say
        assert make().layer(rows, 128, 4096, 1536, 132, ALL).choice == MIDDLE
    for rows, expected in ((1024, NARROW), (800, NARROW), (1300, NARROW), (65536, WIDE)):
        found = table.layer(rows, 128, 4096, 1536, 132, ALL)
        assert found.choice == expected
    assert found.nearest.times_us == (1350.0, 1170.0, 900.0)
    assert found.nearest.name == "128x4096x1536 with 65536 rows"


def test_nothing_measured_has_a_say_on_what_is_unlike_it():
    table = make("128 4096 1536 1024 100.0 300 400 0")
    for rows, groups, sms in ((1024, 128, 78), (1 << 15, 128, 132), (1024, 8, 132)):
        found = table.layer(rows, groups, 4096, 1536, sms, ALL)
        assert found.nearest is None
        assert found == make().layer(rows, groups, 4096, 1536, sms, ALL)


def test_a_choice_that_was_not_timed_is_estimated():
    table = make("128 4096 1536 1024 100.0 0 - 1")
    assert math.isnan(table.problems[0].times_us[1])
    assert table.layer(1024, 128, 4096, 1536, 132, ALL).choice in NAMES


def test_a_choice_that_was_not_timed_is_no_better_than_what_was():
    # By estimates alone the middle one would be several times as fast as the others.
    costs = dict.fromkeys(NAMES, USUAL) | {MIDDLE: tuple(0.2 * cost for cost in USUAL)}
    table = Measured(
        "fp8",
        "promoted",
        choices=NAMES,
        costs=costs,
        problems="128 4096 1536 1024 100.0 0 - 10",
        where="rows.jsonl",
    )
    assert table.layer(1024, 128, 4096, 1536, 132, ALL).choice == NARROW
    assert table.layer(1024, 8, 512, 1536, 132, ALL).choice == MIDDLE  # unlike what was measured


def test_both_gemms_of_a_layer_get_one_kernel():
    draw = random.Random(0)
    lines = []
    for _ in range(60):
        sizes = draw.choice([8, 64, 256]), draw.choice([2048, 4096]), draw.choice([256, 768])
        over = " ".join(str(draw.randint(0, 300)) for _ in NAMES)
        lines.append(f"{' '.join(map(str, sizes))} {int(2 ** draw.uniform(0, 16))} 50.0 {over}")
    table = make("\n".join(lines))
    for hidden, intermediate in itertools.product((2048, 4096), (192, 768, 1024, 1500)):
        for rows in (1, 30, 500, 70000):
            layer = table.layer(rows, 64, hidden, intermediate, 132, ALL)
            first = table.gemm(rows, 64, 2 * intermediate, hidden, 132, ALL)
            second = table.gemm(rows, 64, hidden, intermediate, 132, ALL)
            assert layer == first == second
    # Of hidden sizes that nobody measured: most rows of weights are fewer than K, or far more.
    assert table.gemm(64, 8, 1024, 7168, 132, ALL) == table.layer(64, 8, 7168, 512, 132, ALL)
    assert table.gemm(64, 8, 7168, 512, 132, ALL) == table.layer(64, 8, 7168, 512, 132, ALL)
    table = make()
    assert table.gemm(64, 8, 28672, 4096, 132, ALL) == table.layer(64, 8, 4096, 14336, 132, ALL)
    # Of two that are close the rounder is hidden; of others that says nothing.
    layer = table.layer(64, 8, 2048, 1408, 132, ALL)
    assert table.gemm(64, 8, 2816, 2048, 132, ALL) == layer
    assert table.gemm(64, 8, 2048, 1408, 132, ALL) == layer
    assert table.gemm(64, 8, 7168, 2048, 132, ALL) == table.layer(64, 8, 7168, 2048, 132, ALL)


def test_only_what_is_allowed_is_chosen():
    table = make(choices=(*NAMES, f"{NARROW}+{WIDE}"))
    assert table.allowed(NAMES) == 0b1111
    assert table.allowed([WIDE]) == 0b0100
    assert table.allowed([WIDE], gate_up_only=[NARROW]) == 0b1000
    assert table.allowed(["swap_gone"]) == 0
    for bits, expected in ((0b0100, WIDE), (0b1000, f"{NARROW}+{WIDE}")):
        for rows in (0, 1, 100000):
            assert table.layer(rows, 128, 4096, 1536, 132, bits).choice == expected


def test_a_pair_of_two_kernels_costs_more_than_either():
    both = f"{NARROW}+{MIDDLE}"
    alone, pair = (make(choices=(choice,)) for choice in (NARROW, both))
    dearer = make(choices=(both,), common=(0.0, 0.0, 5.0))
    sizes = 16, 128, 4096, 1536, 132, ALL
    assert dearer.layer(*sizes).us == pytest.approx(pair.layer(*sizes).us + 5)
    same = make(choices=(NARROW,), common=(0.0, 0.0, 5.0))
    assert same.layer(*sizes).us == alone.layer(*sizes).us


def test_each_gemm_of_a_pair_gets_its_own_of_two_kernels(monkeypatch):
    both = f"{NARROW}+{WIDE}"
    lines = "128 4096 1536 1024 100.0 300 0\n32 2880 2880 128 50.0 300 0"
    table = make(lines, choices=(MIDDLE, both))
    for rows, groups, n, k, expected in (
        (1024, 128, 3072, 4096, NARROW),
        (1024, 128, 4096, 1536, WIDE),
        (128, 32, 5760, 2880, NARROW),
        (128, 32, 2880, 2880, WIDE),
    ):
        assert table.gemm(rows, groups, n, k, 132, ALL).choice == expected
        monkeypatch.setattr(_dispatch, "TABLES", {("fp8", "promoted"): table})
        for function in (_dispatch._candidates, _dispatch._finder, _dispatch.select):
            function.cache_clear()
        index = _dispatch.select("fp8", "promoted", rows, groups, n, k, 132)
        assert all_configs()[index].id == expected
    for function in (_dispatch._candidates, _dispatch._finder, _dispatch.select):
        function.cache_clear()


def test_what_was_not_timed_is_no_better_than_what_was():
    sizes = 1024, 128, 4096, 1536, 132, ALL
    assert make().layer(*sizes).choice == MIDDLE
    table = make("128 4096 1536 1024 100.0 0 - 1")
    assert table.layer(*sizes).choice == NARROW


def test_kernels_that_are_not_compiled_are_left_out():
    table = make("128 4096 1536 1024 100.0 0 400 300", choices=("swap_gone", MIDDLE, WIDE))
    assert table.compiled == (MIDDLE, WIDE)
    assert table.kernels() == ("swap_gone", MIDDLE, WIDE)
    assert table.layer(1024, 128, 4096, 1536, 132, ALL).choice == WIDE


def test_a_table_that_does_not_fit_is_refused():
    index = config_indices()[NARROW]
    make_finder = planner().MeasuredChoices
    with pytest.raises(IndexError, match="a time for each of 1 choices, got 2"):
        make_finder(
            [(index, index)], {index: USUAL}, (0, 0, 0), [((1, 1, 1, 1), (1, 2))], 132, 2.0, 0.3
        )
    for choices, costs in (([(index, index)], {}), ([(-1, -1)], {-1: USUAL})):
        with pytest.raises(IndexError, match="of compiled kernels with costs"):
            make_finder(choices, costs, (0, 0, 0), [], 132, 2.0, 0.3)


@pytest.fixture
def tables(monkeypatch):
    """The dispatcher with one measured table."""
    table = make("128 4096 1536 1024 100.0 300 400 0")
    monkeypatch.setattr(_dispatch, "TABLES", {("fp8", "promoted"): table})
    cached = (_dispatch._candidates, _dispatch._finder, _dispatch.choose, _dispatch.select)
    for function in cached:
        function.cache_clear()
    yield table
    for function in cached:
        function.cache_clear()


def test_what_is_selected_is_what_is_explained(tables):
    asked = itertools.product(
        (0, 1, 512, 1024, 70000), (8, 128), (64, 4096), (176, 4096), (78, 132)
    )
    sources = set()
    for rows, groups, n, k, sms in asked:
        decision = _dispatch.choose(
            dtype="fp8",
            accumulate="promoted",
            num_rows=rows,
            num_groups=groups,
            n=n,
            k=k,
            sm_count=sms,
        )
        index = _dispatch.select("fp8", "promoted", rows, groups, n, k, sms)
        assert index == decision.config.index
        sources.add((decision.source, decision.reason.split(",")[0]))
    # Few K off the lines of memory is chosen for before anything is estimated.
    assert {source for source, _ in sources} == {"table", "cost model"}
    assert any("glm-4.5-air-tp8" in reason for _, reason in sources)


def test_tables_are_read_before_the_first_call(tables, monkeypatch):
    layer_table = make()
    monkeypatch.setattr(_preload, "TABLES", {("fp8", "promoted"): tables})
    monkeypatch.setattr(_fused_moe_kernels, "LAYER_TABLES", {("fp8", "promoted"): layer_table})
    assert "finder" not in vars(tables)
    _preload.prepare_choices()
    assert "finder" in vars(tables)
    assert "finder" in vars(layer_table)
    misses = _dispatch._finder.cache_info().misses
    _dispatch.select("fp8", "promoted", 77, 128, 4096, 2048, 132)
    assert _dispatch._finder.cache_info().misses == misses


def test_a_decision_says_what_it_rests_on(tables):
    problem = _dispatch.Problem("fp8", "promoted", 1024, 128, 3072, 4096, 132)
    decision = _dispatch.decide(problem, matching_configs("fp8", "promoted"), tables)
    assert (decision.config.id, decision.source) == (WIDE, "table")
    assert decision.reason.startswith("least of 3 estimates, ")
    assert "128x4096x1536 with 1024 rows, 100.0 us at best; rows.jsonl" in decision.reason
    far = _dispatch.decide(
        problem._replace(sm_count=78), matching_configs("fp8", "promoted"), tables
    )
    assert far.source == "cost model"
    # None of its kernels may be taken: the model over those that may.
    others = [c for c in matching_configs("fp8", "promoted") if c.id not in NAMES]
    assert _dispatch.decide(problem, tuple(others), tables).config in others


def test_a_layers_kernels_are_those_that_it_can_take():
    gated = "gated_fp8p_w128_t64", "layer_fp8p_w64_t32"
    choices = (f"{gated[0]}+{MIDDLE}", gated[1], f"{gated[1]}+swap_fp8p_w64_t16_split2")
    table = make(choices=choices)

    def allowed(second="promoted", plain=True, either=True, split_k=True):
        finder = _fused_moe_kernels._finder(table, second, plain, either, split_k, False)
        return finder and finder.allowed

    assert allowed() == allowed(plain=False) == 0b111
    assert allowed(split_k=False) == 0b011
    assert allowed(either=False) == 0b101
    # No kernel that sums fast is in the table; one that runs both GEMMs may stand in.
    assert allowed(second="fast") == 0b010
    assert allowed(second="block") is None
    finder = _fused_moe_kernels._finder(table, "promoted", True, True, True, False)
    names = [[all_configs()[index].id for index in kernels] for kernels in finder.kernels]
    assert ["+".join(dict.fromkeys(pair)) for pair in names] == list(choices)


@pytest.mark.parametrize("scale", ["tensor", "channel"])
def test_a_layer_gets_what_is_explained_of_it(scale, monkeypatch):
    choices = (
        "gated_fp8p_w128_t64+swap_fp8p_w128_t64",
        "layer_fp8p_w64_t16",
        "gated_fp8p_plain+swap_fp8f_w256_t128",
    )
    tables = {("fp8", "promoted"): make(choices=choices)}
    monkeypatch.setattr(_fused_moe_kernels, "LAYER_TABLES", tables)
    for accumulate, tokens in itertools.product(("promoted", "fast"), (1, 64, 8192)):
        cell = Cell(get_case("qwen3-30b"), STAGES, tokens, "fp8", "uniform", op=LAYER)
        layer = layer_of(cell, Variant("fp8", scale, accumulate))
        asked = layer, accumulate, False, False, 132
        _fused_moe_kernels.choose_kernels.cache_clear()
        kernels = _fused_moe_kernels.choose_kernels(*asked)
        assert kernels == _fused_moe_kernels.decide_kernels(*asked).kernels
    _fused_moe_kernels.choose_kernels.cache_clear()
