"""The tuner: which kernels it times on a cell, what it makes of two timings, how it goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from moe_ext._configs import all_configs, config_indices
from support.bench_rows import make_row, write_rows

from bench import contest, run, tune, tune_cells
from bench.appending import open_to_append
from bench.candidates import candidates, choice, layer_of
from bench.cases import STAGES, get_case, tuned_case_names
from bench.clock import SPINS, mhz_of
from bench.contest import Likeness, both_us, disagreement, hold_contest
from bench.measure import Environment, make_plans, make_pool
from bench.ops import GEMM, LAYER, PAIR
from bench.power import Schedule
from bench.problem import Cell, Plan
from bench.providers.base import Variant, joined, kernels_of
from bench.providers.moe_ext import MoeExt
from bench.providers.moe_ext_layer import MoeExtLayer, chosen
from bench.rows import Row, load_rows
from bench.timing import TimingPolicy, first_pass
from bench.tune_cells import latest_visits, results_by_cell

CPU = Environment(torch.device("cpu"), "cpu", "abc123")
BF16 = Variant("bf16", "none", "fp32")
TENSOR = Variant("fp8", "tensor", "promoted")
FAST = Variant("fp8", "tensor", "fast")
BLOCK = Variant("fp8", "block128", "promoted")


def cell_of(case: str, tokens: int, variant: Variant, op: str = PAIR) -> Cell:
    return Cell(get_case(case), STAGES, tokens, variant.dtype, "zipf0.6", op=op)


# candidates


@pytest.mark.parametrize("variant", [BF16, TENSOR, FAST, BLOCK], ids=str)
@pytest.mark.parametrize("op", [PAIR, LAYER])
@pytest.mark.parametrize("case", ["qwen3-30b", "glm-4.5-air-tp8"])
@pytest.mark.parametrize("tokens", [1, 512])
def test_candidates_fit_and_the_dispatchers_choice_is_first(
    case: str, op: str, tokens: int, variant: Variant
) -> None:
    cell = cell_of(case, tokens, variant, op)
    names = candidates(cell, variant)
    assert names[0] == choice(cell, variant)
    assert len(set(names)) == len(names) > 5
    for name in names:
        first, second = (all_configs()[config_indices()[kernel]] for kernel in kernels_of(name, 2))
        assert first.output in (("gated", "either") if op == LAYER else ("rows",))
        assert second.output == "rows" or second == first
        assert {first.dtype, second.dtype} == {variant.dtype}


def test_a_gemm_alone_has_every_kernel_of_its_kind() -> None:
    cell = replace(cell_of("mixtral", 16, TENSOR, GEMM), stages=("down",))
    kinds = [c for c in all_configs() if (c.accumulate, c.output) == ("promoted", "rows")]
    assert set(candidates(cell, TENSOR)) == {config.id for config in kinds}


def test_only_the_down_gemm_of_unaligned_blocks_runs_in_plain_order() -> None:
    aligned, unaligned = (
        candidates(cell_of(case, 4096, BLOCK), BLOCK) for case in ("qwen3-30b", "glm-4.5-air-tp8")
    )
    assert "plain_fp8b_w256_t128" in aligned
    assert "swap_fp8b_w128_t128+plain_fp8b_w256_t128" in unaligned
    assert not any(name.startswith("plain") for name in unaligned)
    assert "swap_fp8b_w64_t16+plain_fp8b_w256_t128" not in unaligned


@pytest.mark.parametrize("scale", ["none", "tensor", "tensor_static", "channel", "block128"])
def test_a_layer_without_tensors_is_the_ops_own(scale: str) -> None:
    from moe_ext._fused_moe_checks import check_fused_moe

    from bench.layer import make_layer, make_layer_scales

    dtype = "bf16" if scale == "none" else "fp8"
    variant = Variant(dtype, scale, "promoted")
    case = replace(get_case("mixtral").shrunk(), hidden_size=256, intermediate_size=192)
    [plan] = make_plans(LAYER, [case], [16], [dtype], ["uniform"], run.DRY_RUN_POLICY)
    problem = make_layer(plan, make_pool([plan], dtype, CPU.device))
    scales = make_layer_scales(problem, scale)._asdict()
    checked = check_fused_moe("fused_moe", problem.out, *problem.operands(0), **scales)
    assert layer_of(plan.cell, variant) == checked
    assert joined(chosen(problem, variant, 132).split("+")) == choice(plan.cell, variant)


@pytest.mark.filterwarnings("ignore:moe_ext. no CUDA device")
def test_each_gemm_of_a_pair_can_have_a_kernel_of_its_own() -> None:
    from bench.measure import make_out_buffers, measure
    from bench.problem import make_problem

    case = replace(get_case("mixtral").shrunk(), intermediate_size=192)
    plans = make_plans(PAIR, [case], [16], ["fp8"], ["uniform"], run.DRY_RUN_POLICY)
    pool = make_pool(plans, "fp8", CPU.device)
    problem = make_problem(plans[0], pool, make_out_buffers(plans, CPU.device))
    for config, refused in (
        ("swap_fp8b_w128_t128+plain_fp8b_w256_t128", False),
        ("plain_fp8b_w256_t128", True),
    ):
        variant = replace(BLOCK, config=config)
        row = measure(MoeExt(), variant, problem, run.DRY_RUN_POLICY, CPU)
        assert row.config == config
        assert row.skipped_reason.startswith("ValueError") == refused


# contests


def fake_measure(
    times: dict[str, list[float]], seen: list[tuple[str, float]]
) -> Callable[..., Row]:
    def measure(provider, variant, problem, policy, environment, *, give_up_us, stop_us, judge):
        seen.append((variant.config, give_up_us))
        time_us = times[variant.config].pop(0)
        reason = "wrong result" if math.isnan(time_us) else ""
        return make_row(
            config=variant.config, median_us=None if reason else time_us, skipped_reason=reason
        )

    return measure


def contest_of(
    times: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch, **options
) -> tuple[list[Row], list[tuple[str, float]]]:
    seen: list[tuple[str, float]] = []
    monkeypatch.setattr(contest, "measure", fake_measure(times, seen))
    variants = [replace(BF16, config=name) for name in times]
    policy = run.DRY_RUN_POLICY
    return hold_contest(MoeExt(), variants, None, policy, CPU, now=lambda: 0.0, **options), seen


def test_the_first_and_the_fastest_are_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"a": [100.0, 102.0], "b": [80.0, 82.0], "c": [90.0]}
    rows, seen = contest_of(times, monkeypatch)
    assert [row.again_us for row in rows] == [102.0, 82.0, None]
    assert [row.visit for row in rows] == ["1970-01-01T00:00:00Z"] * 3
    assert seen == [("a", math.inf), ("b", 125.0), ("c", 100.0), ("a", math.inf), ("b", math.inf)]
    assert disagreement(rows) == ""
    assert both_us(rows[0]) == 101.0


def test_a_first_pass_is_followed_by_one_of_those_near_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {"a": [100.0, 102.0], "b": [80.0, 82.0], "c": [83.0, 81.0], "d": [85.0]}
    rows, _ = contest_of(times, monkeypatch, first_pass=first_pass(run.DRY_RUN_POLICY))
    assert [row.again_us for row in rows] == [102.0, 82.0, 81.0, None]
    short = first_pass(TimingPolicy())
    assert (short.samples, short.warmup, short.power.pause_s) == (3, 2, 0.05)


def test_a_wrong_kernel_is_neither_best_nor_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = contest_of({"a": [math.nan], "b": [80.0, 80.0], "c": [90.0]}, monkeypatch)
    assert [row.again_us for row in rows] == [None, 80.0, None]
    rows, _ = contest_of({"a": [math.nan]}, monkeypatch)
    assert disagreement(rows) == "no kernel has a time"


def test_timings_and_clocks_that_disagree_are_named() -> None:
    best = make_row(config="a", median_us=100.0, again_us=102.0, sm_mhz=1980.0)
    near = make_row(config="b", median_us=103.0, sm_mhz=1950.0)
    far = make_row(config="c", median_us=130.0, sm_mhz=1200.0)
    assert disagreement([best, near, far]) == ""
    assert disagreement([near, far]) == "no kernel was timed twice"
    again = replace(best, again_us=104.0)
    assert disagreement([again, near]) == "a took 100.0 us, then 104.0"
    slow = replace(near, sm_mhz=1900.0)
    assert disagreement([best, slow, far]) == "b ran at 1900 MHz, a at 1980"
    # No rival.
    assert disagreement([best, replace(slow, median_us=106.0), far]) == ""


def test_outputs_are_held_to_the_first_that_was_right(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [(0.5, 0.01), (0.002, 0.01)]
    monkeypatch.setattr(contest, "judge_error", lambda *_: errors.pop(0))
    likeness = Likeness()
    out = torch.randn(4, 8)
    assert likeness.judge(None, BF16, [out]) == (0.5, 0.01)
    assert likeness.judge(None, BF16, [out]) == (0.002, 0.01)
    off = out.clone()
    off[0, 0] += 0.05 * out.abs().max()
    assert likeness.judge(None, BF16, [out])[0] == 0
    assert likeness.judge(None, BF16, [off])[0] == pytest.approx(0.05, rel=1e-3)
    off[1, 1] = math.nan
    assert likeness.judge(None, BF16, [off])[0] == math.inf


def test_bursts_end_where_a_kernel_is_too_slow() -> None:
    schedule = Schedule(bursts=4, discarded=1, timed=2, pause_s=0.1)
    pauses: list[float] = []
    assert schedule.collect(lambda n: [9.0, 5.0, 6.0], pauses.append, 4.9) == [5.0, 6.0]
    assert len(pauses) == 1
    assert len(schedule.collect(lambda n: [9.0, 5.0, 6.0], pauses.append, 5.0)) == 8


def test_the_clock_is_what_two_spins_differ_by() -> None:
    launch_us, mhz = 3.0, 1980.0
    assert mhz_of([launch_us + cycles / mhz for cycles in SPINS]) == pytest.approx(mhz)


# cells


def test_a_cell_is_its_last_visit() -> None:
    old = [make_row(config="a", visit="1"), make_row(config="b", visit="1")]
    new = [make_row(config="b+b", visit="2"), make_row(config="c+d", visit="2")]
    other = make_row(config="a", num_tokens=64)
    cells = latest_visits([*new, *old, other, make_row(provider="torch"), make_row(config="b")])
    assert [[row.config for row in rows] for rows in cells.values()] == [["b", "c+d"], ["a"]]


def test_regret_is_the_dispatchers_time_over_the_best() -> None:
    fast = make_row(op=GEMM, stage="down", config="b", median_us=100.0)
    slow = replace(fast, config="a", median_us=102.0, again_us=104.0)
    result = tune_cells.CellResult([fast, slow], dispatched="a")
    assert result.best.config == "b"
    assert result.regret == pytest.approx(0.03)
    assert "dispatcher a +3.0%" in result.describe()
    assert "3.00% slower" in tune_cells.summary([result])
    assert math.isnan(tune_cells.CellResult([fast], dispatched="gone").regret)


def test_the_dispatcher_is_asked_as_it_is_now() -> None:
    cell = cell_of("qwen3-30b", 16, BLOCK, LAYER)
    name = choice(cell, BLOCK)
    row = make_row(op=LAYER, case="qwen3-30b", dtype="fp8", scale="block128", accumulate="promoted")
    rows = [replace(row, config=name), replace(row, config="other", median_us=600.0)]
    [result] = results_by_cell(rows)
    assert result.dispatched == name
    assert result.regret == pytest.approx(620 / 600 - 1)


# command line


def tune_dry(out: Path, *more: str) -> None:
    command = ["--dry-run", "--cases", "mixtral", "--tokens", "1,16", "--dtypes", "bf16"]
    assert tune.main([*command, "--commit", "abc123", "--out", str(out), *more]) == 0


def names_of(rows: Sequence[Row]) -> list[tuple[str, int, str]]:
    return [(row.op, row.num_tokens, row.config) for row in rows]


@pytest.mark.filterwarnings("ignore:moe_ext. no CUDA device")
def test_a_run_goes_on_where_the_last_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contest, "STEADY", math.inf)  # times of a CPU are no times
    out = tmp_path / "rows.jsonl"
    tune_dry(out)
    rows = load_rows(out)
    assert {(row.op, row.num_tokens) for row in rows} == {
        (op, tokens) for op in (PAIR, LAYER) for tokens in (1, 16)
    }
    assert sum(row.again_us is not None for row in rows) in range(4, 9)
    assert "4 cells, 0 of them done" in capsys.readouterr().out
    tune_dry(out)
    assert load_rows(out) == rows
    assert "4 cells, 4 of them done" in capsys.readouterr().out
    # A run that was cut off in the middle of a cell: that cell is timed again, whole.
    cut = [row for row in rows if (row.op, row.num_tokens) == (LAYER, 16)]
    text = out.read_text().splitlines()[: -len(cut) + 3]
    out.write_text("\n".join(text) + '\n{"op": "fused')
    tune_dry(out)
    assert names_of(load_rows(out)[: len(text)]) == names_of(rows)[: len(text)]
    assert names_of(load_rows(out)[len(text) :]) == names_of(cut)
    assert "1 left" not in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:moe_ext. no CUDA device")
def test_cells_that_disagree_are_timed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(contest, "STEADY", -1.0)
    tune_dry(out, "--op", PAIR, "--configs", "swap_bf16_w128_t64", "--tokens", "1")
    first = load_rows(out)
    assert {row.config for row in first} == {"swap_bf16_w128_t64", first[0].config}
    assert "1 cells that disagree with themselves" in capsys.readouterr().out
    tune_dry(out, "--op", PAIR, "--configs", "swap_bf16_w128_t64", "--tokens", "1")
    assert len(load_rows(out)) == 2 * len(first)


@pytest.mark.filterwarnings("ignore:moe_ext. no CUDA device")
def test_a_spent_budget_leaves_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    tune_dry(out, "--budget", "-1")
    assert out.read_text() == ""
    assert "0 cells in 0 s, 4 left" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:moe_ext. no CUDA device")
def test_drawn_problems_are_read_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contest, "STEADY", math.inf)  # times of a CPU are no times
    out = tmp_path / "rows.jsonl"
    tune_dry(out, "--draw", "4", "--dtypes", "bf16,fp8")
    assert "4 cells, 0 of them done" in capsys.readouterr().out
    rows = load_rows(out)
    assert len({row.case for row in rows if row.median_us is not None}) == 4
    assert len(results_by_cell(rows)) == 4
    tune_dry(out, "--draw", "5", "--dtypes", "bf16,fp8")
    assert "5 cells, 4 of them done" in capsys.readouterr().out
    tune_dry(tmp_path / "bf16.jsonl", "--draw", "4")
    assert "1 cells, 0 of them done" in capsys.readouterr().out


def test_defaults_are_what_tables_are_made_of() -> None:
    args = tune.build_parser().parse_args([])
    assert args.cases == tuned_case_names()
    assert args.op == [PAIR, LAYER]
    assert (args.scales, args.samples) == (["tensor", "block128"], 7)
    sums = [(v.scale, v.accumulate) for v in tune.variants_of(PAIR, "fp8", args)]
    assert sums == [("tensor", "promoted"), ("block128", "promoted")]
    assert sums == [(v.scale, v.accumulate) for v in tune.variants_of(LAYER, "fp8", args)]


def test_a_layers_cells_are_those_of_promoted_sums() -> None:
    args = tune.build_parser().parse_args(["--accumulate", "fast,promoted", "--scales", "tensor"])
    of_pair, of_layer = (
        [v.accumulate for v in tune.variants_of(op, "fp8", args)] for op in (PAIR, LAYER)
    )
    assert (of_pair, of_layer) == (["fast", "promoted"], ["promoted"])


def test_an_unknown_op_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.build_parser().parse_args(["--op", "gemm"])
    assert "got gemm" in capsys.readouterr().err


def test_a_cut_off_line_is_dropped(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [make_row()])
    with path.open("a") as file:
        file.write('{"op":')
    with open_to_append(path) as file:
        file.write(make_row(config="b").to_json() + "\n")
    assert [row.config for row in load_rows(path)] == ["swap+swap", "b"]
    with open_to_append(tmp_path / "new.jsonl"):
        pass
    assert (tmp_path / "new.jsonl").read_text() == ""


@pytest.mark.filterwarnings("ignore:moe_ext. no CUDA device")
def test_a_layers_kernels_can_be_named() -> None:
    from bench.layer import make_layer
    from bench.measure import measure

    [plan] = make_plans(
        LAYER, [get_case("mixtral").shrunk()], [4], ["bf16"], ["uniform"], run.DRY_RUN_POLICY
    )
    problem = make_layer(plan, make_pool([plan], "bf16", CPU.device))
    variant = replace(BF16, config="layer_bf16_w64_t16+swap_bf16_w64_t32")
    row = measure(MoeExtLayer(), variant, problem, run.DRY_RUN_POLICY, CPU)
    assert (row.config, row.skipped_reason) == (variant.config, "")


def test_a_cell_that_comes_again_is_timed_with_its_own_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[tuple[Cell, str, str]] = []
    made: list[Cell] = []

    def make_problem(plan: Plan, pool: object, buffers: object) -> Cell:
        made.append(plan.cell)
        return plan.cell

    def hold(
        provider: object, variants: Sequence[Variant], problem: Cell, *rest: object, **more: object
    ) -> list[Row]:
        held.append((problem, variants[0].scale, variants[0].config))
        return []

    monkeypatch.setattr(tune, "make_problem", make_problem)
    monkeypatch.setattr(tune, "hold_contest", hold)
    few, more = (
        replace(cell_of("mixtral", tokens, TENSOR), case=get_case("mixtral").shrunk())
        for tokens in (2, 4)
    )
    # The first cell comes again, with other scales, behind the second.
    asked = [(few, TENSOR), (more, BLOCK), (few, BLOCK), (more, TENSOR)]
    jobs = [(cell, variant, [f"{cell.num_tokens}"]) for cell, variant in asked]
    list(tune.contests(jobs, [], run.DRY_RUN_POLICY, CPU, quick_first=False))
    assert sorted((str(c.num_tokens), scale) for c, scale, _ in held) == sorted(
        (str(cell.num_tokens), variant.scale) for cell, variant in asked
    )
    assert all(str(cell.num_tokens) == config for cell, _, config in held)
    assert made == [few, more]
