"""The kernels of a whole layer: a measured choice where there is one, in any case what fits."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from moe_ext import _fused_moe_kernels
from moe_ext._activations import CONCATENATED
from moe_ext._configs import all_configs
from moe_ext._dispatch_measured import Measured
from moe_ext._dispatch_table_layer import LAYER_TABLES
from moe_ext._fused_moe_checks import Layer
from moe_ext._fused_moe_kernels import choose_kernels, decide_kernels
from moe_ext._fused_moe_scales import WeightScale

from bench.cases import get_case

BY_ID = {config.id: config for config in all_configs()}
SCALES = {"none": None, "channel": WeightScale("row", 1), "block128": WeightScale("1x128", 1)}
RESULTS = Path(__file__).parent.parent / "bench/results"


def rows_of(name):
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def measured_times(scale):
    """Microseconds by case and tokens, then by the kernels of both GEMMs; of newer rows if any."""
    times, newer = {}, {}
    for row in rows_of("probes/layer-choices-2026-11-30.jsonl"):
        if row["scale"] == scale:
            cell = times.setdefault((row["case"], row["num_tokens"]), {})
            cell[row["gate_up"], row["down"]] = row["median_us"]
    for row in rows_of("tuning-layers-2026-12-01.jsonl"):
        key = row["case"], row["num_tokens"]
        if row["scale"] == scale and key in times:
            gate_up, _, down = row["config"].partition("+")
            newer.setdefault(key, {})[gate_up, down or gate_up] = row["median_us"]
    return times | newer


def layer_of(case, tokens, scale):
    case = get_case(case)
    return Layer(
        num_tokens=tokens,
        top_k=case.top_k,
        hidden_size=case.hidden_size,
        intermediate_size=case.intermediate_size,
        num_experts=case.num_experts,
        fp8=scale != "none",
        activation="swiglu",
        gated=True,
        alpha=1.0,
        limit=math.inf,
        gate_up_layout=CONCATENATED,
        w13_scale=SCALES[scale],
        w2_scale=SCALES[scale],
    )


def chosen(layer, accumulate="promoted", bias=False, batch_invariant=False):
    kernels = choose_kernels(layer, accumulate, bias, batch_invariant, 132)
    return all_configs()[kernels.gate_up], all_configs()[kernels.down]


def pairs_of(table):
    """The kernels of both GEMMs that a table names."""
    named = [choice.split("+") for choice in table.choices]
    return [(names[0], names[-1]) for names in named]


@pytest.mark.parametrize("kind", LAYER_TABLES, ids="-".join)
def test_measured_kernels_are_compiled_and_fit(kind):
    dtype, accumulate = kind[0], kind[1].removesuffix("_swapped")
    for names in pairs_of(LAYER_TABLES[kind]):
        gate_up, down = (BY_ID[name] for name in names)
        assert gate_up.output in ("gated", "either")
        assert (gate_up.dtype, gate_up.accumulate) == (dtype, accumulate)
        fast = ("fast",) if accumulate == "promoted" else ()  # of layers that allow it
        assert down.dtype == dtype
        assert down.accumulate in (accumulate, *fast)
        assert down == gate_up or down.output == "rows"


def decided(layer, sm_count=132):
    return decide_kernels(layer, "promoted", False, False, sm_count)


def test_a_decision_says_why(monkeypatch):
    layer = layer_of("qwen3-30b-tp4", 128, "channel")
    measured = decided(layer)
    assert measured.source == "table"
    assert "jsonl" in measured.reason
    monkeypatch.setattr(_fused_moe_kernels, "LAYER_TABLES", {})
    like = decided(layer)
    assert like.source == "likeness"
    assert like.reason.startswith("most like swap_fp8p_")
    assert "jsonl" in like.reason
    assert decided(layer, 78).source == "cost model"


def test_what_was_measured_of_a_layer_decides(monkeypatch):
    choices = (
        "gated_fp8p_w128_t64+swap_fp8p_w64_t16",
        "layer_fp8p_w64_t32",
        "layer_fp8p_w64_t16+swap_fp8p_w64_t16_split2",
    )
    names = {name for choice in choices for name in choice.split("+")}
    table = Measured(
        "fp8",
        "promoted",
        choices=choices,
        costs=dict.fromkeys(names, (2.0, 1.0, 0.12, 1.1, 1.05, 0.6, 0.3)),
        common=(4.0, 1.0, 3.0),
        problems="""
            8 4096 14336 16 100.0 0 500 500
            8 4096 14336 600 300.0 500 0 500
            8 4096 14336 8192 900.0 500 400 0""",
        where="rows.jsonl",
    )
    monkeypatch.setattr(_fused_moe_kernels, "LAYER_TABLES", {("fp8", "promoted"): table})
    for tokens, expected in ((8, 0), (300, 1), (4096, 2)):
        decision = decided(layer_of("mixtral", tokens, "channel"))
        ids = [all_configs()[index].id for index in decision.kernels]
        assert ids in ([*choices[expected].split("+")], 2 * [choices[expected]])
        assert decision.source == "table"
        assert decision.reason.endswith("rows.jsonl")
    assert decided(layer_of("mixtral", 8, "channel"), 78).source == "cost model"
    # Nothing that splits K where every row has to get the same sums; no table of bf16 at all.
    invariant = layer_of("mixtral", 4096, "channel")
    kernels = decide_kernels(invariant, "promoted", False, True, 132).kernels
    assert all(all_configs()[index].split_k == 1 for index in kernels)
    assert "most like" in decided(layer_of("mixtral", 8, "none")).reason


@pytest.mark.parametrize("scale", SCALES)
def test_choices_are_near_the_best_that_was_measured(scale):
    times = measured_times(scale)
    regrets = []
    for (case, tokens), measured in times.items():
        gate_up, down = chosen(layer_of(case, tokens, scale))
        mine = measured.get((gate_up.id, down.id))  # of some only rows of drawn ones have a time
        if mine is not None:
            regrets.append(mine / min(measured.values()))
    assert len(times) == 84
    assert len(regrets) > 60
    assert max(regrets) < 1.05
    assert sum(regrets) / len(regrets) < 1.01


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("tokens", [1, 3, 16, 100, 512, 3000])
@pytest.mark.parametrize("case", ["qwen3-30b", "qwen3-30b-tp4", "glm-4.5-air-tp8", "mixtral"])
def test_every_option_gets_kernels_that_fit(case, tokens, scale):
    layer = layer_of(case, tokens, scale)
    sums = {"none": "fp32", "channel": "promoted", "block128": "block"}[scale]
    for accumulate in ("promoted", "fast") if scale == "channel" else ("promoted",):
        for batch_invariant in (False, True):
            for bias in (False, True):
                gate_up, down = chosen(layer, accumulate, bias, batch_invariant)
                assert gate_up.accumulate == sums
                fast = accumulate == "fast" and not batch_invariant and down.output == "rows"
                assert down.accumulate == ("fast" if fast else sums)
                assert not (batch_invariant and down.split_k > 1)


def test_another_number_of_sms_has_no_measured_choice():
    layer = layer_of("qwen3-30b-tp4", 128, "channel")
    assert decided(layer).source == "table"
    assert decided(layer, 78).source == "cost model"


@pytest.mark.parametrize("scale", ["channel", "block128"])
def test_kernels_for_few_k_run_what_they_were_measured_to_be_best_for(scale):
    assert chosen(layer_of("glm-4.5-air-tp8", 64, scale))[1].order == "SwapABRows"
    for case in ("qwen3-30b-tp4", "shard-256", "deepseek-v3-tp8"):
        assert chosen(layer_of(case, 64, scale))[1].order != "SwapABRows"
