"""The benchmark's scale layouts, and DeepGEMM's operands, on a stand-in for its library."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from bench import run
from bench.cases import get_case
from bench.measure import Environment, make_out_buffers, make_plans, make_pool, measure
from bench.problem import Problem, make_problem
from bench.providers.base import Variant
from bench.providers.deep_gemm import DeepGemm
from bench.providers.moe_ext import MoeExt
from bench.scales import SCALES, dequantise, has_blocks, make_scales

CPU = Environment(torch.device("cpu"), "cpu", "abc123")
ALIGNMENT = 16  # of the stand-in; DeepGEMM's is 128


def make_small_problem(dtype: str, num_tokens: int = 16, intermediate_size: int = 256) -> Problem:
    """Several blocks of 128 along k, the last one cut off."""
    case = replace(
        get_case("mixtral").shrunk(), hidden_size=320, intermediate_size=intermediate_size
    )
    plans = make_plans(
        "grouped_gemm_pair", [case], [num_tokens], [dtype], ["zipf0.6"], run.DRY_RUN_POLICY
    )
    pool = make_pool(plans, dtype, CPU.device)
    return make_problem(plans[0], pool, make_out_buffers(plans, CPU.device))


# scales


@pytest.mark.parametrize(
    ("kind", "shape_a", "shape_b"),
    [
        ("tensor", (), (8,)),
        ("channel", (32,), (8, 384)),
        ("block128", (32, 3), (8, 2, 2, 3)),
        ("channel_x_tensor", (32,), (8,)),
        ("tensor_x_channel", (), (8, 384)),
        ("block128_x_tensor", (32, 3), (8,)),
    ],
)
def test_shapes_of_scales(kind: str, shape_a: tuple[int, ...], shape_b: tuple[int, ...]) -> None:
    stage = make_small_problem("fp8", intermediate_size=192).stages[0]
    scales = make_scales(stage, kind)
    assert scales.a is not None
    assert scales.b is not None
    assert (scales.a.shape, scales.b.shape) == (shape_a, shape_b)
    assert scales.n_segments == (2 if kind == "block128" else 1)


@pytest.mark.parametrize("kind", SCALES)
def test_dequantised_values_are_about_one(kind: str) -> None:
    stage = make_small_problem("fp8").stages[0]
    a, b = dequantise(stage, make_scales(stage, kind), torch.arange(32), 5)
    assert 0.5 < a.std() < 2.0
    assert 0.5 < b.std() < 2.0


@pytest.mark.filterwarnings("ignore:moe_ext. no CUDA device")
@pytest.mark.parametrize("intermediate_size", [192, 256])
@pytest.mark.parametrize("kind", SCALES)
def test_moe_ext_is_right_with_every_layout(kind: str, intermediate_size: int) -> None:
    problem = make_small_problem("fp8", intermediate_size=intermediate_size)
    for variant in MoeExt().variants("fp8", ["promoted", "fast"], [kind], []):
        row = measure(MoeExt(), variant, problem, run.DRY_RUN_POLICY, CPU)
        assert row.skipped_reason == ""
        assert (row.scale, row.accumulate) == (kind, variant.accumulate)


def test_scales_along_k_have_one_way_to_sum() -> None:
    sums = {
        kind: [v.accumulate for v in MoeExt().variants("fp8", ["promoted", "fast"], [kind], [])]
        for kind in SCALES
    }
    assert {kind for kind in SCALES if sums[kind] == ["promoted"]} == {
        "block128",
        "block128_x_tensor",
    }
    assert [kind for kind in SCALES if has_blocks(kind)] == ["block128", "block128_x_tensor"]


def test_scales_are_an_argument() -> None:
    args = run.build_parser().parse_args(["--scales", "channel_x_tensor,block128_x_tensor"])
    assert args.scales == ["channel_x_tensor", "block128_x_tensor"]
    assert run.build_parser().parse_args(["--scales", "all"]).scales == run.ALL_SCALES


# DeepGEMM


def _check_layout(a: Tensor, experts: Tensor, out: Tensor) -> None:
    assert experts.dtype == torch.int32
    assert len(a) == len(experts) == len(out)
    assert len(a) % ALIGNMENT == 0
    for begin in range(0, len(a), ALIGNMENT):
        tile = experts[begin : begin + ALIGNMENT]
        # As the library reads it: a tile's first row names the expert of its weights.
        assert tile[0] >= 0
        assert set(tile.tolist()) <= {int(tile[0]), -1}


def _multiply(a: Tensor, b: Tensor, out: Tensor, experts: Tensor) -> None:
    for row, expert in enumerate(experts.tolist()):
        if expert >= 0:
            out[row] = b[expert] @ a[row]


def make_stand_in() -> ModuleType:
    """DeepGEMM's names with arithmetic in fp32, as strict about layouts as it is."""

    def to_columns(scale: Tensor) -> Tensor:
        return scale.t().contiguous().t()

    def bf16(a: Tensor, b: Tensor, d: Tensor, m_indices: Tensor) -> None:
        assert a.dtype == b.dtype == d.dtype == torch.bfloat16
        _check_layout(a, m_indices, d)
        _multiply(a.float(), b.float(), d, m_indices)

    def fp8(
        a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, m_indices: Tensor
    ) -> None:
        (values_a, scale_a), (values_b, scale_b) = a, b
        (rows, k), (groups, n, _) = values_a.shape, values_b.shape
        blocks_of_k = -(-k // 128)
        _check_layout(values_a, m_indices, d)
        assert scale_a.shape == (rows, blocks_of_k)
        assert scale_a.stride(0) == 1
        assert scale_b.shape == (groups, -(-n // 128), blocks_of_k)
        assert scale_b.is_contiguous()
        assert scale_a.dtype == scale_b.dtype == torch.float32
        a_1x128 = scale_a.repeat_interleave(128, 1)[:, :k]
        b_128x128 = scale_b.repeat_interleave(128, 1)[:, :n].repeat_interleave(128, 2)[:, :, :k]
        _multiply(values_a.float() * a_1x128, values_b.float() * b_128x128, d, m_indices)

    library = ModuleType("deep_gemm")
    vars(library).update(
        get_mk_alignment_for_contiguous_layout=lambda: ALIGNMENT,
        get_mn_major_tma_aligned_tensor=to_columns,
        m_grouped_bf16_gemm_nt_contiguous=bf16,
        m_grouped_fp8_gemm_nt_contiguous=fp8,
    )
    return library


BF16 = Variant("bf16", "none", "fp32")
FP8 = Variant("fp8", "block128", "promoted")


@pytest.mark.parametrize("num_tokens", [1, 16, 50])
@pytest.mark.parametrize("variant", [BF16, FP8], ids=["bf16", "fp8"])
def test_deep_gemm_is_right(
    variant: Variant, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", make_stand_in())
    problem = make_small_problem(variant.dtype, num_tokens)
    row = measure(DeepGemm(), variant, problem, run.DRY_RUN_POLICY, CPU)
    assert row.skipped_reason == ""
    assert row.median_us is not None
    assert (row.provider, row.config) == ("deep_gemm", "contiguous")


def test_deep_gemm_refuses_blocks_that_it_cannot_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", make_stand_in())
    problem = make_small_problem("fp8", intermediate_size=192)
    row = measure(DeepGemm(), FP8, problem, run.DRY_RUN_POLICY, CPU)
    assert "must begin at multiples of 128, got up at 192" in row.skipped_reason


def test_deep_gemm_takes_older_names(monkeypatch: pytest.MonkeyPatch) -> None:
    library = make_stand_in()
    names = vars(library)
    names["get_m_alignment_for_contiguous_layout"] = names.pop(
        "get_mk_alignment_for_contiguous_layout"
    )
    names["get_col_major_tma_aligned_tensor"] = names.pop("get_mn_major_tma_aligned_tensor")
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    row = measure(DeepGemm(), FP8, make_small_problem("fp8"), run.DRY_RUN_POLICY, CPU)
    assert row.skipped_reason == ""


def test_deep_gemm_that_does_not_import_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    row = measure(DeepGemm(), BF16, make_small_problem("bf16"), run.DRY_RUN_POLICY, CPU)
    assert row.skipped_reason.startswith("RuntimeError: deep_gemm cannot be imported")


def test_deep_gemm_has_block_scales_only() -> None:
    provider = DeepGemm()
    assert provider.variants("bf16", ["promoted"], ["tensor"], []) == [BF16]
    assert provider.variants("fp8", ["promoted"], ["tensor", "channel"], []) == []
    assert provider.variants("fp8", ["promoted", "fast"], ["tensor", "block128"], []) == [FP8]
    assert provider.variants("bf16", ["promoted"], ["tensor"], ["all"]) == []
