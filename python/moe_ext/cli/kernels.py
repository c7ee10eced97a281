"""`moe-ext kernels`: what is compiled."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from moe_ext._configs import GroupedGemmConfig, all_configs
from moe_ext.cli._arguments import check_one_of
from moe_ext.cli._console import console, table

_LEFT = frozenset(("id", "order", "dtype", "accumulate", "output"))


def kernels(
    dtype: Annotated[str | None, typer.Option(help="Of the operands alone: bf16 or fp8.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list.")] = False,
) -> None:
    """List the compiled kernels, by the ids that `config` takes."""
    configs = all_configs()
    dtypes = sorted({config.dtype for config in configs})
    if dtype is not None:
        check_one_of("--dtype", dtype, dtypes)
    chosen = [config for config in configs if dtype in (None, config.dtype)]
    if as_json:
        print(json.dumps([dataclasses.asdict(config) for config in chosen], indent=2))
        return
    names = [field.name for field in dataclasses.fields(GroupedGemmConfig)]
    rows = table(
        f"{len(chosen)} kernels",
        {name: "left" if name in _LEFT else "right" for name in names},
    )
    for config in chosen:
        rows.add_row(*(str(getattr(config, name)) for name in names))
    console().print(rows)
