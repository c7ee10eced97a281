"""The source of the dispatcher's tables: what `bench.tune_tables` writes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from bench.rows import Row
from bench.tune_problems import Problem, TableKey, lines_of

if TYPE_CHECKING:
    from moe_ext._dispatch_measured import Measured

COLUMNS = 100
_TITLES = {
    ("bf16", "fp32"): "BF16",
    ("fp8", "promoted"): "FP8, scales constant along K",
    ("fp8", "fast"): "FP8 whose sums stay in the tensor core",
    ("fp8", "block"): "FP8 with scales per block",
}
_BLOCK = "block"


def file_name(table: TableKey) -> str:
    """Return the name of a table's module."""
    op, dtype, sums = table
    kind = dtype if dtype == "bf16" else sums
    return f"_dispatch_table_{'layer_' if op == 'layer' else ''}{kind}.py"


def sources_of(
    key: TableKey, table: Measured, problems: Sequence[Problem]
) -> Iterable[tuple[str, str]]:
    """Yield the names of a table's modules and what they hold.

    Blocks off multiples of 128 have the table of all blocks, of which kernels of plain order are
    not allowed.
    """
    name = file_name(key)
    yield name, source_of(key, table, problems)
    if key[2] == _BLOCK:
        module = name.removesuffix(".py")
        text = textwrap.dedent(
            f'''\
            """The measured choices for blocks that plain order does not take: those of all."""

            from __future__ import annotations

            from moe_ext import {module}

            CHOICES = {module}.CHOICES
            '''
        )
        yield f"{module}_swapped.py", text


def source_of(key: TableKey, table: Measured, problems: Sequence[Problem]) -> str:
    """Return a table's module."""
    op, dtype, sums = key
    rows = [row for problem in problems for row in problem.visit.rows]
    what = f"layers in {_TITLES[dtype, sums]}" if op == "layer" else _TITLES[dtype, sums]
    choices = "".join(f'        "{choice}",\n' for choice in table.choices)
    costs = "".join(
        f'        "{name}": ({", ".join(map(str, own))}),\n' for name, own in table.costs.items()
    )
    measured = "\n".join(
        textwrap.fill(line, COLUMNS, subsequent_indent="    ")
        for line in lines_of(problems, table.choices)
    )
    return f'''\
"""The measured choices for {what}.

{_described(problems, rows)}
"""

from __future__ import annotations

from moe_ext._dispatch_measured import Measured

CHOICES = Measured(
    "{dtype}",
    "{sums}",
    choices=(
{choices}    ),
    costs={{
        # launch, wave, 256 bytes of K, products, weights, on-chip reads, activations
{costs}    }},
    common=({", ".join(map(str, table.common))}),
    where={_where(problems, rows)},
    sm_count={rows[0].sm_count or 132},
    # groups, hidden, intermediate, rows, us of the best; thousandths over it of each choice
    problems="""
{measured}
""",
)
'''


def _where(problems: Sequence[Problem], rows: Sequence[Row]) -> str:
    files = _sorted(problem.visit.file for problem in problems)
    devices, routings = _sorted(row.device for row in rows), _sorted(row.routing for row in rows)
    text = f"{', '.join(devices)}, {', '.join(routings)}, {', '.join(files)}"
    if len(text) <= 80:
        return f'"{text}"'
    parts = textwrap.wrap(text, 80, drop_whitespace=False, break_long_words=False)
    return "(\n        " + "\n        ".join(f'"{part}"' for part in parts) + "\n    )"


def _sorted(words: Iterable[str]) -> list[str]:
    return sorted(set(words))


def _described(problems: Sequence[Problem], rows: Sequence[Row]) -> str:
    """Return the part of the docstring that says how the table came to be."""
    again = [
        abs(row.again_us / row.median_us - 1)
        for row in rows
        if row.again_us is not None and row.median_us is not None
    ]
    clocks = [row.sm_mhz for row in rows if row.sm_mhz is not None]
    checks = []
    if again:
        checks.append(f"second timings within {100 * max(again):.1f} %")
    if clocks:
        checks.append(f"SM clocks {min(clocks):.0f} to {max(clocks):.0f} MHz")
    text = (
        f"Written by bench/tune_tables.py: change the rows, not this. {len(problems)} problems; "
        f"commit {', '.join(_sorted(row.commit for row in rows))}, torch "
        f"{', '.join(_sorted(row.torch for row in rows))}, power "
        f"{', '.join(_sorted(row.power for row in rows))}"
        f"{''.join(f'; {check}' for check in checks)}."
    )
    return "\n".join(textwrap.wrap(text, COLUMNS))
