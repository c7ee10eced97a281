"""Measure the accuracy of the GEMM: `python -m bench.accuracy --out accuracy.jsonl`.

`--read accuracy.jsonl --markdown docs/accuracy.md` makes the page from rows: no GPU needed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import moe_ext
import torch
from moe_ext.reference import group_rows, grouped_gemm_reference
from torch import Tensor

from bench.accuracy_data import (
    DATA,
    KINDS,
    Operands,
    Sizes,
    accumulates,
    base_kind,
    make_operands,
    quantise,
)
from bench.accuracy_page import page
from bench.accuracy_rows import AccuracyRow, load_accuracy_rows
from bench.files import refused_in_a_line
from bench.measure import Environment
from bench.providers.base import Variant
from bench.providers.moe_ext import dispatched

KS = (2048, 7168, 16384)
# Four experts, one of them with a single row and none with a whole number of tiles.
SIZES = Sizes(counts=(61, 1, 190, 260), n=1024)
DRY_RUN_KS, DRY_RUN_SIZES = (256,), Sizes(counts=(3, 0, 9), n=64)


@dataclass(frozen=True)
class Errors:
    """How a result differs from what it should be."""

    snr_db: float
    difference: float
    max_err: float


def compare(out: Tensor, reference: Tensor) -> Errors:
    """Compare two results in float64; the signal-to-noise ratio of equal ones is infinite.

    `difference` is 1 - 2<x,y> / (|x|^2 + |y|^2), as |x - y|^2 / (|x|^2 + |y|^2): the same without
    cancellation.
    """
    x, y = out.double(), reference.double()
    noise, signal = float((x - y).square().sum()), float(y.square().sum())
    return Errors(
        snr_db=10 * math.log10(signal / noise) if noise else math.inf,
        difference=noise / (float(x.square().sum()) + signal),
        max_err=float((x - y).abs().max() / y.abs().max()),
    )


def master_product(operands: Operands) -> Tensor:
    """Return the product of BF16 operands in float64: (num_rows, n)."""
    ranges = group_rows(operands.offs, operands.a.shape[0])
    return torch.cat(
        [
            operands.a[begin:end].double() @ operands.b[group].double().T
            for group, (begin, end) in enumerate(ranges)
        ]
    )


def multiply(operands: Operands, accumulate: str, out_dtype: torch.dtype) -> Tensor:
    """Run the GEMM under measurement."""
    return moe_ext.grouped_gemm(
        operands.a,
        operands.b,
        operands.offs,
        scale_a=operands.scale_a,
        scale_b=operands.scale_b,
        accumulate="fast" if accumulate == "fast" else "promoted",
        out_dtype=out_dtype,
    )


def measure(
    data: str,
    operands: Operands,
    master: Tensor,
    variant: Variant,
    kind: str,
    environment: Environment,
) -> AccuracyRow:
    """Return the row of one variant; `kind` is the variant's layout of scales in full."""
    same_arithmetic = grouped_gemm_reference(
        operands.a,
        operands.b,
        operands.offs,
        operands.scale_a,
        operands.scale_b,
        out_dtype=torch.float32,
    )
    of_result = compare(multiply(operands, variant.accumulate, torch.bfloat16), master)
    of_kernel = compare(multiply(operands, variant.accumulate, torch.float32), same_arithmetic)
    num_rows, k = operands.a.shape
    return AccuracyRow(
        data=data,
        dtype=variant.dtype,
        scale=kind,
        accumulate=variant.accumulate,
        num_groups=operands.b.shape[0],
        num_rows=num_rows,
        n=operands.b.shape[1],
        k=k,
        config=_config(variant, operands),
        snr_db=round(of_result.snr_db, 3),
        difference=float(f"{of_kernel.difference:.3e}"),
        max_err=float(f"{of_kernel.max_err:.3e}"),
        device=environment.device_name,
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        commit=environment.commit,
    )


def _config(variant: Variant, operands: Operands) -> str:
    if not operands.a.is_cuda:
        return "reference"
    sm_count = torch.cuda.get_device_properties(operands.a.device).multi_processor_count
    return dispatched(variant, "", operands.a.shape[0], operands.b.shape, sm_count)


def measure_all(sizes: Sizes, ks: Sequence[int], environment: Environment) -> Iterator[AccuracyRow]:
    """Measure BF16 and every layout of FP8 scales, in every way to sum that it has."""
    for data in DATA:
        for k in ks:
            operands = make_operands(data, sizes, k, environment.device)
            master = master_product(operands)
            bf16 = Variant("bf16", "none", "fp32")
            yield measure(data, operands, master, bf16, "none", environment)
            for kind in KINDS:
                quantised = quantise(operands, kind)
                for accumulate in accumulates(kind):
                    variant = Variant("fp8", base_kind(kind), accumulate)
                    yield measure(data, quantised, master, variant, kind, environment)


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of `bench.accuracy`."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("accuracy.jsonl"), help="JSONL file, appended to")
    add("--read", type=Path, nargs="+", help="read these files and measure nothing")
    add("--markdown", type=Path, help="write the page here")
    add("--commit", default=None, help="revision for the rows; read from git by default")
    add("--dry-run", action="store_true", help="miniatures on the CPU, by the reference")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or read, and write the page where it is asked for."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    if args.read is not None:
        with refused_in_a_line(parser):
            rows = [row for path in args.read for row in load_accuracy_rows(path)]
    else:
        rows = _measure_into(args.out, args.commit, dry_run=args.dry_run)
    if args.markdown is not None:
        args.markdown.write_text(page(rows))
    return 0


def _measure_into(path: Path, commit: str | None, *, dry_run: bool) -> list[AccuracyRow]:
    if not dry_run and not torch.cuda.is_available():
        raise SystemExit("bench: a CUDA device must be there, got none; --dry-run runs on the CPU")
    # The references need fp32 products, whatever the caller's default is.
    torch.set_float32_matmul_precision("highest")
    environment = Environment.detect("cpu" if dry_run else "cuda", commit)
    sizes, ks = (DRY_RUN_SIZES, DRY_RUN_KS) if dry_run else (SIZES, KS)
    rows = []
    with path.open("a") as file:
        for row in measure_all(sizes, ks, environment):
            rows.append(row)
            file.write(json.dumps(asdict(row)) + "\n")
            print(
                f"{row.data} K={row.k} {row.dtype} {row.scale} {row.accumulate}: {row.snr_db:.2f} "
                f"dB, difference {row.difference:.1e}, max_err {row.max_err:.1e}"
            )
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
