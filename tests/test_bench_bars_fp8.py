"""The bars and tables of FP8 with other scales, and of sustained rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.bench_rows import make_row, write_rows

from bench import bars, bars_fp8, report
from bench.cases import case_names
from bench.peers import load_block_scaled
from bench.power import SUSTAINED
from bench.rows import MIXED, Row
from bench.tables_fp8 import block_comparison, layout_tables
from bench.tables_power import power_table

BLOCK_ROW = make_row(dtype="fp8", scale="block128", accumulate="promoted")
CHANNEL_ROW = replace(BLOCK_ROW, scale="channel")
TENSOR_ROW = replace(BLOCK_ROW, scale="tensor")


@pytest.mark.parametrize(
    ("case", "tokens", "floor", "limit"),
    [
        ("qwen3-30b", 64, 100.0, 113.0),
        ("qwen3-30b-tp4", 64, 100.0, 120.0),
        ("deepseek-v3-tp8", 256, 100.0, 120.0),
        ("glm-4.5-air-tp8", 16, 100.0, 120.0),
        ("mixtral", 128, 300.0, 329.0),
        ("mixtral", 256, 300.0, 365.0),
        ("mixtral", 1, 100.0, 112.0),
        ("qwen3-30b", 1, 10.0, 18.0),
        ("deepseek-v3-tp8", 1, 12.0, 26.0),
    ],
)
def test_limit_of_a_block_scaled_cell(case: str, tokens: int, floor: float, limit: float) -> None:
    assert bars_fp8.block_limit_us(case, tokens, floor) == pytest.approx(limit)


Peers = dict[tuple[str, str, int], float]


def verdicts(rows: Sequence[Row], peers: Peers | None = None) -> dict[tuple[str, str], bool | None]:
    return {(bar.name, bar.cell): bar.passed for bar in bars_fp8.evaluate(rows, peers or {})}


def test_nothing_is_asked_without_such_rows() -> None:
    assert verdicts([make_row(), TENSOR_ROW], {("mixtral", "fp8", 16): 1.0}) == {}


def test_block_bars_ask_for_every_case() -> None:
    found = verdicts([BLOCK_ROW, replace(BLOCK_ROW, num_tokens=64, median_us=660.0)])
    assert found["block pair, T = 16..256", "mixtral fp8 T=16"] is True
    assert found["block pair, T = 16..256", "mixtral fp8 T=64"] is False
    for case in case_names():
        for tokens in (128, 256):
            assert found["block pair, T = 16..256", f"{case} fp8 T={tokens}"] is None
        assert found["block pair, T = 1", f"{case} fp8 T=1"] is None


def test_block_bars_do_not_take_rows_per_tensor() -> None:
    found = verdicts([BLOCK_ROW, replace(TENSOR_ROW, num_tokens=64)])
    assert found["block pair, T = 16..256", "mixtral fp8 T=64"] is None


def test_sustained_rows_have_cells_of_their_own() -> None:
    burst = replace(BLOCK_ROW, num_tokens=8192, tflops=1200.0)
    name = "block pair, T = 8192"
    found = verdicts([burst, replace(burst, power=SUSTAINED, tflops=1150.0)])
    assert found[name, "mixtral fp8"] is True
    assert found[name, "mixtral fp8 (sustained)"] is False
    assert (name, "mixtral fp8 (sustained)") not in verdicts([burst])
    assert found[name, "deepseek-v3-tp8 fp8"] is None


def test_first_bars_have_sustained_cells_too() -> None:
    row = make_row(num_tokens=8192, tflops=700.0)
    rows = [row, replace(row, power=SUSTAINED, tflops=650.0)]
    found = {bar.cell: bar.passed for bar in bars.evaluate(rows, {}) if bar.name.endswith("8192")}
    assert found["mixtral bf16"] is True
    assert found["mixtral bf16 (sustained)"] is False


def test_block_rows_are_held_against_peers() -> None:
    peers = {("mixtral", "fp8", 16): 610.0, ("mixtral", "fp8", 64): 600.0}
    found = verdicts([BLOCK_ROW, replace(BLOCK_ROW, num_tokens=64)], peers)
    assert found["block: faster than peers", "mixtral fp8 T=16"] is True
    assert found["block: faster than peers", "mixtral fp8 T=64"] is False


def test_shards_are_held_against_each_other_per_byte() -> None:
    name = "block shard: I = 192 as 256, per byte of weight"
    short = replace(BLOCK_ROW, case="shard-192", active_experts=64.0, median_us=31.4)
    # 64 experts x 3 x 2048 x 192 bytes against x 256: 4 / 3 of the time is as fast
    whole = replace(short, case="shard-256", median_us=40.0)
    found = verdicts(
        [short, whole, replace(short, num_tokens=64, median_us=31.6), replace(whole, num_tokens=64)]
    )
    assert found[name, "fp8 T=16"] is True
    assert found[name, "fp8 T=64"] is False
    assert found[name, "fp8 T=256"] is None
    assert not any(bar == name for bar, _ in verdicts([BLOCK_ROW]))


def test_channel_bars_compare_with_tensor_and_torch() -> None:
    torch_row = replace(CHANNEL_ROW, provider="torch", accumulate="fast", median_us=700.0)
    rows = [
        replace(TENSOR_ROW, median_us=610.0),
        CHANNEL_ROW,
        torch_row,
        replace(TENSOR_ROW, num_tokens=64, median_us=600.0),
        replace(CHANNEL_ROW, num_tokens=64),
        replace(torch_row, num_tokens=64, median_us=619.0),
    ]
    found = verdicts(rows)
    for name in ("row x channel: as per tensor", "row x channel: faster than torch"):
        assert found[name, "mixtral fp8 T=16"] is True
        assert found[name, "mixtral fp8 T=64"] is False


def test_best_peer_is_the_fastest_pair_of_gemms() -> None:
    peers = load_block_scaled()
    assert {dtype for _, dtype, _ in peers} == {"fp8"}
    # DeepGEMM contiguous 11.09 + 7.97, SGLang's CUTLASS GEMM 16.2 + 12.94
    assert peers["qwen3-30b", "fp8", 1] == pytest.approx(19.06)
    assert ("deepseek-v3-tp8", "fp8", 8192) in peers


# tables


def test_layout_tables_show_what_is_not_per_tensor() -> None:
    text = layout_tables([BLOCK_ROW, TENSOR_ROW, replace(CHANNEL_ROW, accumulate="fast")])
    assert "### FP8, scales block128, promoted accumulation" in text
    assert "### FP8, scales channel, fast accumulation" in text
    assert "tensor, promoted" not in text
    assert "| mixtral | 620.0 / 1.03 / 18 |" in text
    assert layout_tables([TENSOR_ROW, make_row()]) == ""


def test_block_comparison_names_the_others() -> None:
    same_run = replace(BLOCK_ROW, provider="deep_gemm", median_us=930.0)
    rows = [BLOCK_ROW, replace(TENSOR_ROW, median_us=310.0), same_run]
    text = block_comparison(rows, {("mixtral", "fp8", 16): 1240.0})
    assert "| mixtral | per tensor | 0.50x (310.0) |" in text
    assert "| mixtral | DeepGEMM, same run | 1.50x (930.0) |" in text
    assert "| mixtral | best peer | 2.00x (1240.0) |" in text
    assert block_comparison([TENSOR_ROW], {}) == ""


def test_power_table_pairs_the_regimes() -> None:
    burst = replace(BLOCK_ROW, num_tokens=8192, tflops=1300.0)
    sustained = replace(burst, power=SUSTAINED, tflops=1170.0)
    line = "| mixtral | moe_ext | FP8 | block128 | promoted |"
    assert f"{line} 1300 | 1170 | 0.90 |" in power_table([burst, sustained])
    assert f"{line} - | 1170 | - |" in power_table([replace(burst, power=MIXED), sustained])
    assert power_table([burst, replace(sustained, num_tokens=16)]) == ""


def test_report_takes_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    burst = replace(BLOCK_ROW, num_tokens=8192, tflops=1300.0)
    files = [
        write_rows(tmp_path / "burst.jsonl", [burst, replace(TENSOR_ROW, num_tokens=8192)]),
        write_rows(tmp_path / "held.jsonl", [replace(burst, power=SUSTAINED, tflops=1170.0)]),
    ]
    out = tmp_path / "out.md"
    assert report.main([*map(str, files), "--markdown", str(out), "--check"]) == 1
    printed, text = capsys.readouterr().out, out.read_text()
    assert "pair, T = 8192: 0 pass" in printed
    assert "block pair, T = 8192: 1 pass, 1 MISS, 3 missing" in printed
    for title in ("FP8 with other scales", "Scales per block against others", "Burst and"):
        assert f"## {title}" in text


def test_compare_keeps_layouts_and_regimes_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write_rows(tmp_path / "old.jsonl", [replace(TENSOR_ROW, power=MIXED), BLOCK_ROW])
    slower = [
        replace(TENSOR_ROW, median_us=650.0),
        replace(BLOCK_ROW, median_us=625.0),
        replace(BLOCK_ROW, median_us=900.0, power=SUSTAINED),
    ]
    new = write_rows(tmp_path / "new.jsonl", slower)
    assert report.main([str(new), "--compare", str(old)]) == 1
    printed = capsys.readouterr().out
    assert "fp8 tensor promoted zipf0.6 T=16: 620.0 -> 650.0 us (+4.8%)" in printed
    assert "1 cells lost" in printed
