"""The kernels of a whole layer: a measured choice where there is one, in any case what fits."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from moe_ext._activations import CONCATENATED
from moe_ext._configs import all_configs
from moe_ext._dispatch_points import Points
from moe_ext._dispatch_table_layer import LAYER_TABLES
from moe_ext._fused_moe_checks import Layer
from moe_ext._fused_moe_kernels import choose_kernels, decide_kernels
from moe_ext._fused_moe_scales import WeightScale

from bench.cases import get_case

BY_ID = {config.id: config for config in all_configs()}
SCALES = {"none": None, "channel": WeightScale("row", 1), "block128": WeightScale("1x128", 1)}
ROWS = [
    json.loads(line)
    for line in (
        Path(__file__).parent.parent / "bench/results/probes/layer-choices-2026-11-30.jsonl"
    )
    .read_text()
    .splitlines()
]


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
    if isinstance(table, Points):
        named = [kernels.split("+") for shape in table.tuned for _, kernels, _ in shape.choices]
        return [(names[0], names[-1]) for names in named]
    return [(row.config, down) for row, down in table]


@pytest.mark.parametrize("kind", LAYER_TABLES, ids="-".join)
def test_measured_kernels_are_compiled_and_fit(kind):
    dtype, accumulate = kind[0], kind[1].removesuffix("_swapped")
    for names in pairs_of(LAYER_TABLES[kind]):
        gate_up, down = (BY_ID[name] for name in names)
        assert gate_up.output in ("gated", "either")
        assert (gate_up.dtype, gate_up.accumulate) == (dtype, accumulate)
        assert (down.dtype, down.accumulate) == (dtype, accumulate)
        assert down == gate_up or down.output == "rows"


def test_a_decision_says_why():
    measured = decide_kernels(
        layer_of("qwen3-30b-tp4", 128, "channel"), "promoted", False, False, 132
    )
    assert measured.source == "table"
    assert "jsonl" in measured.reason
    like = decide_kernels(layer_of("mixtral", 1, "channel"), "promoted", False, False, 132)
    assert like.source == "likeness"
    assert like.reason.startswith("most like swap_fp8p_")
    other = decide_kernels(layer_of("mixtral", 1, "channel"), "promoted", False, False, 78)
    assert other.source == "cost model"


@pytest.mark.parametrize("scale", SCALES)
def test_choices_are_near_the_best_that_was_measured(scale):
    times = {}
    for row in ROWS:
        if row["scale"] == scale:
            cell = times.setdefault((row["case"], row["num_tokens"]), {})
            cell[row["gate_up"], row["down"]] = row["median_us"]
    regrets = []
    for (case, tokens), measured in times.items():
        gate_up, down = chosen(layer_of(case, tokens, scale))
        mine = measured.get((gate_up.id, down.id), measured[("-", "-")])  # "-": as chosen then
        regrets.append(mine / min(measured.values()))
    assert len(regrets) == 84
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
    here, there = (choose_kernels(layer, "promoted", False, False, sms) for sms in (132, 78))
    assert all_configs()[here.gate_up].id == "gated_fp8p_w128_t64"
    assert all_configs()[there.gate_up].id != all_configs()[here.gate_up].id
