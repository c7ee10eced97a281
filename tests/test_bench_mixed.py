"""`bench.mixed`: its mixtures, rows and bars."""

from __future__ import annotations

import dataclasses

import pytest

from bench.cases import get_case
from bench.floors import LAUNCH_US, READ_BYTES_PER_US
from bench.measure import make_plans
from bench.mixed import main, make_mixture
from bench.mixed_rows import FEW, HALF, bars, load_mixed_rows
from bench.timing import TimingPolicy


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("mixed") / "rows.jsonl"
    assert main(["--dry-run", "--out", str(out)]) == 0
    return out


def test_a_dry_run_writes_both_mixtures(dry_run, capsys):
    rows = load_mixed_rows(dry_run)
    assert {(row.mixture, row.num_tokens) for row in rows} == {(FEW, 1), (FEW, 16), (HALF, 16)}
    for row in rows:
        assert row.op == "fused_moe_mixed"
        assert row.skipped_reason == ""
        assert row.max_err is not None
        assert row.max_err < 0.05
        assert row.uniform_fp8_us
        assert row.uniform_bf16_us
        assert row.bf16_share == (0.375 if row.mixture == FEW else 0.5)
    main(["--read", str(dry_run)])
    assert capsys.readouterr().out.count("in BF16") == 3


def test_the_floor_counts_experts_in_bf16_twice():
    (plan,) = make_plans(
        "fused_moe", [get_case("qwen3-30b")], [64], ["fp8"], ["uniform"], TimingPolicy()
    )
    few, half = make_mixture(FEW, plan), make_mixture(HALF, plan)
    assert len(few.bf16) == 3
    assert len(set(half.bf16)) == 64
    assert 0 < few.bytes_share < 0.06
    assert abs(half.bytes_share - 0.5) < 0.05
    expected = plan.work.weight_bytes * (1 + half.bytes_share) / READ_BYTES_PER_US + LAUNCH_US
    assert half.floor_us == pytest.approx(expected)


def test_bars(dry_run):
    row = dataclasses.replace(
        load_mixed_rows(dry_run)[0],
        mixture=FEW,
        num_tokens=64,
        median_us=106.0,
        ratio_to_floor=1.378,
        uniform_fp8_us=100.0,
        uniform_bf16_us=200.0,
        uniform_fp8_ratio_to_floor=1.3,
    )
    prefill = dataclasses.replace(row, num_tokens=8192)
    half = dataclasses.replace(row, mixture=HALF, bf16_bytes_share=0.5, median_us=154.0)
    slow = dataclasses.replace(half, median_us=155.0)
    absent = dataclasses.replace(row, median_us=None, skipped_reason="why")
    verdicts = bars([row, prefill, half, slow, absent])
    assert [bar.passed for bar in verdicts] == [True, False, True, False, None]
