"""`fused_moe_mixed`: the experts of a bank in one call, each stage of each in its own precision.

The one place where `ExpertBank.forward` becomes kernels. Until there are some for mixtures it is
made of the ops that there are; what it must compute is in `mixed_reference.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_ext._activations import activate
from moe_ext._fused_moe_checks import check_inputs
from moe_ext._fused_moe_scales import weight_scale_of
from moe_ext.combine_tokens import combine_tokens
from moe_ext.fused_moe import fused_moe, fused_moe_out
from moe_ext.grouped_gemm import grouped_gemm
from moe_ext.precision._slots import Part
from moe_ext.precision.layer_plan import BF16, FP8
from moe_ext.quantize import quantize_fp8
from moe_ext.sort_tokens import sort_tokens

if TYPE_CHECKING:
    from moe_ext.precision.bank import ExpertBank


def fused_moe_mixed(
    hidden_states: Tensor,
    bank: ExpertBank,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    addend: Tensor | None = None,
    expert_map: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Run the experts of a bank as `moe_ext.fused_moe` runs those of one precision.

    Args:
        hidden_states: (num_tokens, hidden), as in `fused_moe`, like all arguments but `bank`.
        bank: weights, plan and options.
        topk_weights: see `fused_moe`.
        topk_ids: see `fused_moe`.
        addend: see `fused_moe`.
        expert_map: see `fused_moe`: to the experts of the bank.
        out: see `fused_moe_out`; None allocates it.
        workspace: see `fused_moe`: at least `bank.workspace_size` bytes.

    Returns:
        (num_tokens, hidden), bfloat16; `out` itself where it is given.

    Raises:
        ValueError: an argument differs from the above, or `batch_invariant` is asked of a bank on
            CUDA with experts whose stages differ.
        RuntimeError: the CUDA library cannot run here.

    Notes:
        Rounded is what `fused_moe` rounds: an expert's hidden rows or intermediate to FP8 where the
        stage's weights are FP8, the activation's result to bfloat16, an expert's result with its
        bias to bfloat16, `out` once; weighted results are added in float32 in the order of a
        token's choices, whatever their precision. `fused_moe_mixed_reference` is that in plain
        PyTorch.
        A bank of one precision is one call of `fused_moe`. On CUDA, where every expert has one
        precision in both stages, there are two, the second with the first one's result as addend:
        what the experts in FP8 add is then rounded to bfloat16 on the way. Otherwise the layer is
        made of sorting, GEMMs and combining, with `workspace` unused.
        Does not synchronise on CUDA, deterministic, safe in CUDA graphs; inference only.
    """
    parts = bank._parts
    if len(parts) == 1 and parts[0].is_uniform:
        options = _options_of(bank, parts[0]) | {
            "first_expert": bank.first_expert if expert_map is None else 0,
            "expert_map": expert_map,
            "workspace": workspace,
            "addend": addend,
        }
        return _call((hidden_states, topk_weights, topk_ids), options, out)
    check_inputs(
        "fused_moe_mixed",
        out,
        hidden_states,
        topk_weights,
        topk_ids,
        sizes=(bank.hidden_size, bank.intermediate_size, bank.num_experts),
        like=bank.part_maps,
        expert_map=expert_map,
        addend=addend,
        workspace=workspace,
        has_memory=not torch.compiler.is_compiling(),
    )
    maps = local_maps(bank, expert_map)
    if hidden_states.is_cuda and all(part.is_uniform for part in parts):
        return by_calls(hidden_states, bank, topk_weights, topk_ids, maps, addend, out, workspace)
    if hidden_states.is_cuda and bank.batch_invariant:
        raise ValueError(
            "fused_moe_mixed: `batch_invariant` must be False for a bank whose experts have stages "
            "of different precision, on CUDA, got True"
        )
    result = by_stages(hidden_states, bank, topk_weights, topk_ids, maps, addend)
    return result if out is None else out.copy_(result)


def local_maps(bank: ExpertBank, expert_map: Tensor | None) -> Tensor:
    """Return (parts, ids) int32: where an id is in a part, on the device."""
    maps = bank.part_maps
    if expert_map is None:
        return maps
    local = maps[:, bank.first_expert :]
    here = (expert_map >= 0) & (expert_map < bank.num_experts)
    return local[:, expert_map.where(here, 0).long()].where(here, -1).contiguous()


def tensors_of(bank: ExpertBank, part: Part) -> dict[str, Tensor | None]:
    """Return weights, scales and biases of a part by their names in `fused_moe`; views."""
    tensors: dict[str, Tensor | None] = {}
    for index, weight in enumerate(("w13", "w2")):
        kind, begin = part.kinds[index], part.begins[index]
        slots = slice(begin, begin + len(part.experts))
        for name, source in (
            (weight, f"{weight}_{kind}"),
            (f"{weight}_bias", f"{weight}_{kind}_bias"),
            (f"{weight}_scale", f"{weight}_{kind}_scale"),
            (f"a{weight[1]}_scale", f"a{weight[1]}_scale"),
        ):
            tensor = None if name.endswith("_scale") and kind == BF16 else getattr(bank, source)
            tensors[name] = tensor if tensor is None or tensor.dim() == 0 else tensor[slots]
    return tensors


def _options_of(bank: ExpertBank, part: Part) -> dict[str, Any]:
    """Return what `fused_moe` takes for a part of one precision."""
    options = {**bank._choices(), **tensors_of(bank, part)}
    if part.kinds[0] == BF16:
        options["accumulate"] = "promoted"
    return options


def _call(inputs: tuple[Tensor, ...], options: dict[str, Any], out: Tensor | None) -> Tensor:
    hidden_states, *routing = inputs
    operands = (hidden_states, options.pop("w13"), options.pop("w2"), *routing)
    if out is None:
        return fused_moe(*operands, **options)
    fused_moe_out(*operands, **options, out=out)
    return out


def by_calls(
    hidden_states: Tensor,
    bank: ExpertBank,
    topk_weights: Tensor,
    topk_ids: Tensor,
    maps: Tensor,
    addend: Tensor | None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Run a bank whose experts have one precision each by a call of `fused_moe` for either."""
    inputs = (hidden_states, topk_weights, topk_ids)
    for part, own in zip(bank._parts, maps, strict=True):
        options = _options_of(bank, part) | {
            "first_expert": 0,
            "expert_map": own,
            "workspace": workspace,
            "addend": addend,
        }
        addend = _call(inputs, options, out if part is bank._parts[-1] else None)
    assert addend is not None
    return addend


def by_stages(
    hidden_states: Tensor,
    bank: ExpertBank,
    topk_weights: Tensor,
    topk_ids: Tensor,
    maps: Tensor,
    addend: Tensor | None,
) -> Tensor:
    """Run a bank part by part, GEMM by GEMM, and add all results in the order of choices."""
    top_k = topk_ids.shape[1]
    weights: Tensor | None = topk_weights
    results, slot_row = [], None
    for index, (part, own) in enumerate(zip(bank._parts, maps, strict=True)):
        offs, row_slot, rows_here = sort_tokens(topk_ids, len(part.experts), expert_map=own)
        slots = row_slot.clamp_min(0).long()
        rows = hidden_states[slots // top_k]
        if bank.apply_router_weight_on_input:
            rows = (rows.float() * topk_weights.reshape(-1)[slots, None].float()).bfloat16()
            weights = None
        results.append(_rows_of_part(bank, part, rows, offs))
        # A slot is in one part at most; its row is counted over all parts' buffers.
        rows_here = torch.where(rows_here < 0, rows_here, rows_here + index * row_slot.shape[0])
        slot_row = rows_here if slot_row is None else torch.maximum(slot_row, rows_here)
    assert slot_row is not None
    return combine_tokens(
        torch.cat(results),
        slot_row,
        weights,
        top_k=top_k,
        addend=addend,
        routed_scale=bank.routed_scale,
    )


def _rows_of_part(bank: ExpertBank, part: Part, rows: Tensor, offs: Tensor) -> Tensor:
    """Return the results of a part's experts for sorted rows; others than theirs are undefined."""
    tensors = tensors_of(bank, part)
    gate_up = _linear(bank, part.kinds[0], "w13", tensors, rows, offs, torch.float32)
    middle = activate(
        gate_up,
        bank.activation,
        alpha=bank.alpha,
        limit=bank.limit,
        gate_up_layout=bank.gate_up_layout,
    ).bfloat16()
    return _linear(bank, part.kinds[1], "w2", tensors, middle, offs, torch.bfloat16)


def _linear(
    bank: ExpertBank,
    kind: str,
    name: str,
    tensors: dict[str, Tensor | None],
    x: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply sorted rows by one stage's matrices, quantised first where these are FP8."""
    weight, bias = tensors[name], tensors[f"{name}_bias"]
    assert weight is not None
    if kind != FP8:
        return grouped_gemm(x, weight, offs, bias=bias, out_dtype=out_dtype)
    scale, static = tensors[f"{name}_scale"], tensors[f"a{name[1]}_scale"]
    assert scale is not None
    layout = weight_scale_of(tuple(scale.shape), *weight.shape)
    assert layout is not None
    by_row = layout.granularity == "tensor" and static is None
    q, scale_q = quantize_fp8(x, "row" if by_row else layout.granularity, scale=static)
    return grouped_gemm(
        q,
        weight,
        offs,
        scale_a=scale_q,
        scale_b=scale,
        bias=bias,
        n_segments=layout.n_segments,
        out_dtype=out_dtype,
        accumulate=bank.accumulate,
    )
