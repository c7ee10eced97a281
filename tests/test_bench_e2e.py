"""`bench.e2e_transformers`: a miniature on the CPU, going on where a file ends, tables and bars."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from moe_ext.integrations.transformers import register
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from bench import e2e_transformers
from bench.e2e_model import MODEL, TINY, experts_error, make_model, register_stub, to_fp8
from bench.e2e_page import e2e_markdown, misses, plot
from bench.e2e_rows import DECODE, TTFT, E2ERow, latest_rows, load_e2e_rows
from bench.e2e_time import POSITION, TooSlow, time_to_first_token
from bench.e2e_transformers import Cell, Grid, Runner
from bench.measure import Environment

# What Transformers warns of is not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

BF16 = ("--dry-run", "--samples", "1", "--dtypes", "bf16", "--metrics", TTFT)


def run(out, *arguments):
    return e2e_transformers.main(["--out", str(out), *arguments])


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("e2e") / "rows.jsonl"
    arguments = ("--implementations", "moe_ext,grouped_mm,deepgemm", "--dry-run", "--samples", "1")
    assert run(out, *arguments) == 0
    return out


def test_rows_of_a_miniature(measured):
    rows = load_e2e_rows(measured)
    assert len(rows) == 2 * 3 * 4  # dtypes, implementations, cells
    assert {row.op for row in rows} == {"e2e_transformers"}
    for row in rows:
        if row.implementation == "moe_ext":
            assert row.value > 0, row
            assert 0 <= row.experts_share < 1
            assert row.max_err < 0.1
            per_second = row.batch / row.call_ms * 1e3
            expected = row.call_ms if row.metric == TTFT else per_second
            assert row.value == pytest.approx(expected, rel=0.01)
        if row.implementation == "deepgemm":
            assert row.value is None
            assert row.skipped_reason


def test_a_run_goes_on_where_its_file_ends(measured, tmp_path, capsys):
    lines = measured.read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["dtype"] == "bf16"]
    out = tmp_path / "rows.jsonl"
    out.write_text("".join(kept[:-1]))
    arguments = ("--implementations", "moe_ext,grouped_mm,deepgemm", "--dry-run", "--dtypes")
    assert run(out, *arguments, "bf16", "--samples", "1") == 0
    assert len(load_e2e_rows(out)) == len(kept)
    capsys.readouterr()
    assert run(out, *arguments, "bf16") == 0
    assert "model made" not in capsys.readouterr().out


def test_the_limit_of_seconds(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert run(out, *BF16, "--implementations", "grouped_mm", "--limit-seconds", "0") == 0
    assert len(load_e2e_rows(out)) == 1
    assert "run again to go on" in capsys.readouterr().out


def test_a_wrong_implementation_is_not_timed(tmp_path, monkeypatch):
    def wrong(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states * float("nan")

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "batched_mm", wrong)
    out = tmp_path / "rows.jsonl"
    assert run(out, *BF16, "--implementations", "batched_mm") == 0
    assert {row.skipped_reason for row in load_e2e_rows(out)} == {"wrong: error nan, over 0.02"}


def test_a_slow_call_is_left_out():
    model = make_model(TINY, torch.device("cpu"))
    with pytest.raises(TooSlow, match=r"a call took .* s, over 0 s"):
        time_to_first_token(model, 1, 4, samples=1, max_seconds=0)


def test_fp8_experts_of_the_model():
    model = make_model(TINY, torch.device("cpu"))
    before = {name: p for name, p in model.named_parameters() if "experts" not in name}
    to_fp8(model, torch.device("cpu"))
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert {p.dtype for name, p in after.items() if name.endswith("gate_up_proj")} == {
        torch.float8_e4m3fn
    }
    assert not any(p.is_meta for p in after.values())
    model.set_experts_implementation("moe_ext")
    assert 1e-4 < experts_error(model) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_miniature_on_the_gpu(dtype):
    register()
    register_stub()
    environment = Environment.detect("cuda", "none")
    model = make_model(TINY, environment.device)
    if dtype == "fp8":
        to_fp8(model, environment.device)
    cells = (Cell(DECODE, 2, POSITION), Cell(TTFT, 2, 16))
    runner = Runner(model, dtype, Grid(TINY, cells, 1, 60.0), environment)
    names = ("moe_ext", "grouped_mm", "eager") if dtype == "bf16" else ("moe_ext",)
    for name in names:
        step, prompt = runner.rows(name, cells)
        for measured_row in (step, prompt):
            assert measured_row.value, measured_row
        assert step.captured is (name != "eager")


def row(implementation, metric, batch, prompt_tokens, call_ms, share=0.5):
    value = call_ms if metric == TTFT else batch / call_ms * 1e3
    return E2ERow(
        op="e2e_transformers",
        model=MODEL,
        dtype="bf16",
        implementation=implementation,
        metric=metric,
        batch=batch,
        prompt_tokens=prompt_tokens,
        value=value,
        call_ms=call_ms,
        experts_share=share,
        captured=metric == DECODE,
        num_samples=3,
        max_err=0.01,
        skipped_reason="",
        device="NVIDIA H200",
        torch="2.11",
        transformers="5.17",
        commit="abc",
    )


def test_bars():
    good = [
        row("moe_ext", DECODE, 1, 512, 9.0, 0.2),
        row("batched_mm", DECODE, 1, 512, 12.0),
        row("grouped_mm", DECODE, 1, 512, 14.0),
        row("moe_ext", TTFT, 1, 2048, 70.0),
        row("grouped_mm", TTFT, 1, 2048, 100.0),
    ]
    assert misses(good) == []
    bad = [
        row("moe_ext", DECODE, 64, 512, 90.0, 0.9),
        row("grouped_mm", DECODE, 64, 512, 97.0, 0.9),
        row("moe_ext", TTFT, 1, 8192, 200.0),
        row("grouped_mm", TTFT, 1, 8192, 300.0),
    ]
    assert misses(bad) == [
        "bf16 decode_tokens_per_s batch 64 at 512: 1.08 times grouped_mm, 1.1",
        "bf16 decode_tokens_per_s batch 64 at 512, experts: 0.93 of grouped_mm, 0.6",
        "bf16 ttft_ms batch 1 at 8192: 0.67 of grouped_mm, 0.65",
    ]
    assert misses([replace(one, dtype="fp8") for one in bad]) == []


def test_tables():
    skipped = replace(
        row("batched_mm", TTFT, 1, 2048, 1.0), value=None, call_ms=None, skipped_reason="out of it"
    )
    rows = [
        row("moe_ext", TTFT, 1, 2048, 70.0),
        row("grouped_mm", TTFT, 1, 2048, 105.0),
        skipped,
        replace(skipped, prompt_tokens=8192),
    ]
    text = e2e_markdown(rows)
    assert "| 1 | 2048 | 70 (70, 50%) | 105 (105, 50%) |  | 1.50 |" in text
    assert "- bf16 batched_mm, ttft_ms batch 1 at 2048; ttft_ms batch 1 at 8192: out of it" in text


def test_a_row_with_a_value_is_kept():
    one = row("moe_ext", TTFT, 1, 2048, 70.0)
    again, failed = replace(one, value=60.0), replace(one, value=None)
    assert latest_rows([one, again, failed]) == [again]
    assert latest_rows([failed, one]) == [one]


def test_plot(measured, tmp_path):
    pytest.importorskip("matplotlib")
    plot(load_e2e_rows(measured), tmp_path / "e2e.png")
    assert (tmp_path / "e2e.png").stat().st_size > 1000


def test_report_of_a_file(measured, capsys):
    assert e2e_transformers.main(["--read", str(measured), "--check"]) == 0
    assert "Milliseconds to the first token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--implementations", "fast"], "'fast' must be one of moe_ext, grouped_mm"),
        (["--samples", "0", "--dry-run"], "--samples must be at least 1, got 0"),
        (["--read", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        e2e_transformers.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
