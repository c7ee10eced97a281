"""The benchmark before its reports: cases, floors, draws, plans, checks, command lines."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from bench import regret, run, tune
from bench.cases import TOKENS, case_names, extra_case_names, get_case, tuned_case_names
from bench.checks import max_error, sample_groups, sample_rows
from bench.data.routing import counts, expert_log_popularity, make_routing
from bench.draws import draw_all, draw_key
from bench.floors import floor_us, traffic_floor_us, work_of
from bench.measure import Environment, make_out_buffers, make_plans, make_pool, measure
from bench.peers import PEERS_CSV
from bench.problem import Cell, Problem, make_plan, make_problem
from bench.providers.base import Provider, Variant
from bench.rows import load_rows
from bench.scales import make_scales
from bench.timing import Call, TimingPolicy, summarise

PAIR = ("gate_up", "down")
RESULTS = Path(run.__file__).parent / "results"
CPU = Environment(torch.device("cpu"), "cpu", "abc123")


# cases


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mixtral", (8, 2, 4096, 14336)),
        ("mixtral-tp4", (8, 2, 4096, 3584)),
        ("qwen3-30b", (128, 8, 2048, 768)),
        ("qwen3-30b-tp4", (128, 8, 2048, 192)),
        ("qwen3-next", (512, 10, 2048, 512)),
        ("deepseek-v3-tp8", (256, 8, 7168, 256)),
        ("deepseek-v3-ep8", (32, 8, 7168, 2048)),
        ("gpt-oss-120b", (128, 4, 2880, 2880)),
        ("glm-4.5-air-tp8", (128, 8, 4096, 176)),
        ("shard-192", (128, 8, 2048, 192)),
        ("shard-256", (128, 8, 2048, 256)),
        ("qwen3-30b-ep8", (16, 8, 2048, 768)),
        ("mixtral-ep4", (2, 2, 4096, 14336)),
    ],
)
def test_case_sizes(name: str, sizes: tuple[int, ...]) -> None:
    case = get_case(name)
    assert (case.num_experts, case.top_k, case.hidden_size, case.intermediate_size) == sizes


def test_case_stage_shapes_are_n_then_k() -> None:
    case = get_case("qwen3-30b")
    assert case.stage_shape("gate_up") == (1536, 2048)
    assert case.stage_shape("down") == (2048, 768)


def test_cases_agree_with_the_peers_file() -> None:
    with PEERS_CSV.open(newline="") as file:
        for row in csv.DictReader(file):
            case = get_case(row["case"])
            assert case.num_experts == int(row["num_experts"])
            assert case.top_k == int(row["top_k"])
            assert case.hidden_size == int(row["hidden_size"])
            assert case.intermediate_size == int(row["intermediate_size"])


def test_tuned_cases_have_sizes_of_their_own() -> None:
    names = tuned_case_names()
    assert names[: len(case_names())] == case_names()
    assert set(extra_case_names()) - set(names) == {"shard-192"}  # qwen3-30b-tp4


def test_a_miniature_has_a_name() -> None:
    assert get_case("mixtral-dry-run") == get_case("mixtral").shrunk()


def test_unknown_case_is_named() -> None:
    with pytest.raises(ValueError, match="got 'no-such-model'"):
        get_case("no-such-model")


# floors


def test_floor_of_one_token_is_the_hit_weights() -> None:
    work = work_of(get_case("mixtral"), PAIR, "bf16", 1, active_experts=2.0)
    # 2 experts x 3 x 4096 x 14336 x 2 bytes = 704,643,072 bytes at 4.5 TB/s, and 2 us
    assert work.weight_bytes == 704_643_072
    assert floor_us(work, "bf16") == pytest.approx(158.587, abs=1e-3)


def test_floor_of_many_tokens_is_the_dense_rate() -> None:
    work = work_of(get_case("mixtral"), PAIR, "fp8", 8192, active_experts=8.0)
    # 2 x 16384 rows x 3 x 4096 x 14336 = 5.7724e12 operations at 1350 TFLOP/s, and 2 us
    assert work.operations == 2 * 16384 * 3 * 4096 * 14336
    assert floor_us(work, "fp8") == pytest.approx(4277.87, abs=0.01)


def test_traffic_floor_adds_every_activation_once() -> None:
    work = work_of(get_case("deepseek-v3-tp8"), PAIR, "fp8", 8192, active_experts=256.0)
    # 65536 rows: 7168 FP8 in, 512 BF16 out, 256 FP8 in, 7168 BF16 out
    assert work.activation_bytes == 65536 * (7168 + 512 * 2 + 256 + 7168 * 2)
    assert traffic_floor_us(work, "fp8") == pytest.approx(
        (256 * 3 * 7168 * 256 + 65536 * 22784) / 4.5e6 + 2, abs=0.01
    )


def test_floors_agree_with_the_peers_file() -> None:
    stages = {"gemm_gateup": "gate_up", "gemm_down": "down"}
    with PEERS_CSV.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["op"] in stages]
    assert rows
    for row in rows:
        active, tokens = float(row["active_experts"]), int(row["num_tokens"])
        case, stage = get_case(row["case"]), stages[row["op"]]
        floor = floor_us(work_of(case, (stage,), row["dtype"], tokens, active), row["dtype"])
        # active_experts is rounded to a tenth there
        assert floor == pytest.approx(float(row["floor_us"]), rel=0.004, abs=0.06)


# routing and plans


def test_routing_ids_never_change() -> None:
    ids, weights = make_routing(64, 128, 8, "zipf0.6", seed=0)
    checksum = int((ids.long() * torch.arange(1, 513).view(64, 8)).sum())
    assert checksum == 8_804_776
    assert all(len(set(row)) == 8 for row in ids.tolist())
    torch.testing.assert_close(weights.sum(1), torch.ones(64))


def test_routing_follows_the_popularity() -> None:
    ids, _ = make_routing(100_000, 16, 1, "zipf0.6", seed=1)
    frequency = counts(ids, 16).numpy() / 100_000
    np.testing.assert_allclose(frequency, np.exp(expert_log_popularity(16, "zipf0.6")), rtol=0.05)


def test_unknown_routing_kind_is_named() -> None:
    with pytest.raises(ValueError, match="got 'normal'"):
        make_routing(1, 8, 2, "normal")


def make_cell(case: str, num_tokens: int, dtype: str) -> Cell:
    return Cell(get_case(case), PAIR, num_tokens, dtype, "zipf0.6")


@pytest.mark.parametrize("name", case_names())
@pytest.mark.parametrize("num_tokens", [1, 64])
def test_copies_keep_the_weights_out_of_the_cache(name: str, num_tokens: int) -> None:
    cell, policy = make_cell(name, num_tokens, "fp8"), TimingPolicy()
    key = draw_key(cell.case, num_tokens, "zipf0.6")
    plan = make_plan(cell, draw_all([key])[key], policy)
    assert plan.copies >= 2
    assert plan.calls % plan.copies == 0
    assert plan.copies * plan.work.weight_bytes >= 3 * policy.l2_bytes
    assert plan.counts.sum(axis=1).tolist() == [cell.num_rows] * len(plan.counts)


def test_plan_averages_over_the_draws_it_uses() -> None:
    cell = make_cell("mixtral", 8192, "bf16")
    draws = np.zeros((4, 8), dtype=np.int64)
    draws[0, 0] = draws[1, 0] = cell.num_rows
    draws[2:] = cell.num_rows // 8
    plan = make_plan(cell, draws, TimingPolicy())
    assert plan.calls == 2  # so only the draws with one active expert are used
    assert plan.active_experts == 1.0
    assert plan.max_rows == cell.num_rows


def test_summary_of_samples() -> None:
    timing = summarise([float(value) for value in range(1, 12)])
    assert (timing.median_us, timing.p10_us, timing.p90_us) == (6.0, 2.0, 10.0)


# measurement on the CPU


class Loop(Provider[Problem]):
    """A provider made of plain matrix products, with a fault to order."""

    name = "loop"
    needs = "nothing"

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def available(self) -> bool:
        return True

    def variants(
        self,
        dtype: str,
        accumulates: Sequence[str],
        scales: Sequence[str],
        configs: Sequence[str],
    ) -> list[Variant]:
        return [Variant(dtype, "tensor" if dtype == "fp8" else "none", "fp32")]

    def prepare(self, problem: Problem, variant: Variant) -> Call:
        if self.fault == "raises":
            raise RuntimeError("no kernel for this shape\nand a stack trace")

        def call(index: int) -> list[torch.Tensor]:
            ends = problem.offs[index % len(problem.offs)].tolist()
            for stage in problem.stages:
                scales = make_scales(stage, variant.scale)
                b = stage.b[index % problem.plan.copies]
                begin = 0
                for group, end in enumerate(ends):
                    source = 0 if self.fault == "wrong group" else group
                    value = stage.a[begin:end].float() @ b[source].float().t()
                    if scales.a is not None and scales.b is not None:
                        value *= scales.a * scales.b[source]
                    stage.out[begin:end] = value.to(stage.out.dtype)
                    begin = end
                if self.fault == "unwritten":
                    stage.out[begin - 1, 0] = math.nan
            return [stage.out for stage in problem.stages]

        return call


def make_small_problem(dtype: str) -> Problem:
    plans = make_plans(
        "grouped_gemm_pair",
        [get_case("mixtral").shrunk()],
        [16],
        [dtype],
        ["zipf0.6"],
        run.DRY_RUN_POLICY,
    )
    pool = make_pool(plans, dtype, CPU.device)
    return make_problem(plans[0], pool, make_out_buffers(plans, CPU.device))


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_right_provider_is_timed(dtype: str) -> None:
    problem, provider = make_small_problem(dtype), Loop()
    variant = provider.variants(dtype, [], [], [])[0]
    row = measure(provider, variant, problem, run.DRY_RUN_POLICY, CPU)
    assert row.skipped_reason == ""
    assert row.max_err is not None
    assert 0 < row.max_err < 5e-3
    assert row.median_us is not None
    assert row.num_samples == run.DRY_RUN_POLICY.samples


@pytest.mark.parametrize("fault", ["wrong group", "unwritten"])
def test_wrong_provider_is_not_timed(fault: str) -> None:
    problem, provider = make_small_problem("bf16"), Loop(fault)
    row = measure(provider, Variant("bf16", "none", "fp32"), problem, run.DRY_RUN_POLICY, CPU)
    assert row.median_us is None
    assert row.skipped_reason.startswith("wrong result")


def test_raising_provider_is_skipped_with_its_reason() -> None:
    problem = make_small_problem("bf16")
    row = measure(Loop("raises"), Variant("bf16", "none", "fp32"), problem, run.DRY_RUN_POLICY, CPU)
    assert row.skipped_reason == "RuntimeError: no kernel for this shape"


def test_error_of_nothing_written_is_infinite() -> None:
    problem = make_small_problem("fp8")
    problem.poison()
    assert max_error(problem, "tensor", [stage.out for stage in problem.stages]) == math.inf


def test_sampled_groups_hold_the_extremes() -> None:
    rows = np.array([0, 5, 0, 9, 1, 3, 0])
    assert {1, 3, 4, 5} <= set(sample_groups(rows))
    assert 0 not in sample_groups(rows)
    assert sample_rows(1).tolist() == [0]
    assert sample_rows(1000)[[0, -1]].tolist() == [0, 999]


# committed rows


# `tuning-named-*` are put together of others, without what floors are reckoned from.
NOT_OF_THE_GRID = tuple(
    f"{name}-*.jsonl" for name in ("precision", "convert", "e2e", "mixed", "regret", "tuning-named")
)
OF_ANOTHER_KIND = {path for pattern in NOT_OF_THE_GRID for path in RESULTS.glob(pattern)}
OF_THE_GRID = sorted({*RESULTS.glob("*.jsonl")} - OF_ANOTHER_KIND)


@pytest.mark.parametrize("path", OF_THE_GRID, ids=lambda path: path.name)
def test_committed_rows_load(path: Path) -> None:
    rows = load_rows(path)
    assert rows
    for row in rows:
        get_case(row.case)
        assert (row.median_us is None) == (row.ratio_to_floor is None) == bool(row.skipped_reason)
        if row.median_us is not None and row.ratio_to_floor is not None:
            assert row.ratio_to_floor == pytest.approx(row.median_us / row.floor_us, rel=1e-3)


# The times of this file come from a tool older than `bench.tune`, which wrote no more than the
# cell, the kernel and the median: floors and loads were computed later, from draws 0..3.
def test_tuner_reads_committed_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["--read", str(RESULTS / "tuning-2026-11-29.jsonl"), "--each"]) == 0
    assert "slower than the best kernel on average" in capsys.readouterr().out


def test_tuner_reads_a_kernel_that_is_not_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = load_rows(RESULTS / "tuning-2026-11-29.jsonl")[0]
    path = tmp_path / "rows.jsonl"
    path.write_text(replace(row, config="swap_bf16_gone").to_json() + "\n")
    assert tune.main(["--read", str(path), "--each"]) == 0
    out = capsys.readouterr().out
    assert "swap_bf16_gone" in out
    assert "no cell has a time of the dispatcher's kernel" in out


# command lines


def test_run_arguments() -> None:
    args = run.build_parser().parse_args(
        ["--cases", "mixtral,qwen3-30b", "--tokens", "1,4", "--providers", "moe_ext"]
    )
    assert args.cases == ["mixtral", "qwen3-30b"]
    assert args.tokens == [1, 4]
    assert args.providers == ["moe_ext"]
    assert args.samples == 20


def test_run_defaults_are_the_full_grid() -> None:
    args = run.build_parser().parse_args([])
    assert args.cases == case_names()
    assert args.tokens == list(TOKENS)
    assert args.routing == ["zipf0.6"]


def test_cases_outside_the_full_grid_are_taken_by_name() -> None:
    parse = run.build_parser().parse_args
    assert parse(["--cases", "shard-192,shard-256"]).cases == extra_case_names()[:2]
    assert parse(["--cases", "all"]).cases == case_names()
    assert not set(extra_case_names()) & set(case_names())


def test_run_refuses_an_unknown_case(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.build_parser().parse_args(["--cases", "mixtral,llama"])
    assert "got llama" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parser", "arguments", "said"),
    [
        (run, ["--tokens", "0"], "--tokens: must be a whole number of at least 1, got '0'"),
        (run, ["--tokens", "4,-2"], "--tokens: must be a whole number of at least 1, got '-2'"),
        (tune, ["--tokens", "0"], "--tokens: must be a whole number of at least 1, got '0'"),
        (run, ["--samples", "0"], "--samples: must be a whole number of at least 1, got '0'"),
        (regret, ["--samples", "0"], "--samples: must be a whole number of at least 1, got '0'"),
        (regret, ["--cases", "0"], "--cases: must be a whole number of at least 1, got '0'"),
        (regret, ["--cases", "-3"], "--cases: must be a whole number of at least 1, got '-3'"),
        (run, ["--configs", "nosuch"], "must be all or ids of compiled kernels, got nosuch"),
        (tune, ["--configs", "all,no"], "must be all or ids of compiled kernels, got no"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    parser: ModuleType, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        parser.build_parser().parse_args(arguments)
    assert raised.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:moe_ext. no CUDA device")
@pytest.mark.parametrize("op", run.OPS)
def test_dry_run_writes_rows(op: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["--dry-run", "--op", op, "--cases", "mixtral", "--tokens", "1,16"]
    assert run.main([*command, "--commit", "abc123", "--out", str(out)]) == 0
    rows = load_rows(out)
    stages = {"", *PAIR} - ({""} if op == "grouped_gemm" else set(PAIR))
    assert {row.stage for row in rows} == stages
    measured = {(provider, dtype) for provider in ("moe_ext", "torch") for dtype in ("bf16", "fp8")}
    if op == "fused_moe":
        measured.remove(("torch", "fp8"))
    assert {row.op for row in rows} == {op}
    assert {(row.provider, row.dtype) for row in rows} == measured
    assert all(row.median_us for row in rows if row.provider == "moe_ext")
    assert {row.commit for row in rows} == {"abc123"}
