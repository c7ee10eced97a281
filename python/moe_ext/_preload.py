"""`moe_ext.preload`: every kernel's code onto a GPU before anything is in a hurry."""

from __future__ import annotations

import dataclasses
import functools
import time

import torch

from moe_ext._dispatch import select
from moe_ext._dispatch_table import TABLES
from moe_ext._fused_moe_kernels import prepare_finders
from moe_ext._fused_moe_launch import teach
from moe_ext._library import cuda_device
from moe_ext.fused_moe import fused_moe


@dataclasses.dataclass(frozen=True)
class PreloadReport:
    """What one call of `preload` did; `print` it, or read the fields.

    Attributes:
        device: "cuda:0", ...
        num_kernels: kernels of the library, all of which are loaded now.
        milliseconds: how long loading took; next to nothing where all were loaded before.
        device_bytes: by how much less memory of the GPU is free than before, whoever took it.
    """

    device: str
    num_kernels: int
    milliseconds: float
    device_bytes: int

    def __str__(self) -> str:
        """Say it in a line."""
        return (
            f"{self.num_kernels} kernels on {self.device} in {self.milliseconds:.1f} ms, "
            f"{self.device_bytes / 2**20:.1f} MiB of device memory"
        )


def preload(device: torch.device | str | int | None = None) -> PreloadReport:
    """Load every kernel of the library onto a GPU, so that no later call has to.

    CUDA loads the code of a kernel at its first launch, which then takes milliseconds longer. Every
    thread and stream of the process shares what is loaded: once for each GPU is enough. The list of
    kernels and the tables that choose among them are read too, and layers of up to three tokens
    run, so that what Python and PyTorch do once has been done.

    Args:
        device: a CUDA device or its index. None is the current one.

    Returns:
        A `PreloadReport`. Opening the library and starting CUDA, where this call is the first to
        do so, are not in its time, and CUDA's own memory not in its bytes.

    Raises:
        ValueError: `device` is not a CUDA device.
        RuntimeError: the kernels cannot run here, as the ops say it; or the current stream is
            capturing a CUDA graph.

    Notes:
        Launches miniature layers on the current stream and waits for no kernel; PyTorch's allocator
        keeps the 2 MiB they lay in, so no other stream may be capturing. To be called before a
        capture, which also keeps captures short.

    Example:
        >>> import moe_ext, torch
        >>> if torch.cuda.is_available():
        ...     report = moe_ext.preload()
    """
    index, kernels = cuda_device("preload", device)
    with torch.cuda.device(index):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "preload: must be called before the capture of a CUDA graph, got a current stream "
                f"of cuda:{index} that is capturing"
            )
        free_before, _ = torch.cuda.mem_get_info()  # makes the context where there is none
        start = time.perf_counter()
        num_kernels = kernels.preload_kernels(index)
        prepare_choices()
        teach(kernels)
        run_miniatures(torch.device("cuda", index))
        milliseconds = 1e3 * (time.perf_counter() - start)
        free_after, _ = torch.cuda.mem_get_info()
    return PreloadReport(f"cuda:{index}", num_kernels, milliseconds, free_before - free_after)


def prepare_choices() -> None:
    """Read what the first choice of each kind needs."""
    for kind in TABLES:
        select(*kind, 1, 1, 64, 64)
    prepare_finders()


@functools.cache
def run_miniatures(device: torch.device) -> None:
    """Run layers of a few tokens, none like another, in BF16 and in FP8 with scales of each layout.

    Once for each device. Python's interpreter specialises code that it has run a few times. What
    the layers take is made on the CPU and copied: PyTorch's own kernels, where these are the
    process's first, would have CUDA set 92 MiB aside for their local memory.
    """

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cpu").to(device, non_blocking=True)

    bf16, fp8, fp32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
    num_experts, hidden, intermediate = 2, 128, 128
    w13, w13_fp8 = (
        zeros(num_experts, 2 * intermediate, hidden, dtype=dtype) for dtype in (bf16, fp8)
    )
    w2, w2_fp8 = (zeros(num_experts, hidden, intermediate, dtype=dtype) for dtype in (bf16, fp8))
    for num_tokens in (1, 2, 3):
        tokens = zeros(num_tokens, hidden, dtype=bf16)
        weights, ids = (zeros(num_tokens, 1, dtype=dtype) for dtype in (fp32, torch.int32))
        fused_moe(tokens, w13, w2, weights, ids)
        for by_w13, by_w2 in (
            ((num_experts,), (num_experts,)),
            ((num_experts, 2 * intermediate), (num_experts, hidden)),
            ((num_experts, 2, 1), (num_experts, 1, 1)),
        ):
            w13_scale, w2_scale = (zeros(*shape, dtype=fp32) for shape in (by_w13, by_w2))
            fused_moe(tokens, w13_fp8, w2_fp8, weights, ids, w13_scale=w13_scale, w2_scale=w2_scale)
