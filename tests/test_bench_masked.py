"""The masked layout in the benchmark: plans, values, providers, rows, bars and tables."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from support.bench_rows import make_row, write_rows
from torch import Tensor

from bench import bars_masked, problem, report, run
from bench.cases import get_case
from bench.checks import max_error
from bench.layouts import CONTIGUOUS, MASKED
from bench.lookup import Results
from bench.measure import Environment, make_out_buffers, make_plans, make_pool, measure
from bench.ops import GEMM, PAIR
from bench.peers import load_masked
from bench.problem import Cell, Plan, Problem, make_plan, make_problem
from bench.providers.base import Provider, Variant
from bench.providers.deep_gemm import DeepGemm
from bench.providers.moe_ext import MoeExt
from bench.rows import Row, latest, load_rows
from bench.scales import SCALES
from bench.tables import pair_rows
from bench.tables_masked import masked_tables
from bench.timing import TimingPolicy

CPU = Environment(torch.device("cpu"), "cpu", "abc123")
BF16 = Variant("bf16", "none", "fp32")
BLOCK = Variant("fp8", "block128", "promoted")
no_cuda_warning = pytest.mark.filterwarnings("ignore:moe_ext. no CUDA device")


# plans


def make_masked_plan(counts: Sequence[int], case: str = "mixtral") -> Plan:
    num_tokens = sum(counts) // get_case(case).top_k
    cell = Cell(get_case(case), ("gate_up", "down"), num_tokens, "fp8", "zipf0.6", MASKED)
    return make_plan(cell, np.array([counts]), TimingPolicy())


@pytest.mark.parametrize(("largest", "buffer_rows"), [(1, 64), (64, 64), (65, 128)])
def test_a_buffer_holds_the_largest_group(largest: int, buffer_rows: int) -> None:
    plan = make_masked_plan([largest, 0, 0, 0, 0, 0, 0, largest])
    assert plan.row_shape == (8, buffer_rows)
    assert plan.begins.tolist() == [buffer_rows * group for group in range(8)]
    assert plan.blocks()[0][0] == (8, buffer_rows, 4096)


@pytest.mark.parametrize(("tokens", "expected"), [(1, 1), (10, 2), (11, 3)])
def test_expected_rows_are_the_mean_group(tokens: int, expected: int) -> None:
    # mixtral: top 2 of 8. Halves go to the even neighbour: 2.5 becomes 2.
    plan = make_masked_plan([2 * tokens, 0, 0, 0, 0, 0, 0, 0])
    assert plan.expected_rows == expected


def test_contiguous_plans_stay_as_they_were() -> None:
    plan = make_masked_plan([2, 0, 4, 0, 0, 0, 0, 2])
    plan = replace(plan, cell=replace(plan.cell, layout=CONTIGUOUS))
    assert plan.row_shape == (8,)
    assert plan.begins.tolist() == [0, 2, 2, 6, 6, 6, 6, 6]
    assert plan.skipped_reason == ""


def test_buffers_larger_than_a_limit_are_skipped_with_a_reason() -> None:
    # 512 experts x 8192 rows x (2048 + 2 x 1024 + 512 + 2 x 2048) bytes
    counts = [8192] * 10 + [0] * 502
    assert make_masked_plan(counts, "qwen3-next").skipped_reason == (
        "masked buffers of 8192 rows take 34 GiB, over 24"
    )
    assert make_masked_plan([16] * 10 + [0] * 502, "qwen3-next").skipped_reason == ""


# measurement


def make_small_problem(dtype: str, num_tokens: int = 16) -> Problem:
    case = replace(get_case("mixtral").shrunk(), hidden_size=320, intermediate_size=256)
    plans = make_plans(
        "grouped_gemm_pair",
        [case],
        [num_tokens],
        [dtype],
        ["zipf0.6"],
        run.DRY_RUN_POLICY,
        MASKED,
    )
    pool = make_pool(plans, dtype, CPU.device)
    return make_problem(plans[0], pool, make_out_buffers(plans, CPU.device))


def test_problem_has_counts_and_buffers() -> None:
    small = make_small_problem("bf16")
    assert [offs.tolist() for offs in small.offs] == small.plan.counts.tolist()
    assert small.offs[0].dtype == torch.int32
    assert small.stages[0].a.shape == (8, 64, 320)
    assert small.stages[1].out.shape == (8, 64, 320)


@no_cuda_warning
@pytest.mark.parametrize("kind", ["none", *SCALES])
def test_moe_ext_is_right_with_every_kind_of_scales(kind: str) -> None:
    dtype = "bf16" if kind == "none" else "fp8"
    for variant in MoeExt().variants(dtype, ["promoted", "fast"], [kind], []):
        row = measure(MoeExt(), variant, make_small_problem(dtype), run.DRY_RUN_POLICY, CPU)
        assert row.skipped_reason == ""
        assert (row.layout, row.scale) == (MASKED, kind)
        assert row.max_err is not None
        assert 0 < row.max_err < 5e-3


@no_cuda_warning
def test_only_rows_below_the_counts_are_looked_at() -> None:
    small = make_small_problem("bf16")
    small.poison()
    outputs = list(MoeExt().prepare(small, BF16)(0))
    counts = small.plan.counts[0]
    group = int(np.flatnonzero(counts)[-1])
    assert bool(outputs[0][group, counts[group] :].isnan().all())
    assert max_error(small, "none", outputs) < 5e-3
    outputs[1][group, counts[group] - 1, 3] = math.nan
    assert max_error(small, "none", outputs) == math.inf


@no_cuda_warning
def test_a_group_that_takes_another_ones_rows_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    shifted = MoeExt.prepare

    def prepare(self: MoeExt, given: Problem, variant: Variant) -> object:
        call = shifted(self, given, variant)

        def wrong(index: int) -> list[Tensor]:
            outputs = call(index)
            outputs[0].copy_(outputs[0].roll(1, dims=1))
            return list(outputs)

        return wrong

    monkeypatch.setattr(MoeExt, "prepare", prepare)
    row = measure(MoeExt(), BF16, make_small_problem("bf16"), run.DRY_RUN_POLICY, CPU)
    assert row.skipped_reason.startswith("wrong result")


# command line


@no_cuda_warning
@pytest.mark.parametrize("op", [PAIR, GEMM])
def test_dry_run_writes_masked_rows(
    op: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["--dry-run", "--layout", "masked", "--op", op, "--cases", "mixtral"]
    assert run.main([*command, "--scales", "block128", "--out", str(out)]) == 0
    rows = load_rows(out)
    assert {(row.provider, row.layout) for row in rows} == {("moe_ext", MASKED)}
    assert all(row.median_us for row in rows)
    assert "provider torch is skipped: it has no masked layout" in capsys.readouterr().out


@no_cuda_warning
def test_dry_run_says_what_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "MAX_BUFFER_BYTES", 1 << 10)
    out = tmp_path / "rows.jsonl"
    assert (
        run.main(["--dry-run", "--layout", "masked", "--cases", "mixtral", "--out", str(out)]) == 0
    )
    rows = load_rows(out)
    assert rows
    assert all(row.skipped_reason.startswith("masked buffers of 64 rows") for row in rows)


def test_default_layout_is_contiguous() -> None:
    assert run.build_parser().parse_args([]).layout == CONTIGUOUS
    assert Provider.layouts == (CONTIGUOUS,)


# DeepGEMM


def make_stand_in() -> ModuleType:
    def multiply(a: Tensor, b: Tensor, d: Tensor, masked_m: Tensor, expected_m: int) -> None:
        assert masked_m.dtype == torch.int32
        assert isinstance(expected_m, int)
        for group, count in enumerate(masked_m.tolist()):
            d[group, :count] = a[group, :count] @ b[group].T

    def bf16(a: Tensor, b: Tensor, d: Tensor, masked_m: Tensor, expected_m: int) -> None:
        multiply(a.float(), b.float(), d, masked_m, expected_m)

    def fp8(
        a: tuple[Tensor, Tensor],
        b: tuple[Tensor, Tensor],
        d: Tensor,
        masked_m: Tensor,
        expected_m: int,
    ) -> None:
        (values_a, scale_a), (values_b, scale_b) = a, b
        (groups, n, k), rows = values_b.shape, values_a.shape[1]
        assert scale_a.shape == (groups, rows, -(-k // 128))
        assert scale_a.stride(1) == 1
        a_1x128 = scale_a.repeat_interleave(128, 2)[..., :k]
        b_128x128 = scale_b.repeat_interleave(128, 1)[:, :n].repeat_interleave(128, 2)[..., :k]
        multiply(values_a.float() * a_1x128, values_b.float() * b_128x128, d, masked_m, expected_m)

    library = ModuleType("deep_gemm")
    vars(library).update(
        get_mn_major_tma_aligned_tensor=lambda scale: scale.mT.contiguous().mT,
        m_grouped_bf16_gemm_nt_masked=bf16,
        m_grouped_fp8_gemm_nt_masked=fp8,
    )
    return library


@pytest.mark.parametrize("variant", [BF16, BLOCK], ids=["bf16", "fp8"])
def test_deep_gemm_is_right(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", make_stand_in())
    row = measure(DeepGemm(), variant, make_small_problem(variant.dtype), run.DRY_RUN_POLICY, CPU)
    assert row.skipped_reason == ""
    assert (row.config, row.layout) == ("masked", MASKED)


# rows, bars and tables

BLOCK_ROW = make_row(dtype="fp8", scale="block128", accumulate="promoted", layout=MASKED)
PEERS = {("mixtral", "fp8", 16): 610.0, ("mixtral", "fp8", 64): 600.0, ("mixtral", "bf16", 16): 1.0}


def verdicts(rows: Sequence[Row]) -> dict[tuple[str, str], bool | None]:
    return {(bar.name, bar.cell): bar.passed for bar in bars_masked.evaluate(rows, PEERS)}


def test_layouts_are_kept_apart() -> None:
    rows = [BLOCK_ROW, replace(BLOCK_ROW, layout=CONTIGUOUS)]
    assert len(latest(rows)) == 2
    assert pair_rows([make_row(layout=MASKED)]) == []
    assert Results([BLOCK_ROW]).cells("block128") == []
    assert Results([BLOCK_ROW], layout=MASKED).cells("block128") == [("mixtral", "fp8", 16)]


def test_masked_rows_are_held_against_masked_peers() -> None:
    name = "block, masked: faster than peers"
    assert verdicts([BLOCK_ROW]) == {
        (name, "mixtral fp8 T=16"): True,
        (name, "mixtral fp8 T=64"): None,
    }
    found = verdicts([BLOCK_ROW, replace(BLOCK_ROW, num_tokens=64)])
    assert found[name, "mixtral fp8 T=64"] is False
    assert verdicts([make_row(layout=MASKED)]) == {
        ("BF16, masked: faster than peers", "mixtral bf16 T=16"): False
    }
    assert verdicts([replace(BLOCK_ROW, layout=CONTIGUOUS), make_row()]) == {}


def test_masked_peers_are_deep_gemms_masked_kernels() -> None:
    peers = load_masked()
    assert {(case, dtype) for case, dtype, _ in peers} == {
        ("qwen3-30b", "bf16"),
        ("qwen3-30b", "fp8"),
        ("deepseek-v3-ep8", "fp8"),
    }
    # The contiguous kernel is faster there: 11.09 + 7.97.
    assert peers["qwen3-30b", "fp8", 1] == pytest.approx(21.93 + 15.36)


def test_tables_compare_with_the_contiguous_layout_and_with_peers() -> None:
    other = replace(BLOCK_ROW, layout=CONTIGUOUS, median_us=310.0)
    text = masked_tables([BLOCK_ROW, other], PEERS)
    assert "### FP8, scales block128, promoted accumulation" in text
    assert "| mixtral | 620.0 / 1.03 / 18 |" in text
    assert "| mixtral | contiguous | 0.50x (310.0) |" in text
    assert "| mixtral | DeepGEMM | 0.98x (610.0) |" in text
    assert masked_tables([other, make_row()], PEERS) == ""


def test_report_and_comparison_name_the_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write_rows(tmp_path / "old.jsonl", [BLOCK_ROW, replace(BLOCK_ROW, layout=CONTIGUOUS)])
    slower = [replace(BLOCK_ROW, median_us=700.0), replace(BLOCK_ROW, layout=CONTIGUOUS)]
    skipped = replace(BLOCK_ROW, num_tokens=64, median_us=None, skipped_reason="too large")
    new = write_rows(tmp_path / "new.jsonl", [*slower, skipped])
    out = tmp_path / "out.md"
    assert report.main([str(new), "--compare", str(old), "--markdown", str(out)]) == 1
    printed, text = capsys.readouterr().out, out.read_text()
    assert "fp8 block128 promoted zipf0.6 masked T=16: 620.0 -> 700.0 us" in printed
    assert "1 cells lost" in printed
    assert "## Masked layout" in text
    assert "- moe_ext fp8 mixtral masked: too large" in text


def test_older_rows_are_contiguous(tmp_path: Path) -> None:
    line = make_row().to_json().replace(', "layout": "contiguous"', "")
    assert "layout" not in line
    path = tmp_path / "rows.jsonl"
    path.write_text(line)
    assert load_rows(path)[0].layout == CONTIGUOUS
