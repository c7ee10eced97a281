"""The regret report: problems that nobody tuned for, and the arithmetic of what a choice costs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.bench_rows import make_row

from bench import contest, regret
from bench.candidates import candidates, choice
from bench.cases import ROUTINGS, TOKENS
from bench.draws import draw_all, draw_key
from bench.floors import floor_us
from bench.layer import LAYER_SCALES
from bench.measure import Environment
from bench.ops import LAYER, PAIR
from bench.problem import make_plan
from bench.regret_cases import (
    KINDS,
    MOST_FLOOR_US,
    MOST_POOL_BYTES,
    NUM_CASES,
    SEED,
    held_out,
    pool_bound,
    sizes_of,
    tuned_sizes,
)
from bench.regret_page import page
from bench.regret_rows import (
    RegretCaseRow,
    RegretRow,
    latest_cases,
    load_regret_rows,
    summarise_regret,
    to_json,
    verdicts,
)
from bench.scales import SCALES
from bench.timing import TimingPolicy

CPU = Environment(torch.device("cpu"), "cpu", "abc123")
EVERY = [held_out(number) for number in range(NUM_CASES)]


# cases


def test_there_are_enough_and_they_never_change() -> None:
    assert NUM_CASES == len(EVERY) >= 300
    assert held_out(17) == EVERY[17] != held_out(17, SEED + 1)
    first = EVERY[0].cell
    assert (first.case.name, first.num_tokens, first.routing) == (
        "128x4096x1024-top8",
        5,
        "zipf0.6",
    )


def test_the_documentation_counts_them() -> None:
    text = (Path(regret.__file__).parent.parent / "docs" / "dispatch.md").read_text()
    assert f"\n{NUM_CASES} problems that the tuner does not see" in text


def test_the_tuner_sees_none_of_them() -> None:
    for case in EVERY:
        assert sizes_of(case.cell.case) not in tuned_sizes()
        assert case.cell.num_tokens not in TOKENS


def test_every_kind_meets_every_skew_equally_often() -> None:
    met = Counter((case.cell.op, case.variant, case.cell.routing) for case in EVERY)
    assert len(met) == len(KINDS) * len(ROUTINGS)
    assert set(met.values()) == {8}
    assert {variant.scale for op, variant in KINDS if op == PAIR} == {"none", *SCALES}
    assert {variant.scale for op, variant in KINDS if op == LAYER} == {"none", *LAYER_SCALES}
    assert {variant.accumulate for _, variant in KINDS} == {"fp32", "promoted", "fast"}
    first = EVERY[:42]
    assert len({(case.cell.op, case.variant, case.cell.routing) for case in first}) == 42


def test_sizes_and_tokens_are_spread() -> None:
    sizes = {sizes_of(case.cell.case) for case in EVERY}
    assert len(sizes) > 250
    odd = sum(case.cell.case.intermediate_size % 128 != 0 for case in EVERY)
    assert odd > len(EVERY) / 4
    few = sum(case.cell.num_tokens < 16 for case in EVERY)
    many = sum(case.cell.num_tokens >= 1024 for case in EVERY)
    assert min(few, many) > len(EVERY) / 8
    assert sum(case.cell.case.model == "none" for case in EVERY) > 60


def test_every_case_can_run_within_memory_and_time() -> None:
    for case in EVERY:
        layer, cell = case.cell.case, case.cell
        element = 1 if cell.dtype == "fp8" else 2
        assert layer.hidden_size * element % 16 == 0
        assert layer.intermediate_size * element % 16 == 0
        assert 0 < layer.top_k <= min(layer.num_experts, 32)
        assert pool_bound(cell) <= MOST_POOL_BYTES
        active = min(layer.num_experts, cell.num_rows)
        assert floor_us(cell.work(active), cell.dtype) <= MOST_FLOOR_US
        assert choice(cell, case.variant) in candidates(cell, case.variant)


@pytest.mark.parametrize("number", range(0, NUM_CASES, 24))
def test_pools_are_large_enough(number: int) -> None:
    cell = EVERY[number].cell
    key = draw_key(cell.case, cell.num_tokens, cell.routing)
    plan = make_plan(cell, draw_all([key])[key], TimingPolicy())
    assert plan.pool_bytes <= pool_bound(cell)


# arithmetic


def rows_of(times: Sequence[tuple[str, float | None, float | None]]) -> list:
    return [
        make_row(
            config=name,
            median_us=median,
            again_us=again,
            skipped_reason="" if median else "wrong result",
        )
        for name, median, again in times
    ]


def case_row(times: Sequence[tuple[str, float | None, float | None]], **changes) -> RegretCaseRow:
    case = EVERY[0]
    counts = np.zeros((1, case.cell.case.num_experts), dtype=np.int64)
    counts[0, :40] = 1
    plan = make_plan(case.cell, counts, TimingPolicy())
    row = regret.row_of(case, plan, rows_of(times), SEED, "", "table")
    return replace(row, **changes)


def test_regret_is_the_mean_of_both_timings_over_the_bests() -> None:
    row = case_row([("chosen", 102.0, 104.0), ("best", 100.0, 100.0), ("slow", 130.0, None)])
    assert row.regret == pytest.approx(0.03)
    assert (row.chosen, row.chosen_us, row.best, row.best_us) == ("chosen", 103.0, "best", 100.0)
    assert row.times == {"chosen": 102.0, "best": 100.0, "slow": 130.0}
    assert (row.case, row.num_tokens, row.routing) == ("128x4096x1024-top8", 5, "zipf0.6")


def test_the_best_choice_has_no_regret() -> None:
    row = case_row([("chosen", 100.0, 101.0), ("other", 101.0, None)])
    assert (row.regret, row.best) == (0.0, "chosen")


def test_a_second_timing_can_turn_the_order() -> None:
    row = case_row([("chosen", 101.0, 99.0), ("lucky", 99.5, 102.0)])
    assert (row.regret, row.best) == (0.0, "chosen")


def test_a_choice_without_a_time_is_skipped_and_said() -> None:
    row = case_row([("chosen", None, None), ("other", 100.0, 100.0)])
    assert row.regret is None
    assert row.skipped_reason == "wrong result"
    summary = summarise_regret([row])
    assert (summary.num_cases, summary.num_skipped, summary.mean) == (0, 1, None)
    assert verdicts(summary) == {"mean": False, "p95": False, "worst": False}
    assert "- 0, 128x4096x1024-top8, pair BF16, T = 5: wrong result" in page([row])


def cases_with(regrets: Sequence[float]) -> list[RegretCaseRow]:
    row = case_row([("chosen", 100.0, 100.0)])
    return [replace(row, number=number, regret=value) for number, value in enumerate(regrets)]


def test_a_summary_is_of_all_cases() -> None:
    values = [0.001 * number for number in range(100)]
    summary = summarise_regret(cases_with(values[::-1]))
    assert summary.op == "dispatch_regret"
    assert (summary.mean, summary.p95, summary.worst) == (0.0495, 0.094, 0.099)
    assert summary.num_cases == 100
    assert verdicts(summary) == {"mean": False, "p95": False, "worst": True}
    assert "mean 4.95 % (over 1.5 %)" in regret.line_of(summary)
    single = summarise_regret(cases_with([0.01]))
    assert (single.mean, single.p95, single.worst) == (0.01, 0.01, 0.01)


def test_a_later_row_replaces_an_earlier_one() -> None:
    first, second = cases_with([0.5, 0.1])
    newer = replace(first, regret=0.2)
    summary = summarise_regret([first])
    assert latest_cases([first, summary, second, newer]) == [newer, second]


def test_rows_survive_json(tmp_path: Path) -> None:
    rows = [*cases_with([0.1]), summarise_regret(cases_with([0.1]))]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(to_json(row) + "\n" for row in rows))
    assert load_regret_rows(path) == rows


# page


def test_the_page_has_parts_and_the_worst() -> None:
    cases = cases_with([0.001 * number for number in range(40)])
    cases[39] = replace(cases[39], disagreement="a took 100.0 us, then 110.0", source="cost model")
    text = page([*cases, summarise_regret(cases)])
    assert "| 40 | 0 | 1 | 1.95 % | 3.70 % | 3.90 % |" in text
    assert "| bar |  |  | 1.5 % | 5 % | 12 % |" in text
    assert "| pair, BF16 | 40 | 1.95 % | 3.70 % | 3.90 % |" in text
    assert "| T = 1 to 15 | 40 |" in text
    assert "| chosen by cost model | 1 | 3.90 % |" in text
    worst = text[text.index("## The worst") :]
    assert worst.index("3.90 % (unsteady)") < worst.index("3.80 %")
    assert "1.40 %" not in worst
    assert "## Skipped" not in text
    assert "No case has been timed" in page([])


# command line


def report_dry(out: Path, *more: str) -> int:
    command = ["--dry-run", "--cases", "14", "--commit", "abc123", "--out", str(out)]
    return regret.main([*command, *more])


@pytest.mark.filterwarnings("ignore:moe_ext. no CUDA device")
def test_a_run_goes_on_where_the_last_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contest, "STEADY", math.inf)  # times of a CPU are no times
    out, markdown = tmp_path / "rows.jsonl", tmp_path / "page.md"
    assert report_dry(out, "--limit-seconds", "0") == 0
    assert "1 of 14 cases timed" in capsys.readouterr().out
    with out.open("a") as file:
        file.write('{"op": "dispatch_regret_ca')
    assert report_dry(out) == 0
    assert "14 cases, 1 of them done" in capsys.readouterr().out
    rows = load_regret_rows(out)
    assert [row.op for row in rows].count("dispatch_regret") == 2
    assert [row.number for row in latest_cases(rows)] == list(range(14))
    assert isinstance(rows[-1], RegretRow)
    assert (rows[-1].num_cases, rows[-1].num_skipped) == (14, 0)
    assert report_dry(out) == 0
    assert load_regret_rows(out) == rows
    assert regret.main(["--read", str(out), "--markdown", str(markdown)]) == 0
    assert "| layer, FP8 block128 | 1 |" in markdown.read_text()
    assert "dispatch_regret over 14 cases" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:moe_ext. no CUDA device")
def test_cases_that_disagree_are_timed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(contest, "STEADY", -1.0)
    assert report_dry(out, "--cases", "2") == 0
    assert all(row.disagreement for row in latest_cases(load_regret_rows(out)))
    monkeypatch.setattr(contest, "STEADY", math.inf)
    assert report_dry(out, "--cases", "2") == 0
    assert not any(row.disagreement for row in latest_cases(load_regret_rows(out)))
    assert len([row for row in load_regret_rows(out) if isinstance(row, RegretCaseRow)]) == 4


def test_a_file_is_read_with_the_choices_of_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cell, variant = EVERY[0].cell, EVERY[0].variant
    now = choice(cell, variant)
    row = case_row([("gone", 100.0, 100.0), ("other", 120.0, 120.0)])
    for times, regret_now in (
        ({"gone": 100.0, now: 110.0}, 0.1),
        ({"gone": 100.0}, None),
        ({"gone": 100.0, now: None}, None),
    ):
        newer = regret.rechosen(replace(row, times=times))
        assert (newer.chosen, newer.best, newer.best_us) == (now, "gone", 100.0)
        assert newer.regret == (None if regret_now is None else pytest.approx(regret_now))
        assert bool(newer.skipped_reason) == (regret_now is None)
    path = tmp_path / "rows.jsonl"
    path.write_text(to_json(replace(row, times={"gone": 100.0, now: 110.0})) + "\n")
    assert regret.main(["--read", str(path), "--now"]) == 0
    assert "mean 10.00 %" in capsys.readouterr().out


def test_the_bars_can_fail_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    for value, code in ((0.01, 0), (0.2, 1)):
        path.write_text(to_json(cases_with([value])[0]) + "\n")
        assert regret.main(["--read", str(path), "--check"]) == code
        assert regret.main(["--read", str(path)]) == 0
    path.write_text(to_json(summarise_regret(cases_with([0.2]))) + "\n")  # and no case
    assert regret.main(["--read", str(path)]) == 1
    assert "no case has been timed" in capsys.readouterr().out


def test_the_summary_has_the_issues_columns() -> None:
    columns = json.loads(to_json(summarise_regret(cases_with([0.1]))))
    assert columns["op"] == "dispatch_regret"
    assert {"mean", "p95", "worst", "num_cases"} <= set(columns)


@pytest.mark.parametrize("number", range(14))
def test_a_choice_rests_on_something(number: int) -> None:
    case = EVERY[number]
    parts = regret.source_of(case.cell, case.variant).split(" and ")
    assert set(parts) <= {"table", "cost model", "likeness"}
