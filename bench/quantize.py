"""Time `quantize_fp8` against a copy of as many bytes: `python -m bench.quantize --out x.jsonl`.

CUDA-graph replay with cold tensors, as `bench.timing` defines both: input and outputs rotate over
copies of at least 240 MB of input. Bytes are x once, q once and the scales once, so a scale of a
whole tensor, which takes two passes, cannot reach the copy's rate; with a given scale it can.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from moe_ext import quantize_fp8_out
from moe_ext.reference import quantize_fp8_reference
from torch import Tensor

from bench.measure import Environment
from bench.timing import TimingPolicy, time_cuda, time_wall

Shape = tuple[int, ...]
ACTIVATIONS: tuple[Shape, ...] = ((8192, 7168), (64, 7168), (8192, 2048), (1024, 4096))
WEIGHTS: tuple[Shape, ...] = ((128, 1536, 2048),)
VARIANTS = ("tensor", "tensor-static", "row", "1x128", "128x128")
COPY_TBPS = 4.3  # only to choose how many calls make a graph


@dataclass(frozen=True)
class QuantizeRow:
    """One measurement; times in microseconds, rates in GB/s of bytes read and written."""

    op: str
    granularity: str
    shape: Shape
    dtype: str
    median_us: float
    p10_us: float
    p90_us: float
    gbps: float
    copy_us: float
    copy_gbps: float
    share: float
    num_samples: int
    device: str
    torch: str
    cuda: str
    commit: str


@dataclass(frozen=True)
class Buffers:
    """One copy of a case: its input and what is written."""

    x: Tensor
    q: Tensor
    scale_out: Tensor
    given: Tensor | None


def make_buffers(variant: str, shape: Shape, device: torch.device) -> Buffers:
    """Allocate a copy; values differ from copy to copy."""
    x = torch.randn(shape, dtype=torch.bfloat16, device=device)
    granularity = variant.partition("-")[0]
    given = None
    if variant == "tensor-static":
        given = torch.full(shape[:-2], 0.01, device=device)
    _, scale = quantize_fp8_reference(x[..., :0, :], granularity)
    sizes = list(scale.shape)
    if granularity != "tensor":
        rows = shape[-2]
        sizes[len(shape) - 2] = math.ceil(rows / 128) if granularity == "128x128" else rows
    return Buffers(
        x, torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(sizes).float(), given
    )


def run_call(variant: str, buffers: Buffers) -> list[Tensor]:
    """Quantise one copy."""
    quantize_fp8_out(
        buffers.x,
        variant.partition("-")[0],
        q=buffers.q,
        scale_out=buffers.scale_out,
        scale=buffers.given,
    )
    return [buffers.q, buffers.scale_out]


def check(variant: str, buffers: Buffers) -> None:
    """Hold one call against the reference; raises where a bit differs."""
    q, scale = run_call(variant, buffers)
    granularity = variant.partition("-")[0]
    expected = quantize_fp8_reference(buffers.x, granularity, scale=buffers.given)
    if not torch.equal(q.view(torch.uint8), expected[0].view(torch.uint8)):
        raise RuntimeError(f"bench: {variant} of {tuple(q.shape)} must equal the reference")
    if not torch.equal(scale, expected[1]):
        raise RuntimeError(f"bench: scales of {variant} must equal the reference's")


def measure(
    variant: str, shape: Shape, policy: TimingPolicy, environment: Environment
) -> QuantizeRow:
    """Time a case and a copy of as many bytes."""
    device = environment.device
    first = make_buffers(variant, shape, device)
    check(variant, first)
    copies = policy.num_copies(first.x.nbytes)
    buffers = [first, *(make_buffers(variant, shape, device) for _ in range(copies - 1))]
    moved = first.x.nbytes + first.q.nbytes + first.scale_out.nbytes
    calls = policy.num_calls(moved / COPY_TBPS / 1e6 + 2, copies)
    # Whole vectors: PyTorch copies other numbers of bytes at half the rate.
    half = moved // 2 // 512 * 512
    sources = [torch.ones(half, dtype=torch.uint8, device=device) for _ in range(copies)]
    targets = [torch.empty_like(source) for source in sources]

    def quantize(index: int) -> Sequence[Tensor]:
        return run_call(variant, buffers[index % copies])

    def copy(index: int) -> Sequence[Tensor]:
        return [targets[index % copies].copy_(sources[index % copies])]

    on_cuda = functools.partial(time_cuda, compute_heavy=False)
    timed = on_cuda if device.type == "cuda" else time_wall
    timing, copying = (timed(call, calls, policy) for call in _warmed(quantize, copy))
    return QuantizeRow(
        op="quantize_fp8",
        granularity=variant,
        shape=shape,
        dtype="bf16",
        median_us=round(timing.median_us, 3),
        p10_us=round(timing.p10_us, 3),
        p90_us=round(timing.p90_us, 3),
        gbps=round(moved / timing.median_us / 1e3, 1),
        copy_us=round(copying.median_us, 3),
        copy_gbps=round(2 * half / copying.median_us / 1e3, 1),
        share=round(moved * copying.median_us / (2 * half * timing.median_us), 4),
        num_samples=timing.num_samples,
        device=environment.device_name,
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        commit=environment.commit,
    )


def _warmed(
    *calls: Callable[[int], Sequence[Tensor]],
) -> Iterator[Callable[[int], Sequence[Tensor]]]:
    for call in calls:
        call(0)  # nothing may be loaded for the first time under capture
        yield call


def print_table(rows: Sequence[QuantizeRow]) -> None:
    """Print one line for each row."""
    print(f"{'granularity':14} {'shape':>18} {'us':>9} {'GB/s':>8} {'copy GB/s':>10} {'share':>7}")
    for row in rows:
        shape = " x ".join(map(str, row.shape))
        print(
            f"{row.granularity:14} {shape:>18} {row.median_us:9.2f} {row.gbps:8.0f} "
            f"{row.copy_gbps:10.0f} {row.share:7.1%}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSONL file to append rows to")
    parser.add_argument("--samples", type=int, default=TimingPolicy.samples)
    parser.add_argument("--commit", default=None, help="revision for the rows; else git's")
    parser.add_argument("--dry-run", action="store_true", help="miniatures on the CPU")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        raise SystemExit("bench: a CUDA device must be there, got none; --dry-run runs on the CPU")
    environment = Environment.detect("cpu" if options.dry_run else "cuda", options.commit)
    policy = TimingPolicy(samples=options.samples)
    activations, weights = ACTIVATIONS, WEIGHTS
    if options.dry_run:
        policy = TimingPolicy(samples=2, l2_bytes=1.0, max_calls=2)
        activations, weights = ((9, 200),), ((2, 130, 136),)
    cases = [(variant, shape) for variant in VARIANTS[:-1] for shape in activations]
    cases += [("128x128", shape) for shape in (*activations, *weights)]
    print(policy.describe())
    rows = []
    for variant, shape in cases:
        rows.append(measure(variant, shape, policy, environment))
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(asdict(rows[-1])) + "\n")
    print_table(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
