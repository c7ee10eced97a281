"""The time of one problem on a GPU, for `explain`: weights out of L2, one CUDA graph, a median.

`bench/` measures more carefully (many routings, bursts before the power limit) and is what tables
are made of; this says what to expect of a problem here and now.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_ext._math import ceil_div
from moe_ext.scales import pad_rows

_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
# Copies of the weights rotate, so that what a call has read is gone from L2 before its next turn.
_L2_BYTES = 60e6
_COLD_FACTOR = 4
_GRAPH_US = 2000.0
_MAX_CALLS = 64
_MAX_COPIES = 64  # small weights stay in L2 in a model too
_WARM_UPS = 3
_REPLAYS = 20


def num_copies(weight_bytes: float) -> int:
    """Return how many copies of weights have to rotate; a call reads `weight_bytes` of its own."""
    wanted = math.ceil(_COLD_FACTOR * _L2_BYTES / max(weight_bytes, 1.0))
    return min(max(2, wanted), _MAX_COPIES)


def num_calls(copies: int, expected_us: float) -> int:
    """Return the calls of one graph, each copy of the weights as often as the next."""
    wanted = min(_MAX_CALLS, math.ceil(_GRAPH_US / expected_us))
    return copies * ceil_div(wanted, copies)


def median_us(
    op: str, device_index: int, call: Callable[[int], object], copies: int, expected_us: float
) -> float:
    """Return the median microseconds of `call(copy)`."""
    with torch.cuda.device(device_index):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{op}: must measure outside the capture of a CUDA graph, got a current stream of "
                f"cuda:{device_index} that is capturing"
            )
        calls = num_calls(copies, expected_us)
        call(0)  # loads code and remembers the choice of kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(calls):
                call(index % copies)
        events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(_WARM_UPS + _REPLAYS + 1)
        ]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
    timed = zip(events[_WARM_UPS:], events[_WARM_UPS + 1 :], strict=False)
    times = [1e3 * float(begin.elapsed_time(end)) / calls for begin, end in timed]
    return statistics.median(times)


def random_matrix(shape: Sequence[int], dtype: str, device: torch.device) -> Tensor:
    """Make normal values with rows as `grouped_gemm` takes them; zeros would run faster."""
    values = torch.randn(tuple(shape), dtype=torch.bfloat16, device=device)
    return pad_rows(values if dtype == "bf16" else values.to(_TORCH_DTYPES[dtype]))


def gemm_call(
    *,
    dtype: str,
    ends: Sequence[int],
    num_rows: int,
    n: int,
    k: int,
    copies: int,
    device: torch.device,
    accumulate: str,
    block_scales: bool,
    n_segments: int,
    scale_b_offset: Sequence[int],
    config: str | None,
) -> Callable[[int], Tensor]:
    """Return a function that runs `grouped_gemm_out` with one of the copies of the weights."""
    num_groups, (n_offset, k_offset) = len(ends), scale_b_offset
    a = random_matrix((num_rows, k), dtype, device)
    b = [random_matrix((num_groups, n, k), dtype, device) for _ in range(copies)]
    offs = torch.tensor(list(ends), dtype=torch.int32, device=device)
    out_dtype = torch.bfloat16 if n % 8 == 0 else torch.float32
    out = torch.zeros((num_rows, n), dtype=out_dtype, device=device)
    options: dict[str, object] = {"accumulate": accumulate, "config": config, "out": out}
    if block_scales:
        along_n = n_segments * ceil_div(n // n_segments + n_offset, 128)
        blocks = (num_groups, along_n, ceil_div(k + k_offset, 128))
        options |= {
            "scale_a": torch.ones((num_rows, ceil_div(k, 128)), device=device),
            "scale_b": torch.ones(blocks, device=device),
            "n_segments": n_segments,
            "scale_b_offset": tuple(scale_b_offset),
        }

    def call(copy: int) -> Tensor:
        torch.ops.moe_ext.grouped_gemm_out(a, b[copy], offs, **options)
        return out

    return call


def layer_call(
    *,
    dtype: str,
    rows_of_experts: Sequence[int],
    top_k: int,
    hidden_size: int,
    w13_rows: int,
    intermediate_size: int,
    copies: int,
    device: torch.device,
    options: dict[str, object],
) -> Callable[[int], Tensor]:
    """Return a function that runs `fused_moe_out` with one of the copies of the weights.

    Tensors among `options` are on the device already.
    """
    from moe_ext.fused_moe import fused_moe_out

    num_experts = len(rows_of_experts)
    experts = torch.arange(num_experts, dtype=torch.int32)
    # Slots dealt out one token after the other, so that a token rarely has an expert twice.
    ids = experts.repeat_interleave(torch.tensor(list(rows_of_experts)))
    ids = ids.view(top_k, -1).t().contiguous().to(device)
    num_tokens = len(ids)
    weights = torch.full((num_tokens, top_k), 1 / top_k, device=device)
    hidden = torch.randn((num_tokens, hidden_size), dtype=torch.bfloat16, device=device)
    w13, w2 = (
        [random_matrix((num_experts, *shape), dtype, device) for _ in range(copies)]
        for shape in ((w13_rows, hidden_size), (hidden_size, intermediate_size))
    )
    out = torch.zeros_like(hidden)

    def call(copy: int) -> Tensor:
        fused_moe_out(hidden, w13[copy], w2[copy], weights, ids, out=out, **options)  # type: ignore[arg-type]
        return out

    return call
