"""Write the dispatcher's tables from rows of `bench.tune`; needs no GPU.

`python -m bench.tune_tables bench/results/tune.jsonl --write` rewrites those modules
`_dispatch_table_*.py` that the rows say something about. It refuses where a kernel was wrong, a
kernel's two timings or the SM clocks of the best ones differ by more than 3 %, or rows come from
GPUs with different numbers of SMs. Without --write it says what it would write;
`--leave-one-out` also what tables cost on layers that they were not made from, a tenth at a time.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.cases import STAGES, case_names, extra_case_names
from bench.contest import disagreement
from bench.files import refused_in_a_line
from bench.measure import REPOSITORY
from bench.ops import LAYER
from bench.rows import Row, load_rows
from bench.tune_cells import all_visits, cell_key
from bench.tune_problems import (
    Problem,
    TableKey,
    Visit,
    chosen_by,
    make_table,
    problems_of,
    regret_of,
)
from bench.tune_source import file_name, sources_of

if TYPE_CHECKING:
    from moe_ext._dispatch_measured import Measured

PACKAGE = REPOSITORY / "python" / "moe_ext"
PARTS = 10  # of the layers, one of which is left out at a time


class Refusal(Exception):
    """Why no table is made of the rows."""


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of `bench.tune_tables`."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune_tables", description=__doc__)
    add = parser.add_argument
    add("files", type=Path, nargs="+", help="of bench.tune; of a cell the last visit counts")
    add("--write", action="store_true")
    add("--into", type=Path, default=PACKAGE, help="the folder of the modules: the package's")
    add("--unchecked", action="store_true", help="take cells without clocks and second timings too")
    add("--without-unsteady", action="store_true", help="take the visit before one that disagrees")
    add("--leave-one-out", action="store_true")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Write tables, or say why not."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    if args.write and not args.into.is_dir():
        got = "a file" if args.into.exists() else "none"
        parser.error(f"--into must be a folder that is there, got {got}: {args.into}")
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
    try:
        by_table = tables_of(problems_of(visits))
    except Refusal as refusal:
        print(refusal)
        return 1
    made = {key: make_table(problems) for key, problems in by_table.items()}
    for key, problems in by_table.items():
        print(said_of(key, made[key], problems))
    if args.leave_one_out:
        print(leave_one_out(by_table))
    if args.write:
        for key, problems in by_table.items():
            for name, source in sources_of(key, made[key], problems):
                path = args.into / name
                path.write_text(source)
                print(f"wrote {path}")
            check_written(args.into / file_name(key), made[key])
        print(unused(made, by_table))
    return 0


def tables_of(problems: Sequence[Problem]) -> dict[TableKey, list[Problem]]:
    """Return problems by the table they belong to; raise a Refusal where there are none."""
    tables: dict[TableKey, list[Problem]] = {}
    for problem in problems:
        tables.setdefault(problem.table, []).append(problem)
    if not tables:
        raise Refusal("no tables: rows must be of pairs or layers, with two kernels timed at least")
    return dict(sorted(tables.items()))


def load_visits(
    paths: Iterable[Path], *, unchecked: bool = False, without_unsteady: bool = False
) -> list[Visit]:
    """Return the last visit of every cell, or the last that agrees with itself.

    Raises:
        Refusal: there is a visit that cannot be relied on, and it is not to be left out.
    """
    rows: list[Row] = []
    files: dict[tuple[object, ...], str] = {}
    for path in paths:
        own = load_rows(path)
        rows += own
        files |= {(cell_key(row), row.visit): _relative(path) for row in own}
    visits, problems = [], []
    for key, of_cell in all_visits(rows).items():
        name = " ".join(str(part) for part in key if part)
        for visit in of_cell:
            wrong = [row.config for row in visit if row.skipped_reason.startswith("wrong")]
            if wrong:
                problems.append(f"{name}: wrong results of {', '.join(wrong)}")
            timed = [row for row in visit if row.median_us is not None]
            why = disagreement(visit)
            if timed and why and not (unchecked and all(row.again_us is None for row in timed)):
                if without_unsteady:
                    continue  # with the one before
                problems.append(f"{name}: {why}")
            elif timed:
                visits.append(Visit(timed, files[key, timed[0].visit]))
            break
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


def check_written(path: Path, table: Measured) -> None:
    """Import what was written and compare."""
    written = import_table(path)
    for name in ("dtype", "accumulate", "choices", "costs", "common"):
        if getattr(written, name) != getattr(table, name):
            raise AssertionError(f"{path}: {name} must be {getattr(table, name)}")
    if repr(written.problems) != repr(table.problems):  # as NaN is not itself
        raise AssertionError(f"{path}: problems must be {table.problems}")


def import_table(path: Path) -> Any:
    """Return `CHOICES` of a written module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CHOICES


def said_of(key: TableKey, table: Measured, problems: Sequence[Problem]) -> str:
    """Say what a table holds and what it costs on the problems it was made from."""
    layers = len({problem.cell.case.name for problem in problems})
    return (
        f"{file_name(key)}: {len(problems)} problems of {layers} layers, {len(table.choices)} "
        f"choices; {costs_of([(table, problem) for problem in problems])}"
    )


def costs_of(asked: Sequence[tuple[Measured, Problem]]) -> str:
    """Say what tables cost on problems, and how often both GEMMs of a pair differ."""
    chosen = [(chosen_by(table, problem), problem) for table, problem in asked]
    every = [regret_of(config, problem.times) for config, problem in chosen]
    regrets = [regret for regret in every if regret is not None]
    differ = sum("+" in config for config, problem in chosen if problem.cell.op != LAYER)
    return (
        f"{_percents(regrets)} ({differ} pairs of two kernels, {len(every) - len(regrets)} choices "
        "without a time)"
    )


def _percents(regrets: Sequence[float]) -> str:
    if not regrets:
        return "nothing known"
    ordered = sorted(regrets)
    p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
    mean = sum(ordered) / len(ordered)
    return f"mean {100 * mean:.2f} %, p95 {100 * p95:.1f} %, worst {100 * ordered[-1]:.1f} %"


def leave_one_out(by_table: Mapping[TableKey, Sequence[Problem]]) -> str:
    """Say what each tenth of the layers would cost with tables made of the others: a look at shapes
    that nobody tuned for, where the time of what they choose is known."""
    lines, every = [], []
    for key, problems in by_table.items():
        names = list(dict.fromkeys(problem.cell.case.name for problem in problems))
        own = []
        for part in range(min(PARTS, len(names))):
            left_out = set(names[part::PARTS])
            rest = [one for one in problems if one.cell.case.name not in left_out]
            if rest:
                table = make_table(rest)
                own += [(table, one) for one in problems if one.cell.case.name in left_out]
        every += own
        lines.append(f"  {file_name(key)}: {len(own)} problems, {costs_of(own)}")
    lines.append(f"  all: {len(every)} problems, {costs_of(every)}")
    return "\n".join(["layers by tables of the others:", *lines])


def unused(
    made: Mapping[TableKey, Measured], by_table: Mapping[TableKey, Sequence[Problem]]
) -> str:
    """Say which kernels of GEMMs are chosen for none of the problems."""
    named, chosen = set[str](), set[str]()
    for key, problems in by_table.items():
        if key[0] == "gemm":
            named |= set(made[key].kernels())
            for problem in problems:
                chosen |= set(chosen_by(made[key], problem).split("+"))
    return (
        "kernels that no pair is given (KEPT_FOR_TUNING in _dispatch_table.py, or not worth "
        f"compiling): {', '.join(sorted(named - chosen)) or 'none'}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
