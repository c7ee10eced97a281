"""The benchmark of whole layers before its reports: work, problem, providers, command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from moe_ext._configs import matching_configs
from support.bench_rows import make_row

from bench import run
from bench.bars_layer import KINDS
from bench.cases import STAGES, get_case
from bench.floors import floor_us, layer_work_of, work_of
from bench.layer import LAYER_SCALES, OUTLIER, LayerProblem, make_layer, make_layer_scales
from bench.layer_checks import max_layer_error
from bench.measure import LAYER_PROVIDERS, Environment, make_plans, make_pool, measure
from bench.ops import LAYER
from bench.providers.base import Provider, Variant
from bench.providers.moe_ext_layer import MoeExtLayer, chosen
from bench.rows import Row, latest, load_rows
from bench.timing import Call

CPU = Environment(torch.device("cpu"), "cpu", "abc123")
LAYER_ROW = make_row(op=LAYER, dtype="fp8", scale="block128", accumulate="promoted", host_us=30.0)

pytestmark = pytest.mark.filterwarnings("ignore:moe_ext. no CUDA device")


def make_small_layer(
    dtype: str, num_tokens: int = 40, intermediate_size: int = 192
) -> LayerProblem:
    case = replace(get_case("mixtral").shrunk(), hidden_size=320)
    case = replace(case, intermediate_size=intermediate_size)
    plans = make_plans(LAYER, [case], [num_tokens], [dtype], ["zipf0.6"], run.DRY_RUN_POLICY)
    return make_layer(plans[0], make_pool(plans, dtype, CPU.device))


# work


def test_floor_is_that_of_the_pair() -> None:
    case = get_case("qwen3-30b")
    for tokens in (1, 8192):
        layer, pair = (
            layer_work_of(case, "fp8", tokens, 70.0),
            work_of(case, STAGES, "fp8", tokens, 70.0),
        )
        assert floor_us(layer, "fp8") == floor_us(pair, "fp8")


def test_activations_of_a_layer() -> None:
    work = layer_work_of(get_case("qwen3-30b"), "fp8", 100, 70.0)
    # 100 tokens: 2048 BF16 in and out; 800 rows: 768 FP8 between the GEMMs, 2048 BF16 after them
    assert work.activation_bytes == 100 * 2 * 2048 * 2 + 800 * (768 + 2048 * 2)


# problem


def test_calls_rotate_weights_and_draws() -> None:
    problem = make_small_layer("bf16")
    plan = problem.plan
    assert plan.copies >= 2
    first, second = problem.operands(0), problem.operands(1)
    for one, other in zip(first, second, strict=True):
        assert one.data_ptr() != other.data_ptr()
        assert not torch.equal(one, other)
    assert problem.operands(plan.copies)[1].data_ptr() == first[1].data_ptr()
    # The pool holds weights alone.
    assert len(plan.blocks()) == 2 * plan.copies


def test_ids_are_those_of_the_counts() -> None:
    problem = make_small_layer("bf16")
    counted = torch.bincount(problem.topk_ids[0].flatten(), minlength=8)
    assert counted.tolist() == problem.plan.counts[0].tolist()


def test_first_token_has_the_largest_values() -> None:
    hidden = make_small_layer("fp8", num_tokens=500).hidden_states[0].float()
    assert hidden[0].abs().max() == hidden.abs().max()
    assert hidden[0].std() > 0.8 * OUTLIER * hidden[1:].std()


@pytest.mark.parametrize(
    ("kind", "w13_shape", "w2_shape"),
    [
        ("tensor", (8,), (8,)),
        ("tensor_static", (8,), (8,)),
        ("channel", (8, 384), (8, 320)),
        ("block128", (8, 2, 2, 3), (8, 3, 2)),
    ],
)
def test_shapes_of_scales(kind: str, w13_shape: tuple[int, ...], w2_shape: tuple[int, ...]) -> None:
    scales = make_layer_scales(make_small_layer("fp8"), kind)
    assert scales.w13_scale is not None
    assert scales.w2_scale is not None
    assert (scales.w13_scale.shape, scales.w2_scale.shape) == (w13_shape, w2_shape)
    given = kind == "tensor_static"
    assert (scales.a1_scale is not None) == (scales.a2_scale is not None) == given


def test_whole_blocks_have_one_grid() -> None:
    scales = make_layer_scales(make_small_layer("fp8", intermediate_size=256), "block128")
    assert scales.w13_scale is not None
    assert scales.w13_scale.shape == (8, 4, 3)


# providers


@pytest.mark.parametrize("scale", LAYER_SCALES)
def test_sampled_tokens_have_the_scales_of_the_whole(scale: str) -> None:
    problem = make_small_layer("fp8")
    row = measure(
        MoeExtLayer(), Variant("fp8", scale, "promoted"), problem, run.DRY_RUN_POLICY, CPU
    )
    assert row.skipped_reason == ""
    assert row.max_err is not None
    assert row.max_err < 5e-3
    assert (row.op, row.stage, row.scale, row.num_tokens) == (LAYER, "", scale, 40)


@pytest.mark.parametrize("name", list(LAYER_PROVIDERS))
def test_layer_is_right_in_bf16(name: str) -> None:
    provider = LAYER_PROVIDERS[name]()
    variant = provider.variants("bf16", ["promoted"], [], [])[0]
    row = measure(provider, variant, make_small_layer("bf16"), run.DRY_RUN_POLICY, CPU)
    assert row.skipped_reason == ""
    assert row.provider == name


class Faulty(MoeExtLayer):
    """A layer with one wrong token, or one that is not written."""

    def __init__(self, value: float) -> None:
        self.value = value

    def prepare(self, problem: LayerProblem, variant: Variant) -> Call:
        right = super().prepare(problem, variant)

        def call(index: int) -> Sequence[torch.Tensor]:
            outputs = right(index)
            outputs[0][-1, 0] = self.value
            return outputs

        return call


@pytest.mark.parametrize("value", [0.5, float("nan")])
@pytest.mark.parametrize(
    "variant", [Variant("bf16", "none", "fp32"), Variant("fp8", "block128", "promoted")]
)
def test_wrong_layer_is_not_timed(variant: Variant, value: float) -> None:
    layer = make_small_layer(variant.dtype)
    row = measure(Faulty(value), variant, layer, run.DRY_RUN_POLICY, CPU)
    assert row.median_us is None
    assert row.skipped_reason.startswith("wrong result")


def test_error_of_nothing_written_is_infinite() -> None:
    problem = make_small_layer("bf16")
    problem.poison()
    assert max_layer_error(problem, "none", problem.out) == float("inf")


@pytest.mark.parametrize("scale", LAYER_SCALES)
def test_kernels_are_those_of_the_op(scale: str) -> None:
    ids = [config.id for config in matching_configs("fp8", _sums(scale), ("gated", "either"))]
    gate_up, down = chosen(make_small_layer("fp8"), Variant("fp8", scale, "promoted"), 132).split(
        "+"
    )
    assert gate_up in ids
    assert down == gate_up or down in [
        config.id for config in matching_configs("fp8", _sums(scale))
    ]


def _sums(scale: str) -> str:
    return "block" if scale == "block128" else "promoted"


def test_variants_are_those_that_a_layer_has() -> None:
    found = MoeExtLayer().variants("fp8", ["promoted", "fast"], run.ALL_SCALES, [])
    assert {variant.scale for variant in found} == set(LAYER_SCALES)
    assert [v.accumulate for v in found if v.scale == "block128"] == ["promoted"]
    assert MoeExtLayer().variants("fp8", ["promoted"], ["tensor"], ["all"]) == []


# command line


COMMAND = ["--dry-run", "--op", LAYER, "--cases", "mixtral", "--tokens", "4", "--commit", "abc"]


def dry_run(out: Path, *options: str) -> list[Row]:
    assert run.main([*COMMAND, "--out", str(out), *options]) == 0
    return load_rows(out)


def test_dry_run_measures_every_layout(tmp_path: Path) -> None:
    options = ("--scales", "all", "--accumulate", "promoted")
    rows = dry_run(tmp_path / "rows.jsonl", *options)
    assert {(row.provider, row.dtype, row.scale) for row in rows} == {
        ("torch", "bf16", "none"),
        *(("moe_ext", dtype, scale) for scale, dtype in KINDS.items()),
    }
    assert all(row.op == LAYER and row.median_us and not row.batch_invariant for row in rows)
    assert all(row.host_us is None for row in rows)  # a dry run measures nothing


def test_batch_invariance_is_a_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = dry_run(tmp_path / "rows.jsonl", "--batch-invariant", "--dtypes", "fp8")
    assert {(row.provider, row.batch_invariant) for row in rows} == {("moe_ext", True)}
    assert all(row.median_us for row in rows)
    assert "torch is skipped: it has no batch-invariant mode" in capsys.readouterr().out
    assert Provider.batch_invariant is False


def test_masked_layers_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    assert run.main([*COMMAND, "--out", str(out), "--layout", "masked"]) == 0
    assert out.read_text() == ""
    assert "moe_ext is skipped: it has no masked layout" in capsys.readouterr().out


def test_modes_are_measurements_of_their_own() -> None:
    rows = [LAYER_ROW, replace(LAYER_ROW, batch_invariant=True), replace(LAYER_ROW, median_us=1.0)]
    assert [(row.batch_invariant, row.median_us) for row in latest(rows)] == [
        (False, 1.0),
        (True, 620.0),
    ]
