"""A Mixture-of-Experts layer on `torch.ops.moe_ext.grouped_gemm`: what `make demo` runs.

Qwen3-30B-A3B's shapes (128 experts, top 8, hidden 2048, intermediate 768), scaled down without a
GPU. Prints how near the layer comes to a float32 reference, which kernel the dispatcher chose and,
on a GPU, microseconds of the two GEMMs beside the least the hardware allows.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import moe_ext
import torch
from moe_ext.reference import quantize_fp8_per_tensor
from torch import Tensor

try:
    import rich.console
    import rich.progress
    import rich.table
except ImportError:  # The output is plainer, the numbers are the same.
    rich = None  # type: ignore[assignment]

L2_BYTES = 60 * 2**20
# A sum that rounds the other way in BF16 may flip an FP8 rounding after it, a step of 6 %.
MAX_ERROR = 0.02


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a layer."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int


QWEN3_30B = Sizes(128, 8, 2048, 768)
SCALED_DOWN = Sizes(16, 4, 256, 96)


@dataclasses.dataclass(frozen=True)
class Weights:
    """Experts' weights: gate rows then up rows, and down; FP8 ones with a scale per expert."""

    w13: Tensor  # (num_experts, 2 * intermediate_size, hidden_size)
    w2: Tensor  # (num_experts, hidden_size, intermediate_size)
    w13_scale: Tensor | None = None  # (num_experts,)
    w2_scale: Tensor | None = None  # (num_experts,)


@dataclasses.dataclass(frozen=True)
class Routing:
    """Rows sorted by expert: where each comes from, its weight, where each expert's rows end."""

    token_of_row: Tensor  # (num_rows,)
    weight_of_row: Tensor  # (num_rows,)
    offs: Tensor  # (num_experts,), int32


def route(hidden: Tensor, router: Tensor, top_k: int) -> Routing:
    """Softmax over experts, top k, weights that sum to 1."""
    probabilities = (hidden.float() @ router.float().T).softmax(dim=-1)
    weights, experts = probabilities.topk(top_k, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    order = experts.flatten().argsort(stable=True)
    counts = experts.flatten().bincount(minlength=router.shape[0])
    offs = counts.cumsum(0).to(torch.int32)
    return Routing(order // top_k, weights.flatten()[order], offs)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, of rows that hold gate and then up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.float()) * up.float()


def combine(rows: Tensor, routing: Routing, num_tokens: int) -> Tensor:
    """Weighted sum of each token's rows."""
    out = torch.zeros(num_tokens, rows.shape[1], device=rows.device)
    return out.index_add_(0, routing.token_of_row, rows.float() * routing.weight_of_row[:, None])


def quantize(rows: Tensor, fp8: bool) -> tuple[Tensor, Tensor | None]:
    """Activations as the GEMM takes them: BF16, or FP8 with one scale."""
    return quantize_fp8_per_tensor(rows) if fp8 else (rows.bfloat16(), None)


def layer(hidden: Tensor, routing: Routing, weights: Weights) -> Tensor:
    """The whole layer on the library's op."""
    fp8 = weights.w13_scale is not None
    a, scale = quantize(hidden[routing.token_of_row], fp8)
    gate_up = torch.ops.moe_ext.grouped_gemm(
        a, weights.w13, routing.offs, scale_a=scale, scale_b=weights.w13_scale
    )
    a, scale = quantize(swiglu(gate_up), fp8)
    rows = torch.ops.moe_ext.grouped_gemm(
        a, weights.w2, routing.offs, scale_a=scale, scale_b=weights.w2_scale
    )
    return combine(rows, routing, hidden.shape[0])


def reference_layer(hidden: Tensor, routing: Routing, weights: Weights) -> Tensor:
    """The same layer in float32: an ordinary linear layer per expert, on dequantised weights."""
    fp8 = weights.w13_scale is not None
    a = dequantize(*quantize(hidden[routing.token_of_row], fp8))
    gate_up = linear_per_expert(a, dequantize(weights.w13, weights.w13_scale), routing.offs)
    a = dequantize(*quantize(swiglu(gate_up), fp8))
    rows = linear_per_expert(a, dequantize(weights.w2, weights.w2_scale), routing.offs)
    return combine(rows, routing, hidden.shape[0])


def dequantize(x: Tensor, scale: Tensor | None) -> Tensor:
    """`x` in float32, times its scale or the scales of its leading dimension."""
    return x.float() if scale is None else x.float() * scale.reshape(*scale.shape, 1, 1)


def linear_per_expert(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Each expert's rows through its own matrix, rounded to BF16 as the op's results are."""
    parts = x.tensor_split(offs.cpu()[:-1].long())
    products = map(torch.nn.functional.linear, parts, weight)
    return torch.cat(list(products)).bfloat16()


def make_weights(sizes: Sizes, dtype: str, device: str) -> Weights:
    """Random experts whose layers keep the size of their input."""
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    w13 = torch.randn(sizes.num_experts, 2 * inner, hidden, device=device) / hidden**0.5
    w2 = torch.randn(sizes.num_experts, hidden, inner, device=device) / inner**0.5
    if dtype == "bf16":
        return Weights(w13.bfloat16(), w2.bfloat16())
    (w13, w13_scale), (w2, w2_scale) = (quantize_fp8_per_tensor(w, 1) for w in (w13, w2))
    return Weights(w13, w2, w13_scale, w2_scale)


def largest_error(out: Tensor, expected: Tensor) -> float:
    """Largest absolute difference over the largest absolute reference value."""
    return float((out - expected).abs().max() / expected.abs().max())


def gemm_pair_us(hidden: Tensor, routing: Routing, weights: Weights, samples: int = 30) -> float:
    """Median time of the two GEMMs in one CUDA graph, with weights that are not in the L2 cache."""
    fp8 = weights.w13_scale is not None
    a, scale = quantize(hidden[routing.token_of_row], fp8)
    middle, middle_scale = quantize(
        torch.randn(a.shape[0], weights.w2.shape[2], device="cuda"), fp8
    )
    weight_bytes = sum(w.numel() * w.element_size() for w in (weights.w13, weights.w2))
    active = int((routing.offs.diff(prepend=routing.offs.new_zeros(1)) > 0).sum())
    copies = 1 + int(3 * L2_BYTES / (weight_bytes * active / weights.w13.shape[0]))
    pairs = [(weights.w13.clone(), weights.w2.clone()) for _ in range(copies)]

    def run() -> None:
        for w13, w2 in pairs:
            torch.ops.moe_ext.grouped_gemm(
                a, w13, routing.offs, scale_a=scale, scale_b=weights.w13_scale
            )
            torch.ops.moe_ext.grouped_gemm(
                middle,
                w2,
                routing.offs,
                scale_a=middle_scale,
                scale_b=weights.w2_scale,
                offs_ready=True,
            )

    return graph_replay_us(run, samples) / copies


def graph_replay_us(run: Callable[[], None], samples: int) -> float:
    """Median time of a replay of what `run` launches."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(samples + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(statistics.median(times[3:]))


def explain_pair(
    sizes: Sizes, dtype: str, routing: Routing, device: str
) -> tuple[moe_ext.Explanation, moe_ext.Explanation]:
    """What the dispatcher chooses for the gate/up and the down GEMM."""
    offs = routing.offs.tolist()
    sms = torch.cuda.get_device_properties(0).multi_processor_count if device == "cuda" else 132
    gate_up, down = (
        moe_ext.explain(
            dtype=dtype,
            num_rows=routing.token_of_row.numel(),
            num_groups=sizes.num_experts,
            n=n,
            k=k,
            offs=offs,
            sm_count=sms,
        )
        for n, k in (
            (2 * sizes.intermediate_size, sizes.hidden_size),
            (sizes.hidden_size, sizes.intermediate_size),
        )
    )
    return gate_up, down


def demonstrate(sizes: Sizes, dtype: str, num_tokens: int, device: str) -> list[str]:
    """Run one layer and return the cells of its table row."""
    weights = make_weights(sizes, dtype, device)
    router = torch.randn(sizes.num_experts, sizes.hidden_size, device=device)
    hidden = torch.randn(num_tokens, sizes.hidden_size, device=device)
    routing = route(hidden, router / sizes.hidden_size**0.5, sizes.top_k)
    out = layer(hidden, routing, weights)
    error = largest_error(out, reference_layer(hidden, routing, weights))
    gate_up, down = explain_pair(sizes, dtype, routing, device)
    kernels = (
        gate_up.config if gate_up.config == down.config else f"{gate_up.config}, {down.config}"
    )
    cells = [dtype, str(num_tokens), str(gate_up.active_groups), f"{error:.1e}", kernels]
    if device == "cuda":
        time_us = gemm_pair_us(hidden, routing, weights)
        floor_us = gate_up.floor_us + down.floor_us
        cells += [f"{time_us:.1f}", f"{floor_us:.1f}", f"{time_us / floor_us:.2f}"]
    if not error < MAX_ERROR:
        raise SystemExit(
            f"{dtype}, {num_tokens} tokens: max error must be below {MAX_ERROR}, got {error}"
        )
    return cells


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Give a function that says what is done next and moves the bar."""
    if rich is None:
        begin = time.perf_counter()
        yield lambda text: print(f"[{time.perf_counter() - begin:5.1f} s] {text}", flush=True)
        return
    with rich.progress.Progress(transient=True) as bar:
        task = bar.add_task("", total=total)

        def advance(text: str) -> None:
            bar.update(task, advance=1, description=text)

        yield advance


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table."""
    if rich is not None:
        table = rich.table.Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console = rich.console.Console()
        if not console.is_terminal:  # a log has no width of its own, and must not cut columns
            console.width = 140
        console.print(table)
        return
    print(title)
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


def main() -> None:
    """Run the layer in BF16 and FP8 for several numbers of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", help="numbers of tokens to run")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: a GPU where there is one"
    )
    arguments = parser.parse_args()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    sizes = QWEN3_30B if device == "cuda" else SCALED_DOWN
    counts = arguments.tokens or ([1, 16, 64, 256, 1024] if device == "cuda" else [1, 16, 64])
    torch.manual_seed(0)

    rows = []
    with torch.inference_mode(), progress(2 * len(counts)) as advance:
        for dtype in ("bf16", "fp8"):
            for num_tokens in counts:
                advance(f"{dtype}, {num_tokens} tokens")
                rows.append(demonstrate(sizes, dtype, num_tokens, device))

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU reference"
    title = (
        f"Mixture-of-Experts layer on {name}: {sizes.num_experts} experts, top {sizes.top_k}, "
        f"hidden {sizes.hidden_size}, intermediate {sizes.intermediate_size}"
    )
    columns = ["dtype", "tokens", "active experts", "max error", "kernel (gate/up, down)"]
    if device == "cuda":
        columns += ["GEMMs us", "floor us", "ratio"]
    show(title, columns, rows)
    if device == "cpu":
        print("On a GPU of compute capability 9.0 the kernels above would run; times need one.")


if __name__ == "__main__":
    main()
