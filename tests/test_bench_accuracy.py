"""The accuracy measurement, in miniature on the CPU: data, errors, rows, page."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import accuracy
from bench.accuracy_data import (
    DATA,
    KINDS,
    OUTLIERS,
    SAME_SIGNED,
    Sizes,
    accumulates,
    make_operands,
    quantise,
)
from bench.accuracy_page import page
from bench.accuracy_rows import AccuracyRow, load_accuracy_rows

CPU = torch.device("cpu")
SIZES = Sizes(counts=(3, 0, 9), n=24)
PAGE = Path(accuracy.__file__).parent.parent / "docs" / "accuracy.md"
pytestmark = pytest.mark.filterwarnings("ignore:moe_ext. no CUDA device")


# data


@pytest.mark.parametrize("data", DATA)
def test_data_depend_on_the_seed_alone(data: str) -> None:
    first, second = (make_operands(data, SIZES, 256, CPU) for _ in range(2))
    assert torch.equal(first.a, second.a)
    assert torch.equal(first.b, second.b)
    assert first.a.dtype == first.b.dtype == torch.bfloat16
    assert first.offs.tolist() == [3, 3, 12]


def test_one_channel_in_512_is_an_outlier() -> None:
    a = make_operands(OUTLIERS, Sizes(counts=(64,), n=8), 2048, CPU).a.float()
    deviations = a.square().mean(0).sqrt()
    assert int((deviations > 20 * deviations.median()).sum()) == 4


def test_same_signed_data_are_positive() -> None:
    operands = make_operands(SAME_SIGNED, SIZES, 256, CPU)
    assert bool((operands.a >= 0).all())
    assert bool((operands.b >= 0).all())


def test_unknown_data_are_named() -> None:
    with pytest.raises(ValueError, match="got 'uniform'"):
        make_operands("uniform", SIZES, 256, CPU)


@pytest.mark.parametrize(
    ("kind", "shape_a", "shape_b"),
    [
        ("tensor", (), (3,)),
        ("channel", (12,), (3, 24)),
        ("block128", (12, 2), (3, 1, 2)),
        ("channel_x_tensor", (12,), (3,)),
        ("tensor_x_channel", (), (3, 24)),
        ("block128_x_tensor", (12, 2), (3,)),
        ("block128_pow2", (12, 2), (3, 1, 2)),
    ],
)
def test_shapes_of_scales(kind: str, shape_a: tuple[int, ...], shape_b: tuple[int, ...]) -> None:
    quantised = quantise(make_operands(OUTLIERS, SIZES, 256, CPU), kind)
    assert quantised.scale_a is not None
    assert quantised.scale_b is not None
    assert (quantised.scale_a.shape, quantised.scale_b.shape) == (shape_a, shape_b)
    of_two = all(math.frexp(scale)[0] == 0.5 for scale in quantised.scale_a.flatten().tolist())
    assert of_two == (kind == "block128_pow2")


def test_blocks_have_one_way_to_sum() -> None:
    assert {kind for kind in KINDS if accumulates(kind) == ("promoted",)} == {
        "block128",
        "block128_x_tensor",
        "block128_pow2",
    }


# errors


def test_signal_to_noise_ratio_and_difference() -> None:
    reference = torch.tensor([3.0, 4.0])
    errors = accuracy.compare(torch.tensor([3.0, 4.5]), reference)
    assert errors.snr_db == pytest.approx(20.0)  # |ref|^2 = 25, |out - ref|^2 = 1 / 4
    assert errors.max_err == pytest.approx(0.125)
    # 1 - 2 (9 + 18) / (29.25 + 25)
    assert errors.difference == pytest.approx(1 - 54 / 54.25)
    assert accuracy.compare(reference, reference).snr_db == math.inf


def test_master_product_is_by_group() -> None:
    operands = make_operands(OUTLIERS, SIZES, 256, CPU)
    product = accuracy.master_product(operands)
    assert product.dtype == torch.float64
    torch.testing.assert_close(product[3], operands.b[2].double() @ operands.a[3].double())


# rows and page


def test_dry_run_writes_rows_and_a_page(tmp_path: Path) -> None:
    out, text = tmp_path / "rows.jsonl", tmp_path / "page.md"
    command = ["--dry-run", "--commit", "abc123", "--out", str(out)]
    assert accuracy.main([*command, "--markdown", str(text)]) == 0
    rows = load_accuracy_rows(out)
    assert {(row.data, row.scale) for row in rows} == {
        (data, kind) for data in DATA for kind in ("none", *KINDS)
    }
    assert {row.commit for row in rows} == {"abc123"}
    for row in rows:
        # FP8 keeps four significant bits, BF16 eight.
        assert row.snr_db > (50 if row.dtype == "bf16" else 25)
        assert row.difference < 1e-10  # the reference against itself
    again = tmp_path / "again.md"
    assert accuracy.main(["--read", str(out), "--markdown", str(again)]) == 0
    assert again.read_text() == text.read_text()


def make_row(**changes: object) -> AccuracyRow:
    row = AccuracyRow(
        data=OUTLIERS,
        dtype="fp8",
        scale="tensor",
        accumulate="promoted",
        num_groups=4,
        num_rows=512,
        n=1024,
        k=2048,
        config="plain",
        snr_db=31.44,
        difference=2e-10,
        max_err=3e-5,
        device="NVIDIA H200",
        torch="2.11.0+cu130",
        cuda="13.0",
        commit="abc123",
    )
    return replace(row, **changes)  # type: ignore[arg-type]


def test_page_has_sizes_of_k_across_and_the_latest_row() -> None:
    text = page(
        [
            make_row(snr_db=1.0),
            make_row(),
            make_row(k=7168, snr_db=31.06),
            make_row(scale="channel"),
        ]
    )
    assert "| dtype | scales | sums | K = 2048 | K = 7168 |" in text
    assert "| FP8 | tensor | promoted | 31.4 | 31.1 |" in text
    assert "| FP8 | channel | promoted | 31.4 | - |" in text
    assert "| FP8 | tensor | promoted | 2.0e-10 / 3.0e-05 |" in text
    assert "NVIDIA H200; torch 2.11.0+cu130; CUDA 13.0; commit abc123. 512 rows" in text
    assert f"### Data `{SAME_SIGNED}`" not in text


def test_page_without_rows_has_no_numbers() -> None:
    text = page([])
    assert "Nothing has been measured yet." in text
    assert "|---" not in text


def test_a_row_is_a_line_of_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(vars(make_row())) + "\n\n")
    assert load_accuracy_rows(path) == [make_row()]


def test_committed_page_is_a_generated_one() -> None:
    # The part that no row changes.
    assert PAGE.read_text().startswith(page([]).partition("Nothing")[0])
