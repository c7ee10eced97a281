"""What `bench.stability` decides before and after it times: calls, percentiles, rows, tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import dispatch_host, stability, stability_page
from bench.measure import Environment
from bench.processes import ProcessLog
from bench.stability_child import policy_of, run_child
from bench.stability_layer import LAYERS, make_calls
from bench.stability_plan import Setting, plan_calls, predicted_us, tail_of, token_counts
from bench.stability_rows import StabilityRow, latest_rows, load_stability_rows, to_json
from bench.stability_time import Pass, TimedCall

pytestmark = pytest.mark.filterwarnings("ignore:moe_ext. no CUDA device")

SETTING = Setting(
    provider="moe_ext",
    case_name="qwen3-30b",
    dtype="fp8",
    scale="block128",
    routing="zipf0.6",
    num_calls=6,
    max_tokens=8,
    same_tokens=None,
    seed=7,
    preload=False,
    dry_run=True,
)
CPU = Environment(torch.device("cpu"), "cpu", "abc123")


def test_a_setting_survives_json() -> None:
    assert Setting.from_json(SETTING.to_json()) == SETTING


def test_percentiles_are_calls() -> None:
    values = [float(number) for number in range(2000, 0, -1)]
    assert tail_of(values) == (1000, 1980, 1998, 2000)
    assert tail_of([3.0]) == (3, 3, 3, 3)


def test_token_counts_differ_and_are_spread_over_the_doublings() -> None:
    setting = replace(SETTING, num_calls=2000, max_tokens=8192)
    counts = token_counts(setting)
    assert counts == token_counts(setting) != token_counts(replace(setting, seed=8))
    assert len(set(counts)) == 2000
    assert min(counts) == 1
    assert 1024 < max(counts) <= 8192
    assert 50 < sum(count <= 64 for count in counts) <= 64
    first = sum(counts[:1000]) / sum(counts)
    assert 0.4 < first < 0.6, "small counts must not come first"


def test_the_same_token_count() -> None:
    assert token_counts(replace(SETTING, same_tokens=64)) == [64] * 6


def test_too_few_token_counts() -> None:
    with pytest.raises(ValueError, match=r"`num_calls` must be at most `max_tokens` = 8 .* got 9"):
        token_counts(replace(SETTING, num_calls=9))


def test_every_call_has_a_routing_and_a_floor_of_its_own() -> None:
    calls = plan_calls(replace(SETTING, same_tokens=16))
    for call in calls:
        assert sum(call.rows_of_experts) == call.ids.numel()
        assert call.floor_us > 2
    assert len({tuple(call.ids.flatten().tolist()) for call in calls}) == len(calls)


def test_the_model_expects_more_of_more_tokens() -> None:
    setting = replace(SETTING, dry_run=False, num_calls=2)
    few, many = (plan_calls(replace(setting, same_tokens=count))[0] for count in (1, 512))
    assert few.floor_us < predicted_us(setting, few) < predicted_us(setting, many)


def test_each_call_takes_its_rows_and_the_next_weights() -> None:
    planned = plan_calls(SETTING)
    calls = make_calls(SETTING, planned, CPU.device, policy_of(SETTING))
    for index, call in enumerate(planned):
        out = calls.run(index, index)
        assert out.shape == (call.num_tokens, SETTING.case.hidden_size)
        assert bool(out.isfinite().all())
    assert not torch.equal(calls.run(0, 0), calls.run(0, 1))
    assert torch.equal(calls.run(0, 0), calls.run(0, calls.problem.plan.copies))


def test_a_summary_is_of_walls_devices_and_floors() -> None:
    timed = [TimedCall(4, wall, 10.0, 5.0) for wall in (20.0, 30.0, 25.0)]
    columns = stability.summary(Pass(timed, 3 * 2**19))
    assert (columns["p50_us"], columns["max_us"]) == (25, 30)
    assert (columns["ratio_p50"], columns["ratio_max"]) == (5, 6)
    assert (columns["device_p99_us"], columns["device_ratio_p99"]) == (10, 2)
    assert columns["late_mib"] == 1.5
    assert columns["calls"][1] == (4, 30, 10, 5)


def test_a_provider_that_fails_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(scale: str, scales: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setitem(LAYERS, "moe_ext", fail)
    row = stability.measure_calls(SETTING, CPU, ProcessLog(), None, children=False)
    assert row.skipped_reason == "RuntimeError: no kernel image"
    assert row.p50_us is None
    assert "no kernel image" in stability_page.page([row])


def test_a_child_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"first_call in a fresh process failed: .*no-such-case"):
        run_child("first_call", replace(SETTING, case_name="no-such-case"))


def test_questions_to_the_dispatcher_do_not_repeat() -> None:
    questions = dispatch_host.questions(3000)
    assert len(set(questions)) == 3000
    assert {question[:2] for question in questions[:4]} == set(dispatch_host.KINDS)


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, tables, picture = (tmp_path / name for name in ("rows.jsonl", "page.md", "page.png"))
    arguments = ["--dry-run", "--providers", "moe_ext,vllm", "--commit", "abc123"]
    arguments += ["--all-tokens", "--same-tokens", "4", "--out", str(out)]
    assert stability.main([*arguments, "--markdown", str(tables)]) == 0
    printed = capsys.readouterr().out
    assert "all T: p50" in printed
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["op"] for row in rows] == ["stability", "stability"]
    assert [row["num_tokens"] for row in rows] == [None, 4]
    for row in rows:
        assert row["num_calls"] == len(row["calls"]) == 12
        assert row["first_call_ms"] > 0
        assert row["compilations"] == 0
        assert 0 < row["p50_us"] <= row["p99_us"] <= row["p999_us"] <= row["max_us"]
    assert "moe_ext, qwen3-30b-dry-run FP8 block128, T = 4 |" in tables.read_text()
    pytest.importorskip("matplotlib")
    assert stability.main(["--read", str(out), "--plot", str(picture)]) == 0
    assert picture.stat().st_size > 0


def test_a_dry_run_writes_nothing_that_was_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--dry-run", "--no-children", "--same-tokens", "4", "--commit", "abc123"]
    assert stability.main([*arguments, "--providers", "moe_ext"]) == 0
    assert not list(tmp_path.iterdir())
    assert "T = 4: p50" in capsys.readouterr().out
    assert stability.main([*arguments, "--markdown", "page.md"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]
    assert "moe_ext, qwen3-30b-dry-run FP8 block128, T = 4 |" in Path("page.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--calls", "0"], "--calls: must be a whole number of at least 1, got '0'"),
        (["--calls", "2.5"], "--calls: must be a whole number of at least 1, got '2.5'"),
        (["--max-tokens", "-8"], "--max-tokens: must be a whole number of at least 1, got '-8'"),
        (["--same-tokens", "64,0"], "--same-tokens: must be a whole number of at least 1, got '0'"),
        (["--same-tokens", ""], "--same-tokens: must be a whole number of at least 1, got ''"),
        (["--seed", "-1"], "--seed: must be a whole number of at least 0, got '-1'"),
        (["--providers", "moe"], "--providers: must be among moe_ext,vllm, got 'moe'"),
        (
            ["--calls", "9", "--max-tokens", "8"],
            "--calls: must be at most --max-tokens = 8 for token counts that all differ, got 9",
        ),
    ],
)
def test_numbers_that_make_no_sense_are_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as raised:
        stability.main(["--dry-run", "--no-children", *arguments])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_choice_alone_needs_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, tables = tmp_path / "rows.jsonl", tmp_path / "page.md"
    assert stability.main(["--dispatch-host", "--out", str(out), "--markdown", str(tables)]) == 0
    rows = load_stability_rows(out)
    assert [row.met_before for row in rows] == [False, True]  # type: ignore[union-attr]
    assert all(0 < row.us <= row.max_us for row in rows)  # type: ignore[union-attr]
    assert "## Dispatch on the host" in tables.read_text()
    assert "choice, new:" in capsys.readouterr().out


def test_a_later_row_replaces_an_earlier_one() -> None:
    columns = {"device": "cpu", "torch": "2", "cuda": "", "commit": "a"}
    row = StabilityRow(
        "stability", "moe_ext", "mixtral", "bf16", "none", "uniform", None, 9, False, **columns
    )
    newer, other = replace(row, commit="b"), replace(row, num_tokens=64)
    assert latest_rows([row, other, newer]) == [newer, other]
    assert json.loads(to_json(row))["calls"] == []
