"""Write the dispatcher's tables from rows of `bench.tune`; needs no GPU.

`python -m bench.tune_tables bench/results/tune.jsonl --write` rewrites those modules
`_dispatch_table_*.py` that the rows say something about. It refuses where a kernel was wrong, a
kernel's two timings or the SM clocks of the best ones differ by more than 3 %, or rows come from
GPUs with different numbers of SMs. Without --write it says what it would write;
`--leave-one-out` also what the tables would cost on each layer that they were not made from.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.cases import STAGES, case_names, extra_case_names
from bench.contest import disagreement
from bench.files import refused_in_a_line
from bench.measure import REPOSITORY
from bench.ops import LAYER
from bench.providers.base import joined
from bench.rows import Row, load_rows
from bench.tune_cells import cell_key, latest_visits
from bench.tune_points import (
    TOLERANCE,
    Point,
    Problem,
    Shape,
    TableKey,
    Visit,
    points_of,
    problems_of,
)
from bench.tune_source import file_name, source_of

PACKAGE = REPOSITORY / "python" / "moe_ext"


class Refusal(Exception):
    """Why no table is made of the rows."""


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of `bench.tune_tables`."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune_tables", description=__doc__)
    add = parser.add_argument
    add("files", type=Path, nargs="+", help="of bench.tune; of a cell the last visit counts")
    add("--write", action="store_true")
    add("--into", type=Path, default=PACKAGE, help="the folder of the modules: the package's")
    add(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help="share of time by which a kernel is as good as the best",
    )
    add("--unchecked", action="store_true", help="take cells without clocks and second timings too")
    add("--without-unsteady", action="store_true", help="leave cells that disagree out, not refuse")
    add("--leave-one-out", action="store_true")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Write tables, or say why not."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    try:
        with refused_in_a_line(parser):
            visits = load_visits(
                args.files, unchecked=args.unchecked, without_unsteady=args.without_unsteady
            )
        visits, gone = compiled_only(visits)
    except Refusal as refusal:
        print(refusal)
        return 1
    if gone:
        print(f"kernels that are not compiled are skipped: {', '.join(gone)}")
    problems = problems_of(visits)
    points = points_of(problems, args.tolerance)
    for table in _tables(points):
        print(_said_of(table, [point for point in points if point.table == table]))
    if args.leave_one_out:
        print(leave_one_out(problems, args.tolerance))
    if args.write:
        for table in _tables(points):
            path = args.into / file_name(table)
            path.write_text(source_of(table, [p for p in points if p.table == table]))
            _check_written(path, [p for p in points if p.table == table])
            print(f"wrote {path}")
        print(_unused(args.into))
    return 0


def load_visits(
    paths: Iterable[Path], *, unchecked: bool = False, without_unsteady: bool = False
) -> list[Visit]:
    """Return the last visit of every cell; raise a Refusal where they cannot be relied on."""
    rows: list[Row] = []
    files: dict[tuple[object, ...], str] = {}
    for path in paths:
        own = load_rows(path)
        rows += own
        files |= {(cell_key(row), row.visit): _relative(path) for row in own}
    visits, problems = [], []
    for key, of_cell in latest_visits(rows).items():
        name = " ".join(str(part) for part in key if part)
        wrong = [row.config for row in of_cell if row.skipped_reason.startswith("wrong")]
        if wrong:
            problems.append(f"{name}: wrong results of {', '.join(wrong)}")
        timed = [row for row in of_cell if row.median_us is not None]
        why = disagreement(of_cell)
        if not timed:
            continue
        if why and not (unchecked and all(row.again_us is None for row in timed)):
            if not without_unsteady:
                problems.append(f"{name}: {why}")
            continue
        visits.append(Visit(timed, files[key, timed[0].visit]))
    counts = {row.sm_count for visit in visits for row in visit.rows}
    if len(counts) > 1:
        problems.append(f"rows come from GPUs with {sorted(map(str, counts))} SMs")
    if problems:
        again = "run bench.tune again on the same file, or leave them out (--without-unsteady)"
        raise Refusal("\n  ".join([f"no tables: {len(problems)} problems; {again}", *problems]))
    if not visits:
        raise Refusal("no tables: no cell has a time")
    return sorted(visits, key=_order)


def compiled_only(visits: Iterable[Visit]) -> tuple[list[Visit], list[str]]:
    """Return visits without the rows of kernels that are not compiled any more, and those kernels;
    raise a Refusal where nothing is left."""
    from moe_ext._configs import config_indices

    known, gone, kept = config_indices().keys(), set[str](), []
    for visit in visits:
        unknown = {row.config: set(row.config.split("+")) - known for row in visit.rows}
        gone |= set[str]().union(*unknown.values())
        rows = [row for row in visit.rows if not unknown[row.config]]
        if rows:
            kept.append(Visit(rows, visit.file))
    if not kept:
        names = ", ".join(sorted(gone))
        raise Refusal(f"no tables: no cell has a time of a compiled kernel, only of {names}")
    return kept, sorted(gone)


def _order(visit: Visit) -> tuple[object, ...]:
    """Return the place of a visit among others, whenever each was made."""
    row, names = visit.rows[0], [*case_names(), *extra_case_names()]
    case = names.index(row.case) if row.case in names else len(names)
    return (case, row.case, STAGES.index(row.stage or STAGES[0]), *cell_key(row))


def _relative(path: Path) -> str:
    full = path.resolve()
    return str(full.relative_to(REPOSITORY)) if full.is_relative_to(REPOSITORY) else path.name


def _tables(points: Iterable[Point]) -> list[TableKey]:
    return sorted({point.table for point in points})


def _check_written(path: Path, points: Sequence[Point]) -> None:
    """Import what was written and ask it for every point."""
    table = import_table(path)
    for point in points:
        nearest = table.nearest(point.num_rows, *point.shape, table.sm_count)
        if nearest is None or nearest.kernel != point.kernel:
            raise AssertionError(f"{path}: {point.name}, {point.num_rows} rows: got {nearest}")


def import_table(path: Path) -> Any:
    """Return `CHOICES` of a written module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CHOICES


def _said_of(table: TableKey, points: Sequence[Point]) -> str:
    kernels = {name for point in points for name in point.kernel.split("+")}
    return (
        f"{file_name(table)}: {len(points)} points of {len({p.shape for p in points})} shapes, "
        f"{len(kernels)} kernels, {_percents([point.ratio - 1 for point in points])}"
    )


def _percents(regrets: Sequence[float]) -> str:
    ordered = sorted(regrets)
    p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
    mean = sum(ordered) / len(ordered)
    return f"mean {100 * mean:.2f} %, p95 {100 * p95:.1f} %, worst {100 * ordered[-1]:.1f} %"


def leave_one_out(problems: Sequence[Problem], tolerance: float) -> str:
    """Say what each layer would cost with tables made of the others: a look at shapes that nobody
    tuned for, where the time of what they choose is known."""
    regrets: dict[str, list[float]] = {}
    unknown = 0
    for left_out in dict.fromkeys(problem.case for problem in problems):
        tables = make_tables(points_of([p for p in problems if p.case != left_out], tolerance))
        for problem in problems:
            if problem.case == left_out:
                config = _asked(tables, problem)
                ratio = problem.ratios.get(config or "")
                if ratio is None:
                    unknown += 1
                else:
                    best = min(problem.ratios.values())
                    regrets.setdefault(problem.op, []).append(ratio / best - 1)
    lines = [f"  {op}: {len(own)} problems, {_percents(own)}" for op, own in regrets.items()]
    return "\n".join(
        [f"each layer by tables of the others ({unknown} choices without a time):", *lines]
    )


def make_tables(points: Sequence[Point]) -> dict[TableKey, Any]:
    """Return the tables as the dispatcher would have them."""
    from moe_ext._dispatch_points import Points, tuned

    tables = {}
    for table in _tables(points):
        shapes: dict[Shape, list[Point]] = {}
        for point in points:
            if point.table == table:
                shapes.setdefault(point.shape, []).append(point)
        tables[table] = Points(
            *table[1:],
            *(
                tuned((own[0].name, *shape), *((p.num_rows, p.kernel, p.measurement) for p in own))
                for shape, own in shapes.items()
            ),
            where="",
            min_weight_tiles=0,
        )
    return tables


def _asked(tables: dict[TableKey, Any], problem: Problem) -> str | None:
    """Return the configuration that tables choose for a problem."""
    kernels = []
    for shape, sums in zip(problem.shapes, problem.sums, strict=True):
        table = tables.get(("layer" if problem.op == LAYER else "gemm", problem.dtype, sums))
        nearest = table and table.nearest(problem.num_rows, *shape, table.sm_count)
        if not nearest:
            return None
        kernels.append(nearest.kernel)
    return joined(kernels)


def _unused(folder: Path) -> str:
    """Say which kernels no table names, those in `folder` in place of the package's."""
    from moe_ext._configs import all_configs

    paths = {
        path.name: path
        for where in (PACKAGE, folder)
        for path in where.glob("_dispatch_table_*.py")
    }
    named = {word for path in paths.values() for word in re.findall(r"\w+", path.read_text())}
    unused = [config.id for config in all_configs() if config.id not in named]
    return (
        "kernels that no table names (KEPT_FOR_TUNING in _dispatch_table.py, or not worth "
        f"compiling): {', '.join(unused) or 'none'}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
