"""From timed cells to the dispatcher's tables: written, imported, and asked for a kernel."""

from __future__ import annotations

import math
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from moe_ext import _dispatch, _fused_moe_kernels
from moe_ext._configs import all_configs, config_indices, matching_configs
from moe_ext._dispatch_measured import Measured
from support.bench_rows import make_row, write_rows

from bench import tune_tables
from bench.candidates import candidates, layer_of, stage_sums
from bench.cases import STAGES, Case, get_case, tuned_case_names
from bench.ops import GEMM, LAYER, PAIR
from bench.problem import Cell
from bench.providers.base import Variant, kernels_of
from bench.rows import Row
from bench.tune_problems import choices_of, chosen_by, make_table, problems_of, regret_of
from bench.tune_tables import Refusal, import_table, load_visits, tables_of

BF16 = Variant("bf16", "none", "fp32")
TENSOR = Variant("fp8", "tensor", "promoted")
BLOCK = Variant("fp8", "block128", "promoted")
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
CASES = ("qwen3-30b", "mixtral", "deepseek-v3-tp8", "glm-4.5-air-tp8", "gpt-oss-120b")


def cost_us(cell: Cell, variant: Variant, config: str) -> float:
    """A smooth cost, no two of a cell alike: each kernel likes some number of rows a group best."""
    kernels = kernels_of(config, len(cell.stages))
    rows_per_group = cell.num_rows / cell.case.num_experts
    total = 0.0
    for stage, name in zip(cell.stages, kernels, strict=True):
        kernel = all_configs()[config_indices()[name]]
        n, k = cell.case.stage_shape(stage)
        likes = math.log2(kernel.tile_tokens * (kernel.tile_weights / 128) ** 0.3) - 2
        off = math.log2(rows_per_group) + 0.2 * math.log2(k / 2048) - likes
        least = _dispatch.floor_us(
            variant.dtype, cell.num_rows, min(cell.num_rows, cell.case.num_experts), n, k
        )
        total += least * (1 + 0.04 * abs(off) + 1e-4 * kernel.index)
    return total if len(set(kernels)) == 1 else 1.05 * total + 4


def cell_of(case: Case | str, tokens: int, variant: Variant, op: str) -> Cell:
    case = get_case(case) if isinstance(case, str) else case
    return Cell(case, STAGES, tokens, variant.dtype, "zipf0.6", op=op)


def rows_of(cell: Cell, variant: Variant, **changes: object) -> list[Row]:
    """The rows of one visit, without a disagreement."""
    row = make_row(
        op=cell.op,
        stage="" if len(cell.stages) == 2 else cell.stages[0],
        case=cell.case.name,
        dtype=variant.dtype,
        scale=variant.scale,
        accumulate=variant.accumulate,
        num_tokens=cell.num_tokens,
        sm_mhz=1980.0,
        sm_count=132,
        visit="2026-12-01T00:00:00Z",
        skipped_reason="",
    )
    rows = [
        replace(row, config=name, median_us=cost_us(cell, variant, name))
        for name in candidates(cell, variant)
    ]
    best = min(range(len(rows)), key=lambda index: rows[index].median_us or math.inf)
    for index in {0, best}:
        rows[index] = replace(rows[index], again_us=rows[index].median_us)
    return [replace(row, **changes) for row in rows]  # type: ignore[arg-type]


def every_row(
    variants: Sequence[Variant] = (BF16, TENSOR, BLOCK), ops: Sequence[str] = (PAIR, LAYER)
) -> Iterator[Row]:
    for op in ops:
        for variant in variants:
            for case in CASES:
                for tokens in TOKENS:
                    yield from rows_of(cell_of(case, tokens, variant, op), variant)


@pytest.mark.parametrize("name", ["lost", "file"])
def test_a_folder_that_is_none_is_refused_before_rows_are_read(tmp_path, capsys, name):
    (tmp_path / "file").touch()
    got = {"lost": "none", "file": "a file"}[name]
    with pytest.raises(SystemExit) as error:
        tune_tables.main([str(tmp_path / "rows"), "--write", "--into", str(tmp_path / name)])
    assert error.value.code == 2
    said = f"error: --into must be a folder that is there, got {got}: {tmp_path / name}\n"
    assert capsys.readouterr().err.endswith(said)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    rows = write_rows(folder / "rows.jsonl", list(every_row()))
    command = [str(rows), "--write", "--into", str(folder)]
    assert tune_tables.main(command) == 0
    return folder


def best_of(cell: Cell, variant: Variant) -> str:
    return min(candidates(cell, variant), key=lambda name: cost_us(cell, variant, name))


def tables_in(folder: Path) -> dict[str, Measured]:
    paths = [p for p in folder.glob("_dispatch_table_*.py") if "swapped" not in p.name]
    return {path.stem.removeprefix("_dispatch_table_"): import_table(path) for path in paths}


def asked(tables: dict[str, Measured], cell: Cell, variant: Variant) -> list[str]:
    """What the dispatcher would run with these tables: of a GEMM or of both."""
    chosen = []
    for stage, sums in zip(cell.stages, stage_sums(cell, variant), strict=True):
        n, k = cell.case.stage_shape(stage)
        table = tables["bf16" if variant.dtype == "bf16" else sums.removesuffix("_swapped")]
        problem = _dispatch.Problem(
            variant.dtype, table.accumulate, cell.num_rows, cell.case.num_experts, n, k, 132
        )
        decision = _dispatch.decide(problem, matching_configs(variant.dtype, sums), table)
        chosen.append(decision.config.id)
    return chosen


@pytest.fixture
def no_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for few K, chosen before anything measured, are not of these costs."""
    monkeypatch.setattr(_dispatch, "WHOLE_ROWS", {})


def cost_over_best(cell: Cell, variant: Variant, names: Sequence[str]) -> float:
    mine = cost_us(cell, variant, "+".join(names))
    return mine / cost_us(cell, variant, best_of(cell, variant)) - 1


@pytest.mark.usefixtures("no_whole_rows")
@pytest.mark.parametrize("variant", [BF16, TENSOR, BLOCK], ids=str)
def test_what_is_chosen_for_tuned_pairs_costs_little(written: Path, variant: Variant) -> None:
    tables = tables_in(written)
    over = [
        cost_over_best(cell, variant, asked(tables, cell, variant))
        for case in CASES
        for cell in (cell_of(case, tokens, variant, PAIR) for tokens in TOKENS)
    ]
    assert sum(over) / len(over) < 0.015
    assert max(over) < 0.12


@pytest.mark.parametrize("variant", [BF16, TENSOR, BLOCK], ids=str)
def test_what_is_chosen_for_tuned_layers_costs_little(
    written: Path, variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer_tables = {
        (table.dtype, table.accumulate): table
        for name, table in tables_in(written).items()
        if name.startswith("layer_")
    }
    layer_tables["fp8", "block_swapped"] = layer_tables["fp8", "block"]
    monkeypatch.setattr(_fused_moe_kernels, "LAYER_TABLES", layer_tables)
    over = []
    for case in CASES:
        for tokens in TOKENS:
            cell = cell_of(case, tokens, variant, LAYER)
            layer = layer_of(cell, variant)
            decision = _fused_moe_kernels.decide_kernels(layer, "promoted", False, False, 132)
            names = [all_configs()[index].id for index in decision.kernels]
            over.append(cost_over_best(cell, variant, names))
            assert decision.source == "table"
            assert "rows.jsonl" in decision.reason
    assert sum(over) / len(over) < 0.015
    assert max(over) < 0.12


@pytest.mark.usefixtures("no_whole_rows")
@pytest.mark.parametrize("variant", [BF16, TENSOR, BLOCK], ids=str)
def test_between_the_problems_the_choice_costs_little(written: Path, variant: Variant) -> None:
    """Token counts between those, and shapes near those, that were tuned."""
    tables, draw = tables_in(written), random.Random(0)
    over = []
    for case in map(get_case, CASES):
        for tokens in (2, 8, 32, 100, 500, 3000):
            hidden = max(256, round(case.hidden_size * draw.uniform(0.7, 1.4) / 128) * 128)
            for each in (case, replace(case, name="near", hidden_size=hidden)):
                cell = cell_of(each, tokens, variant, PAIR)
                over.append(cost_over_best(cell, variant, asked(tables, cell, variant)))
    assert sum(over) / len(over) < 0.03
    assert max(over) < 0.15


def test_blocks_off_the_grid_have_the_table_of_all_blocks(written: Path) -> None:
    table = import_table(written / "_dispatch_table_block.py")
    assert any(name.startswith("plain") for name in table.kernels())
    for name in ("block", "layer_block"):
        text = (written / f"_dispatch_table_{name}_swapped.py").read_text()
        assert f"CHOICES = _dispatch_table_{name}.CHOICES\n" in text


def test_every_problem_says_what_was_measured(written: Path) -> None:
    source = (written / "_dispatch_table_bf16.py").read_text()
    cell = cell_of("mixtral", 16, BF16, PAIR)
    us = cost_us(cell, BF16, best_of(cell, BF16))
    [line] = [line for line in source.splitlines() if line.startswith("8 4096 14336 32 ")]
    _, _, _, _, best, *over = line.split()
    assert best == f"{us:.1f}"
    table = import_table(written / "_dispatch_table_bf16.py")
    for choice, thousandths in zip(table.choices, over, strict=True):
        ratio = cost_us(cell, BF16, choice) / us - 1
        assert int(thousandths) == round(1000 * min(ratio, 0.5))
    assert 'where="NVIDIA H200, zipf0.6, rows.jsonl",' in source
    assert "SM clocks 1980 to 1980 MHz" in source
    assert "second timings within 0.0 %" in source


def test_the_order_of_rows_does_not_matter(written: Path, tmp_path: Path) -> None:
    rows = list(every_row())
    random.Random(0).shuffle(rows)
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert tune_tables.main([str(path), "--write", "--into", str(tmp_path)]) == 0
    for file in written.glob("_dispatch_table_*.py"):
        assert (tmp_path / file.name).read_text() == file.read_text()


def test_what_is_written_is_formatted(written: Path) -> None:
    if shutil.which("ruff") is None:
        pytest.skip("needs ruff")
    project = Path(tune_tables.__file__).parent.parent / "pyproject.toml"
    paths = [str(path) for path in written.glob("_dispatch_table_*.py")]
    assert len(paths) == 8
    for command in (["format", "--check"], ["check"]):
        ran = subprocess.run(
            ["ruff", *command, "--no-cache", "--config", str(project), *paths],
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_full_grid_fits_a_module(tmp_path: Path) -> None:
    every = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    rows = [
        row
        for op in (PAIR, LAYER)
        for case in tuned_case_names()
        for tokens in every
        for row in rows_of(cell_of(case, tokens, BLOCK, op), BLOCK)
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert tune_tables.main([str(path), "--write", "--into", str(tmp_path)]) == 0
    for file in tmp_path.glob("_dispatch_table_*.py"):
        assert len(file.read_text().splitlines()) <= 500


# what rows say together


def with_times(rows: list[Row], times: dict[str, float], **changes: object) -> list[Row]:
    """Rows of the named kernels alone, each timed twice."""
    kept = [row for row in rows if row.config in times]
    return [
        replace(row, median_us=times[row.config], again_us=times[row.config], **changes)  # type: ignore[arg-type]
        for row in kept
    ]


A, B = "swap_bf16_w64_t32", "swap_bf16_w128_t64"


def problems_in(*visits: list[Row], tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", [row for rows in visits for row in rows])
    return problems_of(load_visits([path]))


def test_problems_are_of_pairs_and_layers_alone(tmp_path: Path) -> None:
    alone = replace(cell_of("mixtral", 16, BF16, GEMM), stages=("down",))
    visits = [rows_of(cell, BF16) for cell in (alone, cell_of("mixtral", 16, BF16, PAIR))]
    [problem] = problems_in(*visits, tmp_path=tmp_path)
    assert problem.table == ("gemm", "bf16", "fp32")
    assert problem.sizes == (8, 4096, 14336, 32)
    path = write_rows(tmp_path / "alone.jsonl", visits[0])
    assert tune_tables.main([str(path)]) == 1


def test_several_routings_are_problems_of_their_own(tmp_path: Path) -> None:
    rows = rows_of(cell_of("mixtral", 16, BF16, PAIR), BF16)
    even = with_times(rows, {A: 100.0, B: 110.0}, routing="uniform")
    skewed = with_times(rows, {A: 130.0, B: 100.0}, routing="zipf1.2")
    problems = problems_in(even, skewed, tmp_path=tmp_path)
    assert len(problems) == 2
    assert chosen_by(make_table(problems, shrink=0.01), problems[0]) == B  # by the mean of both


def test_choices_that_few_problems_timed_are_left_out(tmp_path: Path) -> None:
    visits = [
        with_times(rows_of(cell_of("mixtral", tokens, TENSOR, LAYER), TENSOR), times)
        for tokens, times in (
            (2**step, {"layer_fp8p_w64_t32": 1.0, "layer_fp8p_w64_t16": 2.0}) for step in range(9)
        )
    ]
    odd = rows_of(cell_of("mixtral", 1000, TENSOR, LAYER), TENSOR)
    problems = problems_in(*visits, odd, tmp_path=tmp_path)
    best = min(problems[-1].choices, key=lambda choice: problems[-1].choices[choice])
    expected = {"layer_fp8p_w64_t16", "layer_fp8p_w64_t32", best}
    assert set(choices_of(problems)) == expected


def test_pairs_of_two_kernels_that_are_nearly_the_best_of_several_problems_serve_them_all(
    tmp_path: Path,
) -> None:
    alone = "layer_fp8p_w64_t32"
    shared = "layer_fp8p_w128_t128+swap_fp8p_w64_t32"
    first, second = f"{alone}+swap_fp8p_w64_t32", "gated_fp8p_w128_t64+swap_fp8p_w128_t64"
    visits = [
        with_times(rows_of(cell_of("mixtral", tokens, TENSOR, LAYER), TENSOR), times)
        for tokens, times in (
            (16, {alone: 110.0, first: 100.0, shared: 100.9, second: 105.0}),
            (20, {alone: 110.0, first: 105.0, shared: 100.9, second: 100.0}),
            (24, {alone: 100.5, first: 105.0, shared: 105.0, second: 100.0}),
        )
    ]
    problems = problems_in(*visits, tmp_path=tmp_path)
    assert set(choices_of(problems)) == {alone, shared}


def test_pairs_of_two_kernels_are_chosen_where_they_were_the_best(tmp_path: Path) -> None:
    rows = rows_of(cell_of("mixtral", 16, BF16, PAIR), BF16)
    two = f"{A}+{B}"
    rows = [*rows, replace(rows[0], config=two)]
    visit = with_times(rows, {A: 110.0, B: 112.0, two: 100.0})
    problems = problems_in(visit, tmp_path=tmp_path)
    table = make_table(problems)
    assert two in table.choices
    assert chosen_by(table, problems[0]) == two


def test_where_whole_rows_are_read_the_first_kernel_is_what_a_problem_is_of(
    tmp_path: Path,
) -> None:
    whole, first, other = (f"swap_fp8p_{name}" for name in ("rows_w128_t16", "w64_t32", "w128_t64"))
    cell = cell_of("glm-4.5-air-tp8", 16, TENSOR, PAIR)
    rows = rows_of(cell, TENSOR)
    times = {first: 90.0, other: 80.0, f"{first}+{whole}": 70.0, f"{other}+{whole}": 75.0}
    rows = [replace(rows[0], config=config) for config in times]
    [problem] = problems_in(with_times(rows, times), tmp_path=tmp_path)
    assert problem.whole_rows == whole
    assert problem.choices == {first: 70.0, other: 75.0}
    assert chosen_by(make_table([problem]), problem) == f"{first}+{whole}"


def test_what_two_kernels_cost_is_at_least_what_the_worse_does() -> None:
    times = {"a": 100.0, "b": 110.0, "a+b": 130.0, "c": 105.0}
    assert regret_of("a", times) == 0
    assert regret_of("a+b", times) == pytest.approx(0.3)
    assert regret_of("b+c", times) == pytest.approx(0.1)
    assert regret_of("b+d", times) is None


def test_tables_are_tried_on_layers_they_were_not_made_of(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune_tables.main([str(written / "rows.jsonl"), "--leave-one-out"]) == 0
    said = capsys.readouterr().out
    assert "_dispatch_table_bf16.py: 35 problems of 5 layers" in said
    assert "layers by tables of the others:" in said
    assert "  all: 210 problems, mean " in said


def test_tables_in_memory_are_those_that_are_written(written: Path) -> None:
    made = tables_of(problems_of(load_visits([written / "rows.jsonl"])))
    assert len(made) == 6
    table = make_table(made["gemm", "fp8", "block"])
    on_disk = import_table(written / "_dispatch_table_block.py")
    assert (table.choices, table.costs) == (on_disk.choices, on_disk.costs)


# refusals

CELL = cell_of("mixtral", 16, BF16, PAIR)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"again_us": 700.0}, "us, then 700.0"),
        ({"sm_mhz": 1900.0, "config": A}, "ran at 1900 MHz"),
        ({"skipped_reason": "wrong result: max_err 1", "median_us": None}, "wrong results of"),
        ({"sm_count": 78}, r"GPUs with \['132', '78'\] SMs"),
    ],
)
def test_rows_that_cannot_be_relied_on_are_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    rows = rows_of(CELL, BF16)
    best = min(range(len(rows)), key=lambda index: rows[index].median_us or math.inf)
    if "config" in changes:
        changes = {**changes, "median_us": 1.01 * (rows[best].median_us or 0)}
        index = next(i for i, row in enumerate(rows) if row.config == A and i != best)
    else:
        index = best
    rows[index] = replace(rows[index], **changes)  # type: ignore[arg-type]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(Refusal, match=message):
        load_visits([path])


def test_a_refusal_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [replace(row, again_us=None) for row in rows_of(CELL, BF16)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    command = [str(path), "--write", "--into", str(tmp_path)]
    assert tune_tables.main(command) == 1
    said = capsys.readouterr().out
    assert "no tables: 1 problems" in said
    assert "no kernel was timed twice" in said
    assert list(tmp_path.glob("*.py")) == []
    assert tune_tables.main([*command, "--without-unsteady"]) == 1
    assert "no cell has a time" in capsys.readouterr().out
    assert tune_tables.main([*command, "--unchecked"]) == 0
    assert len(list(tmp_path.glob("*.py"))) == 1


def test_unsteady_cells_can_be_left_out(tmp_path: Path) -> None:
    good = rows_of(CELL, BF16)
    bad = rows_of(cell_of("mixtral", 64, BF16, PAIR), BF16)
    bad[0] = replace(bad[0], again_us=2 * (bad[0].median_us or 0))
    path = write_rows(tmp_path / "rows.jsonl", [*good, *bad])
    with pytest.raises(Refusal):
        load_visits([path], unchecked=True)
    [visit] = load_visits([path], without_unsteady=True)
    assert visit.rows[0].num_tokens == 16


def test_of_a_cell_the_last_visit_that_agrees_with_itself_counts(tmp_path: Path) -> None:
    first, second = (rows_of(CELL, BF16, visit=f"2026-12-01T0{hour}:00:00Z") for hour in (1, 2))
    third = rows_of(CELL, BF16, visit="2026-12-01T03:00:00Z")
    third[0] = replace(third[0], again_us=2 * (third[0].median_us or 0))
    path = write_rows(tmp_path / "rows.jsonl", [*second, *third, *first])
    [visit] = load_visits([path], without_unsteady=True)
    assert {row.visit for row in visit.rows} == {second[0].visit}


def test_kernels_that_are_not_compiled_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(cell_of("qwen3-30b", 16, BLOCK, PAIR), BLOCK)
    names = {"gone": rows[0].config, "gone+lost": rows[1].config}
    gone = [
        replace(row, config=name, median_us=0.001, again_us=0.001)
        for name, row in zip(names, rows, strict=False)
    ]
    path = write_rows(tmp_path / "rows.jsonl", [*rows, *gone])
    assert tune_tables.main([str(path), "--write", "--into", str(tmp_path)]) == 0
    assert "kernels that are not compiled are skipped: gone, lost\n" in capsys.readouterr().out
    written = [module.read_text() for module in tmp_path.glob("*.py")]
    assert written
    assert not any("gone" in text for text in written)
    write_rows(path, gone)
    assert tune_tables.main([str(path)]) == 1
    assert "no cell has a time of a compiled kernel, only of gone, lost" in capsys.readouterr().out
