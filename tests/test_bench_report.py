"""The benchmark's reports: tables, plot, bars, comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.bench_rows import make_row, write_rows

from bench import bars, report, tables
from bench.peers import load_deep_gemm
from bench.rows import Row, latest

# rows and reports


def test_latest_row_wins() -> None:
    rows = [make_row(median_us=1.0), make_row(num_tokens=4), make_row(median_us=2.0)]
    assert sorted(row.median_us or 0 for row in latest(rows)) == [2.0, 620.0]


def small_results() -> list[Row]:
    rows = []
    for tokens in (1, 16, 8192):
        for provider, dtype, accumulate, scale, median in (
            ("moe_ext", "bf16", "fp32", "none", 620.0),
            ("moe_ext", "fp8", "promoted", "tensor", 320.0),
            ("moe_ext", "fp8", "fast", "tensor", 318.0),
            ("torch", "bf16", "fp32", "none", 930.0),
            ("torch", "fp8", "fast", "channel", 480.0),
        ):
            rows.append(
                make_row(
                    provider=provider,
                    dtype=dtype,
                    accumulate=accumulate,
                    scale=scale,
                    num_tokens=tokens,
                    median_us=median,
                    ratio_to_floor=round(median / 600, 4),
                )
            )
    return rows


def test_report_writes_markdown(tmp_path: Path) -> None:
    results = write_rows(tmp_path / "rows.jsonl", small_results())
    out = tmp_path / "out.md"
    assert report.main([str(results), "--markdown", str(out)]) == 0
    text = out.read_text()
    assert "| mixtral | 620.0 / 1.03 / 18 | 620.0 / 1.03 / 18 | 620.0 / 1.03 / 18 |" in text
    assert "| mixtral | torch | 1.50x (930.0) | 1.50x (930.0) | 1.50x (930.0) |" in text
    assert "NVIDIA H200; torch 2.11.0+cu130; CUDA 13.0; commit abc123" in text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_report_writes_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = write_rows(tmp_path / "rows.jsonl", small_results())
    out = tmp_path / "out.png"
    assert report.main([str(results), "--plot", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_report_rewrites_only_the_readme_section(tmp_path: Path) -> None:
    results = write_rows(tmp_path / "rows.jsonl", small_results())
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{tables.BEGIN}\nstale table\n{tables.END}\nbelow\n")
    assert report.main([str(results), "--readme", str(readme)]) == 0
    text = readme.read_text()
    assert text.startswith(f"above\n{tables.BEGIN}\n")
    assert text.endswith(f"\n{tables.END}\nbelow\n")
    assert "stale" not in text
    assert "| mixtral | BF16 | 1.03 | 1.03 | 1.03 | 18 | 1.5x (1.5x) |" in text


def test_readme_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="bench:begin"):
        tables.replace_section("no markers", "table")


def test_compare_lists_what_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write_rows(tmp_path / "old.jsonl", [make_row(), make_row(num_tokens=64)])
    new = write_rows(
        tmp_path / "new.jsonl",
        [make_row(median_us=650.0), make_row(num_tokens=64, median_us=630.0)],
    )
    assert report.main([str(new), "--compare", str(old)]) == 1
    printed = capsys.readouterr().out
    assert "T=16: 620.0 -> 650.0 us (+4.8%)" in printed
    assert "T=64" not in printed


# bars


@pytest.mark.parametrize(
    ("case", "dtype", "tokens", "floor", "limit"),
    [
        ("qwen3-30b", "fp8", 64, 100.0, 112.0),
        ("mixtral", "bf16", 128, 600.0, 652.0),
        ("mixtral", "bf16", 256, 600.0, 676.0),
        ("deepseek-v3-tp8", "bf16", 64, 100.0, 112.0),
        ("deepseek-v3-tp8", "fp8", 64, 100.0, 116.0),
        ("qwen3-30b", "bf16", 4, 50.0, 58.0),
        ("deepseek-v3-tp8", "fp8", 4, 40.0, 56.0),
        ("qwen3-30b", "fp8", 1, 10.0, 17.0),
        ("mixtral", "bf16", 1, 160.0, 176.0),
        ("deepseek-v3-tp8", "fp8", 1, 12.0, 25.0),
    ],
)
def test_limit_of_a_decode_cell(
    case: str, dtype: str, tokens: int, floor: float, limit: float
) -> None:
    assert bars.limit_us(case, dtype, tokens, floor) == pytest.approx(limit)


def verdicts(rows: Sequence[Row]) -> dict[tuple[str, str], bool | None]:
    return {(bar.name, bar.cell): bar.passed for bar in bars.evaluate(rows, {})}


def test_decode_bar_passes_misses_and_is_missing() -> None:
    found = verdicts([make_row(), make_row(num_tokens=64, median_us=660.0)])
    assert found["pair, T = 16..256", "mixtral bf16 T=16"] is True
    assert found["pair, T = 16..256", "mixtral bf16 T=64"] is False
    assert found["pair, T = 16..256", "mixtral bf16 T=128"] is None


def test_prefill_bars_need_the_rate_and_fast_not_slower() -> None:
    fp8 = make_row(dtype="fp8", scale="tensor", num_tokens=8192)
    found = verdicts(
        [
            replace(fp8, accumulate="promoted", tflops=1190.0),
            replace(fp8, accumulate="fast", tflops=1185.0),
            make_row(num_tokens=8192, tflops=650.0),
        ]
    )
    assert found["pair, T = 8192", "mixtral fp8"] is True
    assert found["pair, T = 8192", "mixtral fast >= promoted"] is False
    assert found["pair, T = 8192", "mixtral bf16"] is False


def test_torch_bar_compares_the_same_cell() -> None:
    slower = make_row(provider="torch", median_us=700.0)
    skipped = make_row(provider="torch", num_tokens=4, median_us=None, skipped_reason="no")
    found = verdicts([make_row(), slower, make_row(num_tokens=4), skipped, make_row(num_tokens=1)])
    assert found["faster than torch", "mixtral bf16 T=16"] is True
    assert found["faster than torch", "mixtral bf16 T=4"] is True
    assert found["faster than torch", "mixtral bf16 T=1"] is None


def test_peer_bar_allows_three_percent() -> None:
    peers = {("mixtral", "bf16", 16): 610.0, ("mixtral", "bf16", 64): 600.0}
    rows = [make_row(), make_row(num_tokens=64)]
    found = {bar.cell: bar.passed for bar in bars.evaluate(rows, peers) if "Deep" in bar.name}
    assert found == {"mixtral bf16 T=16": True, "mixtral bf16 T=64": False}


def test_deep_gemm_takes_the_better_of_contiguous_and_masked() -> None:
    peers = load_deep_gemm()
    # contiguous 140.2 + 79.42, masked 124.49 + 65.66
    assert peers["qwen3-30b", "bf16", 16] == pytest.approx(190.15)
    # contiguous 11.09 + 7.97, masked 21.93 + 15.36
    assert peers["qwen3-30b", "fp8", 1] == pytest.approx(19.06)


def test_check_fails_when_a_row_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = write_rows(tmp_path / "rows.jsonl", small_results())
    assert report.main([str(results), "--check"]) == 1
    printed = capsys.readouterr().out
    assert "pair, T = 16..256: 2 pass, 0 MISS, 22 missing" in printed
