"""Ahead-of-time compiled Mixture-of-Experts kernels for PyTorch on NVIDIA Hopper."""

from __future__ import annotations

import torch

from moe_ext import _library, compat, nn, precision, reference
from moe_ext._configs import GroupedGemmConfig, all_configs
from moe_ext._explain import Explanation, explain
from moe_ext._explain_layer import LayerExplanation, StageExplanation, explain_fused_moe
from moe_ext._fused_moe_workspace import fused_moe_workspace_size
from moe_ext._preload import PreloadReport, preload
from moe_ext._supports import Support, supports
from moe_ext._version import __version__
from moe_ext.combine_tokens import combine_tokens
from moe_ext.fused_moe import fused_moe, fused_moe_out
from moe_ext.fused_moe_masked import fused_moe_masked, fused_moe_masked_out
from moe_ext.grouped_gemm import grouped_gemm, grouped_gemm_out
from moe_ext.grouped_gemm_masked import grouped_gemm_masked, grouped_gemm_masked_out
from moe_ext.precision import ExpertBank, PrecisionPlan, calibrate, plan_precision
from moe_ext.quantize import quantize_fp8, quantize_fp8_out
from moe_ext.routing import topk_routing, topk_routing_out
from moe_ext.scales import pad_rows, scales_to_float32
from moe_ext.sort_tokens import sort_tokens

__all__ = [
    "ExpertBank",
    "Explanation",
    "GroupedGemmConfig",
    "LayerExplanation",
    "PrecisionPlan",
    "PreloadReport",
    "StageExplanation",
    "Support",
    "__version__",
    "build_info",
    "calibrate",
    "combine_tokens",
    "compat",
    "explain",
    "explain_fused_moe",
    "fused_moe",
    "fused_moe_masked",
    "fused_moe_masked_out",
    "fused_moe_out",
    "fused_moe_workspace_size",
    "grouped_gemm",
    "grouped_gemm_masked",
    "grouped_gemm_masked_out",
    "grouped_gemm_out",
    "kernels",
    "nn",
    "pad_rows",
    "plan_precision",
    "precision",
    "preload",
    "quantize_fp8",
    "quantize_fp8_out",
    "reference",
    "scales_to_float32",
    "sort_tokens",
    "supports",
    "topk_routing",
    "topk_routing_out",
]


def kernels() -> tuple[GroupedGemmConfig, ...]:
    """List the compiled kernels; their ids are what `config` takes."""
    return all_configs()


def build_info() -> dict[str, str | int | bool | None]:
    """Say what this installation is and whether its CUDA kernels can run here.

    Returns:
        `version`, `torch`, `torch_cuda` (None for a CPU build of torch), `kernels` (how many are
        listed), `cuda_library` (whether its file is there), `cuda_unavailable` (why the CUDA
        kernels cannot run in this process, None where they can), and, where the library loads,
        what it was built with: `cuda_toolkit`, `cutlass`, `arch`, `torch_target`.

    Notes:
        Loads the CUDA library to find out.
    """
    info: dict[str, str | int | bool | None] = {
        "version": __version__,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "kernels": len(all_configs()),
        "cuda_library": _library.LIBRARY_PATH.is_file(),
        "cuda_unavailable": _library.unavailable_reason(),
    }
    if _library.is_loaded():
        lines = torch.ops.moe_ext.build_info().splitlines()
        info |= dict(line.split("=", 1) for line in lines if "=" in line)
    return info
