"""The ops `moe_ext::fused_moe` and `fused_moe_out`: contract and registration."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_ext._call import call_straight
from moe_ext._fused_moe_checks import check_fused_moe
from moe_ext._fused_moe_options import said
from moe_ext._fused_moe_run import run_fused_moe, run_fused_moe_out
from moe_ext._register import register

_OPERANDS = "Tensor hidden_states, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids"
_OPTIONS = (
    "Tensor? w13_scale=None, Tensor? w2_scale=None, Tensor? a1_scale=None, Tensor? a2_scale=None, "
    "Tensor? w13_bias=None, Tensor? w2_bias=None, str activation='swiglu', float? alpha=None, "
    "float? limit=None, str gate_up_layout='concatenated', "
    "bool apply_router_weight_on_input=False, int first_expert=0, Tensor? expert_map=None, "
    "Tensor? addend=None, float routed_scale=1.0, str accumulate='promoted', "
    "bool batch_invariant=False"
)


def fused_moe(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: str = "swiglu",
    alpha: float | None = None,
    limit: float | None = None,
    gate_up_layout: str = "concatenated",
    apply_router_weight_on_input: bool = False,
    first_expert: int = 0,
    expert_map: Tensor | None = None,
    addend: Tensor | None = None,
    routed_scale: float = 1.0,
    accumulate: str = "promoted",
    batch_invariant: bool = False,
    workspace: Tensor | None = None,
) -> Tensor:
    """Run the experts of a Mixture-of-Experts layer: from hidden states and routing to the output.

    out[t] = routed_scale * sum over j of topk_weights[t, j] * expert(topk_ids[t, j], hidden[t])
    + addend[t], where expert(e, x) = w2[e] @ act(w13[e] @ x + w13_bias[e]) + w2_bias[e].

    Args:
        hidden_states: (num_tokens, hidden), bfloat16, last dimension contiguous, rows 16-byte
            aligned; CUDA, or CPU for the slow reference. hidden a multiple of 8.
        w13: (num_experts, 2 * intermediate, hidden), bfloat16 or float8_e4m3fn, same device, last
            dimension contiguous, rows 16-byte aligned (`moe_ext.pad_rows`); may be a view of a
            larger tensor. Gate rows, then up rows, or see `gate_up_layout`; ungated activations
            have (num_experts, intermediate, hidden). 1 to 4,096 experts.
        w2: (num_experts, hidden, intermediate), same dtype and device, strides as `w13`.
            intermediate a multiple of 8, not necessarily of 16 for FP8 if the strides are.
        topk_weights: (num_tokens, top_k), bfloat16 or float32, same device, any strides.
        topk_ids: (num_tokens, top_k), int32 or int64, same device, last dimension contiguous; top_k
            1 to 32, num_tokens * top_k at most 2**22. Any value: ids of experts that are not here
            (-1, num_experts, garbage) contribute nothing; the same id twice counts twice. Never
            read by the host on CUDA.
        w13_scale: float32, same device, any strides; FP8 only, and needed there. By its shape, it
            also says how hidden rows are quantised: () or (1,) or (num_experts,), one scale for
            each row, or `a1_scale` for all; (num_experts, n) or (num_experts, n, 1), n the rows of
            `w13`, one for each row; blocks of 128 x 128, (num_experts, ceil(n / 128),
            ceil(hidden / 128)), one for each 128 values of a row (1x128). Blocks of gate and up
            that have grids of their own: (num_experts, 2, ceil(intermediate / 128),
            ceil(hidden / 128)).
        w2_scale: the same for `w2` and the intermediate: () or (1,) or (num_experts,),
            (num_experts, hidden) or (num_experts, hidden, 1), (num_experts, ceil(hidden / 128),
            ceil(intermediate / 128)). Need not have the layout of `w13_scale`.
        a1_scale: float32, () or (1,), same device; only where `w13_scale` is per tensor or expert:
            one scale for all hidden rows, positive and normal, in place of one that is computed for
            each row.
        a2_scale: the same for the intermediate, with `w2_scale`.
        w13_bias: (num_experts, n), bfloat16 or float32, same device, any strides, in the order of
            the rows of `w13`. None is 0.
        w2_bias: (num_experts, hidden), likewise; weighted as the expert's result.
        activation: gated, from gate g and up u: "swiglu" silu(g) * u; "swiglu_oai"
            g * sigmoid(alpha * g) * (u + 1), of gpt-oss; "geglu" and "geglu_tanh" gelu(g) * u,
            exact and by tanh. Ungated: "relu2" relu(x)**2; "silu" silu(x).
        alpha: "swiglu_oai" only, positive, finite in float32; None is 1.702.
        limit: "swiglu" and "swiglu_oai" only, positive: g is clamped to at most limit and u to
            [-limit, limit] before all else (DeepSeek-V4 has "swiglu" with 10). None is 7 for
            "swiglu_oai" and no clamp for "swiglu".
        gate_up_layout: "concatenated", or "interleaved" where the rows of `w13`, its bias and its
            scales are gate 0, up 0, gate 1, up 1, ...
        apply_router_weight_on_input: multiply hidden rows by their weights (rounded to bfloat16)
            before the first GEMM, in place of the experts' results after the second.
        first_expert: the id of expert 0, for expert parallelism by ranges.
        expert_map: (num_global_experts,), int32, contiguous, same device: which of the experts
            here an id is; other values and ids past its end are experts elsewhere. Not together
            with `first_expert`.
        addend: (num_tokens, hidden), bfloat16 or float32, same device, last dimension contiguous,
            rows 16-byte aligned: added to each token, as a shared expert's result. None is 0.
        routed_scale: factor of the sum over experts, not of `addend`; finite in float32.
        accumulate: FP8 only. "promoted" or "fast", as in `grouped_gemm`.
        batch_invariant: makes the result of a token bitwise independent of the other tokens, at
            some cost: kernels that split K, whose choice depends on how many tokens there are, are
            left out, and "fast" is "promoted". Changes nothing else, and nothing on the CPU, where
            the result need not be independent.
        workspace: any dtype and shape, contiguous, same device, at least
            `moe_ext.fused_moe_workspace_size` bytes: scratch memory, overwritten, nothing read from
            it. Must overlap no other argument (not checked), and no other stream may use it at the
            same time. None allocates it. (`torch.ops.moe_ext.fused_moe` takes it by an overload,
            which wants a tensor.)

    Returns:
        (num_tokens, hidden), bfloat16, contiguous.

    Raises:
        ValueError: an argument differs from the above; the message has what was expected and what
            came.
        RuntimeError: the CUDA library cannot run here.

    Notes:
        Rounded are, apart from sums in float32: rows to FP8, as `moe_ext.quantize_fp8` does it; the
        activation's result to bfloat16, then for FP8 weights to FP8; an expert's result with its
        bias to bfloat16; `out` once. Weights are multiplied and summed in float32, in the order of
        j. `moe_ext.reference.fused_moe_reference` is the same in plain PyTorch.
        A scale that is computed is of one row or a part of it: a value that is infinite (it counts
        as 3.4e38, as in `moe_ext.quantize_fp8`) or huge makes no other token's coarse.
        Does not synchronise on CUDA, allocates the output and a workspace alone; safe in CUDA
        graphs (sizes fixed, routing and weights may change between replays). Deterministic.
        Inputs that require grad are accepted, backward raises: inference only.

    Sources:
        SwiGLU and GeGLU: arxiv.org/abs/2002.05202; ReLU squared: arxiv.org/abs/2109.08668;
        "swiglu_oai": gpt-oss's reference model (openai/gpt-oss, torch/model.py); clamped
        "swiglu": DeepSeek-V4's reference model (inference/model.py, Expert.forward).

    Example:
        >>> import torch
        >>> hidden, w13 = torch.ones(2, 16).bfloat16(), torch.ones(4, 16, 16).bfloat16()
        >>> w2, ids = torch.ones(4, 16, 8).bfloat16(), torch.tensor([[0, 3], [1, -1]])
        >>> fused_moe(hidden, w13, w2, torch.full((2, 2), 0.5), ids)[:, 0].tolist()
        [2048.0, 1024.0]
    """
    options = said(
        w13_scale,
        w2_scale,
        a1_scale,
        a2_scale,
        w13_bias,
        w2_bias,
        activation,
        alpha,
        limit,
        gate_up_layout,
        apply_router_weight_on_input,
        first_expert,
        expert_map,
        addend,
        routed_scale,
        accumulate,
        batch_invariant,
        workspace,
    )
    op = _OP if workspace is None else _WORKSPACE_OP
    operands = (hidden_states, w13, w2, topk_weights, topk_ids)
    result: Tensor = call_straight(op, run_fused_moe, operands, options, written=(workspace,))
    return result


def fused_moe_out(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    out: Tensor,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: str = "swiglu",
    alpha: float | None = None,
    limit: float | None = None,
    gate_up_layout: str = "concatenated",
    apply_router_weight_on_input: bool = False,
    first_expert: int = 0,
    expert_map: Tensor | None = None,
    addend: Tensor | None = None,
    routed_scale: float = 1.0,
    accumulate: str = "promoted",
    batch_invariant: bool = False,
    workspace: Tensor | None = None,
) -> None:
    """Run the experts of a Mixture-of-Experts layer as `fused_moe`, into `out`.

    Args:
        hidden_states: as in `fused_moe`, like all arguments but `out`.
        w13: see `fused_moe`.
        w2: see `fused_moe`.
        topk_weights: see `fused_moe`.
        topk_ids: see `fused_moe`.
        out: (num_tokens, hidden), bfloat16, same device, last dimension contiguous, rows 16-byte
            aligned. Every row is written. Must not overlap the inputs (not checked).
        w13_scale: see `fused_moe`.
        w2_scale: see `fused_moe`.
        a1_scale: see `fused_moe`.
        a2_scale: see `fused_moe`.
        w13_bias: see `fused_moe`.
        w2_bias: see `fused_moe`.
        activation: see `fused_moe`.
        alpha: see `fused_moe`.
        limit: see `fused_moe`.
        gate_up_layout: see `fused_moe`.
        apply_router_weight_on_input: see `fused_moe`.
        first_expert: see `fused_moe`.
        expert_map: see `fused_moe`.
        addend: see `fused_moe`.
        routed_scale: see `fused_moe`.
        accumulate: see `fused_moe`.
        batch_invariant: see `fused_moe`.
        workspace: see `fused_moe`.

    Raises:
        ValueError: an argument differs from the above.
        RuntimeError: the CUDA library cannot run here.

    Notes:
        Otherwise as `fused_moe`.
    """
    options = said(
        w13_scale,
        w2_scale,
        a1_scale,
        a2_scale,
        w13_bias,
        w2_bias,
        activation,
        alpha,
        limit,
        gate_up_layout,
        apply_router_weight_on_input,
        first_expert,
        expert_map,
        addend,
        routed_scale,
        accumulate,
        batch_invariant,
        workspace,
    )
    operands = (hidden_states, w13, w2, topk_weights, topk_ids)
    options["out"] = out
    call_straight(
        _OUT_OP,
        run_fused_moe_out,
        operands,
        options,
        written=(workspace, out),
    )


def _fake(*operands: Tensor, **options: Any) -> Tensor:
    check_fused_moe("fused_moe", None, *operands, **options, has_memory=False)
    return operands[0].new_empty(operands[0].shape)


def _out_fake(*operands: Tensor, out: Tensor, **options: Any) -> None:
    check_fused_moe("fused_moe_out", out, *operands, **options, has_memory=False)


# What is written must be a tensor: of an op with one result and nothing that it writes after all,
# inductor takes the result for a tuple (its decompose_auto_functionalized, torch 2.11 and 2.13).
_OP = register("fused_moe", f"({_OPERANDS}, *, {_OPTIONS}) -> Tensor", run_fused_moe, _fake)
_WORKSPACE_OP = register(
    "fused_moe.workspace",
    f"({_OPERANDS}, *, {_OPTIONS}, Tensor(a!) workspace) -> Tensor",
    run_fused_moe,
    _fake,
    scratch=("workspace",),
)
_OUT_OP = register(
    "fused_moe_out",
    f"({_OPERANDS}, *, {_OPTIONS}, Tensor(a!)? workspace=None, Tensor(b!) out) -> ()",
    run_fused_moe_out,
    _out_fake,
    scratch=("workspace",),
)
