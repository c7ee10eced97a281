"""The bars and tables of whole layers, and the peers that they are held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.bench_rows import make_row, write_rows

from bench import bars_layer, report
from bench.bars_layer import KINDS
from bench.cases import TOKENS, case_names
from bench.ops import LAYER
from bench.peers import load_layers
from bench.power import SUSTAINED
from bench.rows import Row

LAYER_ROW = make_row(op=LAYER, dtype="fp8", scale="block128", accumulate="promoted", host_us=30.0)

# peers


def test_peers_are_compared_like_with_like() -> None:
    peers = load_layers()
    assert set(peers) == set(KINDS)
    for scale, times in peers.items():
        assert {dtype for _, dtype, _ in times} == {KINDS[scale]}
    # The best of three Triton layers and vLLM's of DeepGEMM
    assert peers["block128"]["qwen3-30b", "fp8", 16] == pytest.approx(101.01)
    assert peers["channel"]["qwen3-30b", "fp8", 16] == pytest.approx(106.44)
    # zipf0.6, not the row of uniform routing
    assert peers["none"]["qwen3-30b", "bf16", 16] == pytest.approx(175.67)
    # FlashInfer takes 340.44 with given scales, the best of the others 365.85 with computed ones
    assert peers["tensor_static"]["mixtral", "fp8", 16] == pytest.approx(340.44)
    assert peers["tensor"]["mixtral", "fp8", 16] == pytest.approx(365.85)


# bars

Verdicts = dict[tuple[str, str], bool | None]
Peers = dict[str, dict[tuple[str, str, int], float]]


def verdicts(rows: Sequence[Row], peers: Peers | None = None) -> Verdicts:
    return {(bar.name, bar.cell): bar.passed for bar in bars_layer.evaluate(rows, peers or {})}


def test_nothing_is_asked_without_layers() -> None:
    assert verdicts([make_row(), replace(LAYER_ROW, op="grouped_gemm_pair")]) == {}
    assert verdicts([replace(LAYER_ROW, batch_invariant=True)]) == {}


def test_every_case_and_kind_is_asked() -> None:
    found = verdicts([LAYER_ROW])
    for name, tokens in (("layer, T = 1", (1,)), ("1.2 x floor + 6", (4, 16, 64, 128, 256))):
        cells = {cell for bar, cell in found if name in bar}
        assert len(cells) == len(case_names()) * len(KINDS) * len(tokens)
    assert found["layer, T = 1", "mixtral bf16 T=1"] is None


@pytest.mark.parametrize(
    ("case", "floor", "limit"),
    [
        ("qwen3-30b", 10.0, 20.0),
        ("qwen3-next", 10.0, 25.0),
        ("deepseek-v3-tp8", 12.0, 27.0),
        ("mixtral", 160.0, 176.0),
    ],
)
def test_limit_of_the_first_token(case: str, floor: float, limit: float) -> None:
    assert bars_layer.first_token_limit_us(case, floor) == pytest.approx(limit)
    row = replace(LAYER_ROW, case=case, num_tokens=1, floor_us=floor, median_us=limit - 0.01)
    cell = ("layer, T = 1", f"{case} fp8 block128 T=1")
    assert verdicts([row])[cell] is True
    assert verdicts([replace(row, median_us=limit + 0.01)])[cell] is False


def test_limit_of_decode() -> None:
    name, cell = "layer, T = 4..256: 1.2 x floor + 6 us", "mixtral fp8 block128 T=16"
    assert verdicts([replace(LAYER_ROW, median_us=726.0)])[name, cell] is True
    assert verdicts([replace(LAYER_ROW, median_us=726.1)])[name, cell] is False


def decode_rows(num_over: int, num_left_out: int = 0) -> list[Row]:
    rows = [
        make_row(op=LAYER, case=case, dtype=dtype, scale=scale, num_tokens=tokens, median_us=664.0)
        for scale, dtype in KINDS.items()
        for tokens in (4, 16, 64, 128, 256)
        for case in case_names()
    ]
    rows = [replace(row, accumulate="promoted" if row.dtype == "fp8" else "fp32") for row in rows]
    over = [replace(row, median_us=664.1) for row in rows[:num_over]]
    return over + rows[num_over + num_left_out :]


def test_share_of_decode_cells() -> None:
    name, cell = "layer, T = 4..256: 1.1 x floor + 4 us", "80% of the cells"
    # 60 cells of each of 5 kinds: 240 of 300 are wanted
    assert verdicts(decode_rows(60))[name, cell] is True
    assert verdicts(decode_rows(61))[name, cell] is False
    assert verdicts(decode_rows(60, 1))[name, cell] is None
    assert verdicts(decode_rows(0, 60))[name, cell] is True
    listed = {bar.name: bar.numbers for bar in bars_layer.evaluate(decode_rows(1), {})}[name]
    assert "299 of 300 within, 240 wanted; over: mixtral bf16 T=4 664.1 > 664.0" in listed


def test_peer_bars_are_by_kind_of_scales() -> None:
    cell = ("mixtral", "fp8", 16)
    found = verdicts([LAYER_ROW], {"block128": {cell: 610.0}, "tensor": {cell: 1000.0}})
    assert found["layer block128: faster than peers", "mixtral fp8 T=16"] is True
    assert found["layer tensor: faster than peers", "mixtral fp8 T=16"] is None
    slower = verdicts([LAYER_ROW], {"block128": {cell: 600.0}})
    assert slower["layer block128: faster than peers", "mixtral fp8 T=16"] is False


def test_peers_outside_the_grid_ask_for_rows_that_are_there() -> None:
    assert 8 not in TOKENS
    peers = {"block128": {("mixtral", "fp8", 8): 700.0}}
    cell = ("layer block128: faster than peers", "mixtral fp8 T=8")
    assert cell not in verdicts([LAYER_ROW], peers)
    assert verdicts([replace(LAYER_ROW, num_tokens=8)], peers)[cell] is True


def test_block_prefill_is_faster_or_near_the_floor() -> None:
    name = "layer block128, T = 512..8192"
    peers = {
        "block128": {
            ("mixtral", "fp8", 256): 1.0,
            ("mixtral", "fp8", 512): 800.0,
            ("mixtral", "fp8", 1024): 1040.0,
            ("mixtral", "fp8", 2048): 1200.0,
        }
    }
    rows = [
        replace(LAYER_ROW, num_tokens=512, median_us=672.0),  # 1.12 x floor, 1.19x
        replace(LAYER_ROW, num_tokens=1024, median_us=800.0),  # 1.3x
        replace(LAYER_ROW, num_tokens=2048, median_us=1000.0),  # 1.2x
    ]
    found = verdicts(rows, peers)
    assert [found[name, f"mixtral fp8 T={t}"] for t in (512, 1024, 2048)] == [True, True, False]
    assert (name, "mixtral fp8 T=256") not in found
    mean = (f"{name}: mean", "from T = 1024 up")
    assert found[mean] is False  # sqrt(1.3 * 1.2) = 1.25
    assert verdicts([*rows[:2], replace(rows[2], median_us=690.0)], peers)[mean] is True
    assert verdicts(rows[:2], peers)[mean] is None


def test_prefill_rates_by_kind() -> None:
    burst = replace(LAYER_ROW, num_tokens=8192, tflops=1100.0)
    held = replace(burst, power=SUSTAINED, tflops=1000.0)
    found = verdicts([burst, held, replace(burst, scale="tensor_static")])
    assert found["layer block128, T = 8192", "mixtral fp8"] is True
    assert found["layer block128, T = 8192", "mixtral fp8 (sustained)"] is False
    assert found["layer tensor_static, T = 8192", "mixtral fp8"] is False
    assert found["layer tensor, T = 8192", "mixtral fp8"] is None
    assert found["layer bf16, T = 8192", "qwen3-30b bf16"] is None


def test_host_time_is_that_of_the_slowest_row() -> None:
    name = "layer: host time of an eager call"
    assert verdicts([LAYER_ROW])[name, "layer block128"] is True
    slow = replace(LAYER_ROW, num_tokens=64, host_us=40.1)
    assert verdicts([LAYER_ROW, slow])[name, "layer block128"] is False
    assert verdicts([LAYER_ROW])[name, "layer bf16"] is None


# reports


def test_report_of_layers_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        LAYER_ROW,
        replace(LAYER_ROW, batch_invariant=True, median_us=651.0),
        make_row(op=LAYER),
        make_row(op=LAYER, provider="torch", median_us=930.0),
    ]
    out = tmp_path / "out.md"
    results = write_rows(tmp_path / "rows.jsonl", rows)
    assert report.main([str(results), "--markdown", str(out), "--check"]) == 1
    printed, text = capsys.readouterr().out, out.read_text()
    assert "layer, T = 4..256: 1.2 x floor + 6 us: 2 pass, 0 MISS, 298 missing" in printed
    assert "pair" not in printed
    assert "## Whole layer" in text
    assert "## Times" not in text
    assert "### FP8, scales block128, promoted accumulation" in text
    assert "| mixtral | 620.0 / 1.03 / 18 |" in text
    assert "| mixtral | batch-invariant | 1.05x (651.0) |" in text
    assert "| mixtral | torch | 1.50x (930.0) |" in text
    assert "| mixtral | best peer | " in text


def test_compare_keeps_modes_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write_rows(tmp_path / "old.jsonl", [LAYER_ROW])
    new = write_rows(
        tmp_path / "new.jsonl", [replace(LAYER_ROW, batch_invariant=True, median_us=900.0)]
    )
    assert report.main([str(new), "--compare", str(old)]) == 0
    assert "0 cells lost" in capsys.readouterr().out
