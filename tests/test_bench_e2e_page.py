"""Rows of whole models: which are kept, bars, the page, the README's table and the plot."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.bench_e2e_rows import make_e2e_row as row
from support.bench_rows import make_row

from bench.e2e_bars import ModelBar, evaluate, misses
from bench.e2e_page import e2e_readme_section, page
from bench.e2e_plot import plot
from bench.e2e_rows import DECODE, TTFT, latest_rows

LAYERS = 48
GOOD = [
    row("moe_ext", DECODE, 1, 512, 9.0, 0.2),
    row("batched_mm", DECODE, 1, 512, 12.0),
    row("grouped_mm", DECODE, 1, 512, 14.0),
    row("moe_ext", TTFT, 1, 2048, 70.0),
    row("grouped_mm", TTFT, 1, 2048, 105.0),
]


def skipped(one, reason):
    return replace(one, value=None, call_ms=None, experts_share=None, skipped_reason=reason)


def test_bars():
    assert evaluate(GOOD, None, LAYERS) == [
        ModelBar("tokens/s of a decode step, batch 1", ">= 1.2 x", "1.333 x batched_mm", True),
        ModelBar("experts' time of a decode step, batch 1", "<= 0.5 x", "0.300 x batched_mm", True),
        ModelBar("time to the first token, 2,048 tokens", "<= 0.75 x", "0.667 x grouped_mm", True),
    ]
    bad = [
        row("moe_ext", DECODE, 64, 512, 90.0, 0.9),
        row("grouped_mm", DECODE, 64, 512, 97.0, 0.9),
        row("moe_ext", TTFT, 1, 8192, 200.0),
        row("grouped_mm", TTFT, 1, 8192, 300.0),
    ]
    assert misses(evaluate([*GOOD, *bad], None, LAYERS)) == [
        "tokens/s of a decode step, batch 64: 1.078 x grouped_mm, >= 1.1 x",
        "experts' time of a decode step, batch 64: 0.928 x grouped_mm, <= 0.6 x",
        "time to the first token, 8,192 tokens: 0.667 x grouped_mm, <= 0.65 x",
    ]
    assert evaluate([replace(one, dtype="fp8") for one in bad], None, LAYERS) == []
    assert evaluate([replace(one, model="qwen3-tiny") for one in bad], None, LAYERS) == []
    assert evaluate([bad[0], skipped(bad[1], "no")], None, LAYERS) == []


@pytest.mark.parametrize("which", range(2), ids=["a step", "a prompt"])
def test_no_time_of_ours_passes_no_bar(which):
    ours = [one for one in GOOD if one.implementation == "moe_ext"]
    own = ours[0] if which == 0 else ours[-1]
    others = [one for one in GOOD if one.implementation != "moe_ext"]
    for rows in ([*others], [*others, skipped(own, "wrong")]):
        bars = evaluate(rows, None, LAYERS)
        assert bars
        assert all(bar.passed is None for bar in bars)
        assert len(misses(bars)) == len(bars)


def test_a_prompt_that_only_the_host_decides_is_told():
    rows = [row("moe_ext", TTFT, 1, 2048, 70.0, 0.0), row("grouped_mm", TTFT, 1, 2048, 105.0)]
    (bar,) = evaluate(rows, None, LAYERS)
    assert bar.measured == "0.667 x grouped_mm; of the host"
    assert "Of the host: the prompt" in page(rows, [bar])
    assert "Of the host" not in page(GOOD, evaluate(GOOD, None, LAYERS))
    assert "| 1.50x, of the host |" in e2e_readme_section(rows)
    assert "Of the host: the prompt" in e2e_readme_section(rows)
    assert "Of the host" not in e2e_readme_section(GOOD)


STEP = row("moe_ext", DECODE, 64, 512, 96.0, 0.15)  # 300 us a layer


def layer_bar(rows, **layer):
    columns = {"op": "fused_moe", "case": "qwen3-30b", "num_tokens": 64, "median_us": 300.0}
    bars = evaluate(rows, [make_row(**columns | layer)], LAYERS)
    return bars[-1]


@pytest.mark.parametrize(
    ("layer_us", "passed"), [(300.0, True), (274.0, True), (270.0, False), (335.0, False)]
)
def test_the_layers_bar(layer_us, passed):
    bar = layer_bar([STEP], median_us=layer_us)
    assert bar.passed is passed
    assert bar.limit == "0.9 to 1.1 x"
    assert bar.measured == (
        f"{300 / layer_us:.3f} x (300.0 us a layer over {layer_us:.1f}, commit abc123)"
    )


@pytest.mark.parametrize(
    "layer",
    [
        {"op": "grouped_gemm_pair"},
        {"case": "mixtral"},
        {"num_tokens": 16},
        {"dtype": "fp8", "scale": "tensor"},
        {"routing": "uniform"},
        {"provider": "torch"},
        {"power": "sustained"},
        {"batch_invariant": True},
        {"median_us": None},
    ],
)
def test_the_layers_bar_takes_no_other_row(layer):
    bar = layer_bar([STEP], **layer)
    assert (bar.measured, bar.passed) == ("no row", None)
    assert len(misses([bar])) == 1


@pytest.mark.parametrize(
    "step",
    [
        replace(STEP, batch=8),
        replace(STEP, dtype="fp8"),
        replace(STEP, implementation="grouped_mm"),
        replace(STEP, metric=TTFT),
        skipped(STEP, "no"),
    ],
)
def test_the_layers_bar_takes_no_other_step(step):
    assert layer_bar([step]).measured == "no row"


def test_page():
    bars = evaluate(GOOD, None, LAYERS)
    text = page(GOOD, bars, "end-to-end.png")
    assert text.startswith(
        "# Whole models\n\nNVIDIA H200; torch 2.11; Transformers 5.17; commit abc.\n"
    )
    assert "(../../bench/README.md#whole-models)" in text
    assert "](end-to-end.png)" in text
    assert (
        "| time to the first token, 2,048 tokens | <= 0.75 x | 0.667 x grouped_mm | yes |" in text
    )
    assert "| batch | position | moe_ext | batched_mm | grouped_mm | best other / ours |" in text
    assert "| 1 | 512 | 111.1 (9.00 ms, 20%) | 83.3 (12.00 ms, 50%) | 71.4 (14.00" in text
    assert "## First token, qwen3-30b-a3b, BF16\n" in text
    assert "| 1 | 2,048 | 70.0 (50%) | 105.0 (50%) | 1.50x |" in text
    assert "Not measured" not in text
    assert "![" not in page(GOOD, bars)
    assert "## Bars" not in page(GOOD, [])


def test_page_says_which_bars_are_missed_or_missing():
    bars = [ModelBar("one", "<= 1", "2", False), ModelBar("two", "<= 1", "no row", None)]
    text = page(GOOD, bars)
    assert "| one | <= 1 | 2 | no |\n| two | <= 1 | no row | missing |" in text


def test_page_of_ours_alone_has_no_column_of_others():
    ours = replace(GOOD[3], dtype="fp8")
    text = page([ours, skipped(replace(GOOD[4], dtype="fp8"), "no")], [])
    assert "| batch | prompt | moe_ext |\n|---|---|---|\n| 1 | 2,048 | 70.0 (50%) |\n" in text


def test_a_step_that_is_not_captured_says_so():
    assert "(9.00 ms, 20%, not captured)" in page([replace(GOOD[0], captured=False)], [])


def test_not_measured_has_a_line_an_implementation():
    out_of_it = "OutOfMemoryError: out of memory. Tried to allocate 9.5 GiB. Of the"
    never = "ImportError: `kernels` is not installed. Please install it, e.g. `pip install kernels`"
    rows = [
        *GOOD,
        skipped(row("batched_mm", TTFT, 1, 2048, 1.0), out_of_it),
        skipped(row("batched_mm", TTFT, 1, 8192, 1.0), out_of_it.replace("9.5", "384.0")),
        replace(row("batched_mm", TTFT, 1, 2048, 1.0), dtype="fp8"),
        skipped(row("deepgemm", TTFT, 1, 2048, 1.0), never),
        skipped(row("deepgemm", DECODE, 1, 512, 1.0), never),
        skipped(replace(row("deepgemm", TTFT, 1, 2048, 1.0), dtype="fp8"), never),
        skipped(row("sonicmoe", TTFT, 1, 2048, 1.0), "KeyError: " + "x" * 200),
    ]
    lines = page(rows, []).split("## Not measured\n\n")[1].splitlines()
    assert lines == [
        "- `batched_mm`: BF16 (2 of 3 calls): OutOfMemoryError: out of memory",
        "- `deepgemm`: BF16, FP8: ImportError: `kernels` is not installed",
        f"- `sonicmoe`: BF16: KeyError: {'x' * 110}...",
    ]
    header = "| batch | prompt | moe_ext | grouped_mm | best other / ours |"
    assert header in page(rows, [])


def test_readme_table():
    fp8 = replace(row("moe_ext", DECODE, 1, 512, 8.0), dtype="fp8")
    rows = [
        *GOOD,
        row("moe_ext", TTFT, 1, 512, 60.0),  # has no bar
        row("moe_ext", TTFT, 8, 2048, 60.0),
        row("moe_ext", DECODE, 2, 512, 60.0),
        skipped(row("sonicmoe", DECODE, 1, 512, 1.0), "no"),
        fp8,
    ]
    text = e2e_readme_section(rows)
    assert text.splitlines()[2:] == [
        "|  | moe_ext, BF16 | best other, BF16 | speed-up | moe_ext, FP8 |",
        "|---|---|---|---|---|",
        "| tokens/s of a decode step, batch 1 | 111.1 | 83.3 (`batched_mm`) | 1.33x | 125.0 |",
        "| ms to the first token, 2,048 tokens | 70.0 | 105.0 (`grouped_mm`) | 1.50x | - |",
    ]
    assert "the fastest of `batched_mm`, `grouped_mm` (`sonicmoe` did not run)." in text
    assert "commit abc." in text
    assert "did not run" not in e2e_readme_section(GOOD)
    alone = e2e_readme_section([GOOD[0]])
    assert "| tokens/s of a decode step, batch 1 | 111.1 | - | - | - |" in alone


def test_a_row_with_a_value_is_kept():
    one = GOOD[3]
    again, failed = replace(one, value=60.0), replace(one, value=None)
    assert latest_rows([one, again, failed]) == [again]
    assert latest_rows([failed, one]) == [one]


def test_plot_labels_every_time_and_no_other(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    fp8 = replace(row("moe_ext", DECODE, 1, 512, 8.0), dtype="fp8")
    absent = skipped(row("sonicmoe", DECODE, 1, 512, 1.0), "no")
    plot([*GOOD, fp8, absent], tmp_path / "e2e.png")
    (figure,) = figures
    decode, prompt = figure.axes
    assert [text.get_text() for text in decode.texts] == ["9.0", "8.0", "12.0", "14.0"]
    assert [text.get_text() for text in prompt.texts] == ["70.0", "105"]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["moe_ext BF16", "moe_ext FP8", "batched_mm BF16", "grouped_mm BF16"]
    assert (tmp_path / "e2e.png").stat().st_size > 1000
