"""The bench of conversions, in miniature: rows and bars."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from moe_ext.precision import convert_checkpoint

pytest.importorskip("safetensors")
from bench import convert
from bench.cases import Case
from bench.convert_rows import (
    CONVERT_BEGIN,
    CONVERT_END,
    ConvertRow,
    load_convert_rows,
    misses,
    section,
)

ROOT = Path(convert.__file__).parent.parent
PAGE = ROOT / "docs/cli.md"
ROWS = ROOT / "bench/results/convert-2026-11-30.jsonl"
ROW = ConvertRow(
    op="convert",
    case="qwen3-30b",
    num_layers=2,
    num_experts=128,
    hidden_size=2048,
    intermediate_size=768,
    scales="block",
    bf16_share=0.02,
    workers=2,
    cpus=2,
    input_bytes=2**31,
    output_bytes=2**30,
    layer_bytes=2**30,
    seconds=(3.0, 2.0),
    mb_per_s=600.0,
    peak_mib=50.0,
    load=0.0,
    where="ext4",
    device="cpu",
    torch="2.13.0",
    commit="abc",
)


def test_a_miniature_is_measured_in_processes_of_its_own(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    arguments = ["--dry-run", "--runs", "2", "--dir", str(tmp_path), "--out", str(out)]
    assert convert.main([*arguments, "--commit", "abc", "--scales", "block"]) == 0
    assert "MB/s" in capsys.readouterr().out
    (row,) = load_convert_rows(out)
    assert (row.op, row.commit, len(row.seconds)) == ("convert", "abc", 2)
    assert row.mb_per_s == pytest.approx(row.input_bytes / min(row.seconds) / 1e6, abs=0.1)
    assert row.output_bytes < row.input_bytes
    assert row.layer_bytes == row.input_bytes // 2
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_bars():
    assert misses([ROW]) == []
    assert misses([replace(ROW, mb_per_s=499.0)]) == ["qwen3-30b block, 2 workers: 499 MB/s of 500"]
    assert misses([replace(ROW, peak_mib=2048.0)]) == [
        "qwen3-30b block, 2 workers: 2048 MiB of 2048"
    ]


def test_files_are_read_and_refused_in_a_line(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text(ROW.to_json() + "\n")
    assert load_convert_rows(path) == [ROW]
    assert convert.main(["--read", str(path), "--check"]) == 0
    path.write_text('{"op": "other"}\n')
    with pytest.raises(SystemExit) as error:
        convert.main(["--read", str(path)])
    assert error.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_committed_rows_meet_the_bars():
    rows = load_convert_rows(ROWS)
    assert {row.scales for row in rows} == {"block", "channel", "tensor"}
    assert all(row.num_experts == 128 and row.num_layers == 2 for row in rows)
    assert misses(rows) == []


def test_the_page_is_made_of_the_committed_rows(tmp_path):
    text = PAGE.read_text()
    assert text == convert.replace_section(
        text, section(load_convert_rows(ROWS)), CONVERT_BEGIN, CONVERT_END
    )
    page = tmp_path / "page.md"
    page.write_text(f"a\n{CONVERT_BEGIN}\nold\n{CONVERT_END}\nb\n")
    assert convert.main(["--read", str(ROWS), "--markdown", str(page)]) == 0
    assert "old" not in page.read_text()
    assert "2 layers of qwen3-30b" in page.read_text()


def test_without_rows_the_page_says_so():
    assert section([]) == "Nothing has been measured yet."


def test_the_input_can_be_converted(tmp_path):
    case = Case("tiny", "none", num_experts=5, top_k=2, hidden_size=64, intermediate_size=32)
    convert.write_input(tmp_path / "in", case, 2)
    plan = convert.plan_for(case, 2, "block")
    done = convert_checkpoint(tmp_path / "in", plan, tmp_path / "out")
    assert done.num_bytes < done.input_bytes
