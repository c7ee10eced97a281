"""The choice of a kernel: total, pure, within what is compiled; the table has provenance."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import moe_ext
import pytest
from moe_ext import _dispatch
from moe_ext._configs import matching_configs
from moe_ext._dispatch_rows import Row
from moe_ext._dispatch_table import KEPT_FOR_TUNING, TABLES, WHOLE_ROWS

from bench.candidates import choice
from bench.cases import STAGES, get_case
from bench.ops import PAIR
from bench.problem import Cell
from bench.providers.base import Variant, joined

KINDS = [
    ("bf16", "fp32"),
    ("fp8", "promoted"),
    ("fp8", "fast"),
    ("fp8", "block"),
    ("fp8", "shifted"),
]
ROWS = [0, 1, 2, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536, 131072]
# (num_groups, n, k) of both GEMMs of layers in use, whole and as shards.
SHAPES = [
    (8, 28672, 4096),
    (8, 4096, 14336),
    (8, 7168, 4096),
    (8, 4096, 3584),
    (128, 1536, 2048),
    (128, 2048, 768),
    (128, 384, 2048),
    (128, 2048, 192),
    (128, 352, 4096),
    (128, 4096, 176),
    (256, 512, 7168),
    (256, 7168, 256),
    (32, 4096, 7168),
    (32, 7168, 2048),
    (128, 5760, 2880),
    (128, 2880, 2880),
    (512, 1024, 2048),
    (512, 2048, 512),
    (1, 4096, 4096),
    (4096, 64, 64),
    (3, 8, 16),
    (3, 8, 0),
]


def choose(kind, num_rows, shape, **options):
    num_groups, n, k = shape
    return _dispatch.choose(
        dtype=kind[0],
        accumulate=kind[1],
        num_rows=num_rows,
        num_groups=num_groups,
        n=n,
        k=k,
        **options,
    )


@pytest.mark.parametrize("sm_count", [78, 114, 132])
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_selection_is_total_and_fits_the_operands(kind, sm_count):
    fitting = matching_configs(*kind)
    for num_rows, shape in itertools.product(ROWS, SHAPES):
        decision = choose(kind, num_rows, shape, sm_count=sm_count)
        assert decision.config in fitting
        assert decision.source in ("table", "cost model")
        assert decision.reason


def test_selection_is_pure():
    for kind, num_rows, shape in itertools.product(KINDS, ROWS, SHAPES):
        first = choose(kind, num_rows, shape)
        assert choose(kind, num_rows, shape) == first


def test_select_gives_the_index_of_the_choice():
    index = _dispatch.select(
        dtype="fp8", accumulate="fast", num_rows=64, num_groups=8, n=256, k=256, sm_count=132
    )
    assert index == choose(("fp8", "fast"), 64, (8, 256, 256)).config.index


def test_bf16_ignores_accumulate():
    assert choose(("bf16", "promoted"), 64, SHAPES[0]) == choose(("bf16", "fp32"), 64, SHAPES[0])


@pytest.mark.parametrize("kind", TABLES, ids="-".join)
def test_tables_name_compiled_kernels_and_their_measurement(kind):
    table = TABLES[kind]
    assert (table.dtype, table.accumulate) == (kind[0], kind[1].removesuffix("_swapped"))
    assert set(table.kernels()) <= {c.id for c in matching_configs(kind[0], table.accumulate)}
    assert set(table.costs) == set(table.kernels())
    assert "jsonl" in table.where
    assert all(len(problem.times_us) == len(table.choices) for problem in table.problems)


@pytest.mark.parametrize("sums", WHOLE_ROWS)
def test_rows_of_limits_name_compiled_kernels_and_their_measurement(sums):
    for row in WHOLE_ROWS[sums]:
        assert (row.dtype, row.accumulate) == ("fp8", sums)
        assert row.config in {config.id for config in matching_configs("fp8", sums)}
        assert "jsonl" in row.measurement


def test_pairs_of_named_layers_get_what_was_measured_to_be_near_the_best():
    path = Path(__file__).parent.parent / "bench/results/probes/pairs-l2-128-2026-11-30.jsonl"
    times = {}
    for row in map(json.loads, path.read_text().splitlines()):
        if row["card"] == 1:
            cell = times.setdefault((row["case"], row["num_tokens"], row["scale"]), {})
            cell[joined([row["gate_up"], row["down"]])] = row["median_us"]
    regrets = []
    for (case, tokens, scale), measured in times.items():
        dtype = "bf16" if scale == "none" else "fp8"
        cell = Cell(get_case(case), STAGES, tokens, dtype, "zipf0.6", op=PAIR)
        accumulate = "fp32" if scale == "none" else "promoted"
        mine = measured.get(choice(cell, Variant(dtype, scale, accumulate)))
        if mine is not None:  # of some only newer rows have a time
            regrets.append(mine / min(measured.values()))
    assert len(regrets) > 0.8 * len(times)
    assert max(regrets) < 1.05
    assert sum(regrets) / len(regrets) < 1.005


def test_every_kernel_is_chosen_somewhere_or_kept_on_purpose():
    kinds_rows_shapes = itertools.product(KINDS, ROWS, SHAPES)
    chosen = {choose(*problem).config.id for problem in kinds_rows_shapes}
    for kind, table in TABLES.items():
        for problem in table.problems:
            n, k = 2 * problem.intermediate_size, problem.hidden_size
            shape = (problem.num_groups, n, k)
            chosen.add(choose(kind, problem.num_rows, shape).config.id)
    ids = {config.id for config in moe_ext.kernels() if config.output == "rows"}
    assert ids - chosen - KEPT_FOR_TUNING == set()
    assert ids >= KEPT_FOR_TUNING


def test_first_matching_row_wins_and_other_problems_go_to_the_table(monkeypatch):
    configs = matching_configs("fp8", "promoted")
    limits = {"max_rows_per_group": 2, "max_num_rows": 100, "min_weight_tiles": 8}
    rows = (
        Row("fp8", "promoted", configs[-1].id, "first", **limits),
        Row(
            "fp8",
            "promoted",
            configs[0].id,
            "second",
            max_rows_per_group=8,
            min_n=64,
            max_k=512,
            min_weight_tiles=8,
        ),
    )

    monkeypatch.setattr(_dispatch, "WHOLE_ROWS", {"promoted": rows})
    table = TABLES["fp8", "promoted"]

    def reason(num_rows, num_groups=8, n=64, k=256, sm_count=132):
        problem = _dispatch.Problem("fp8", "promoted", num_rows, num_groups, n, k, sm_count)
        return _dispatch.decide(problem, configs, table)

    assert reason(16) == (configs[-1], "table", "first")
    assert reason(17) == (configs[0], "table", "second")
    assert reason(101, num_groups=64) == (configs[0], "table", "second")
    for unmatched in (
        reason(65),
        reason(64, n=56),
        reason(64, k=528),
        reason(16, sm_count=78),
        reason(14, num_groups=7),
    ):
        assert unmatched.reason.startswith("least of ")
    problem = _dispatch.Problem("fp8", "promoted", 16, 8, 64, 256, 132)
    assert _dispatch.decide(problem, configs, None).source == "cost model"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[1] != "shifted"], ids="-".join)
def test_few_weights_are_not_given_to_a_few_wide_tiles(kind):
    """One expert of DeepSeek-V3 a GPU: 4096 rows of weights are 16 tiles of 256, 64 of 64."""
    decision = choose(kind, 64, (1, 4096, 7168))
    assert 4096 // decision.config.tile_weights * decision.config.split_k >= 32


def test_cost_model_follows_the_weights_at_few_rows_and_the_products_at_many():
    for kind in KINDS:
        best = choose(kind, 65536, (128, 4096, 4096)).config

        def predict(num_rows, active, config, kind=kind):
            problem = _dispatch.Problem(*kind, num_rows, 128, 4096, 4096, 132)
            return _dispatch.predict_us(config, problem, active)

        for config in matching_configs(*kind):
            assert predict(0, 0, config) == _dispatch.LAUNCH_US
            assert predict(16, 16, config) > 1.5 * predict(8, 8, config)
            assert predict(65536, 128, config) > 1.5 * predict(32768, 128, config)
        floor = _dispatch.floor_us(kind[0], 65536, 128, 4096, 4096)
        # Where blocks begin inside k everything is multiplied twice.
        most = 4 if kind[1] == "shifted" else 2
        assert floor <= predict(65536, 128, best) < most * floor


def test_floor_is_the_formula():
    # 128 experts of 1536 x 2048 bytes at 4.5 TB/s, then 65536 rows at 1350 TFLOP/s, plus 2 us.
    assert _dispatch.floor_us("fp8", 512, 128, 1536, 2048) == pytest.approx(2 + 89.478, abs=1e-3)
    assert _dispatch.floor_us("fp8", 65536, 128, 1536, 2048) == pytest.approx(2 + 305.4, abs=0.1)


@pytest.mark.parametrize(
    ("num_rows", "num_groups", "expected"), [(0, 8, 0), (1, 8, 1), (8, 128, 8), (10**6, 128, 128)]
)
def test_expected_active_groups(num_rows, num_groups, expected):
    assert _dispatch.expected_active_groups(num_rows, num_groups) == expected
