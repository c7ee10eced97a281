"""`fused_moe_mixed`: the experts of a bank in one call, each stage of each in its own precision.

What it must compute is in `mixed_reference.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from moe_ext._call import call_straight
from moe_ext._register import register
from moe_ext.fused_moe import fused_moe, fused_moe_out
from moe_ext.precision._mixed_layer import (
    DEFAULTS,
    OPERANDS,
    MixedLayer,
    layer_of,
    options_of,
    parts_of_layer,
)
from moe_ext.precision._mixed_run import (
    fake,
    out_fake,
    run_fused_moe_mixed,
    run_fused_moe_mixed_out,
)

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
        ValueError: an argument differs from the above; or, on CUDA, the bank has precisions of both
            kinds, `down` in FP8 among them, and an intermediate size above 32,768.
        RuntimeError: the CUDA library cannot run here.

    Notes:
        Rounded is what `fused_moe` rounds: an expert's hidden rows or intermediate to FP8 where the
        stage's weights are FP8, the activation's result to bfloat16, an expert's result with its
        bias to bfloat16, `out` once; weighted results are added in float32 in the order of a
        token's choices, whatever their precision. `fused_moe_mixed_reference` is that in plain
        PyTorch.
        A bank of one precision is one call of `fused_moe`. Any other is one chain of kernels on
        CUDA, in which each stage is a GEMM for the experts in FP8 and one for those in BF16.
        Does not synchronise on CUDA, allocates the output and a workspace alone, deterministic,
        safe in CUDA graphs; inference only.
    """
    try:
        layer = layer_of(bank)
    except (AttributeError, KeyError):  # of a bank it takes no more than its attributes
        raise ValueError(
            f"fused_moe_mixed: `bank` must be an ExpertBank, got {type(bank).__name__}"
        ) from None
    given = (("expert_map", expert_map), ("addend", addend), ("workspace", workspace))
    options: dict[str, Any] = {name: value for name, value in given if value is not None}
    if bank._is_uniform:
        return _one_precision(layer, hidden_states, topk_weights, topk_ids, out, options)
    for name, default in DEFAULTS.items():
        value = getattr(layer, name)
        if value != default:
            options[name] = value
    operands = (hidden_states, topk_weights, topk_ids, *layer[: len(OPERANDS)])
    if out is not None:
        options["out"] = out
        call_straight(
            _OUT_OP,
            run_fused_moe_mixed_out,
            operands,
            options,
            written=(workspace, out),
        )
        return out
    op = _OP if workspace is None else _WORKSPACE_OP
    result: Tensor = call_straight(op, run_fused_moe_mixed, operands, options, written=(workspace,))
    return result


def _one_precision(
    layer: MixedLayer,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    out: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Call `fused_moe` for a layer whose experts are all in one precision."""
    (part,) = parts_of_layer(layer)
    options = options_of(layer, part) | options
    if "expert_map" in options:
        options["first_expert"] = 0
    operands = (hidden_states, options.pop("w13"), options.pop("w2"), topk_weights, topk_ids)
    if out is None:
        return fused_moe(*operands, **options)
    fused_moe_out(*operands, **options, out=out)
    return out


_TENSORS = ", ".join(f"Tensor? {name}" for name in OPERANDS[1:-1])
_OPERANDS = (
    "Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, Tensor places, "
    f"{_TENSORS}, int num_fp8"
)
_OPTIONS = (
    "str activation='swiglu', float? alpha=None, float? limit=None, "
    "str gate_up_layout='concatenated', bool apply_router_weight_on_input=False, "
    "int first_expert=0, float routed_scale=1.0, str accumulate='promoted', "
    "bool batch_invariant=False, Tensor? expert_map=None, Tensor? addend=None"
)
# Three ops for the reasons that `moe_ext/fused_moe.py` has for its own.
_OP = register(
    "fused_moe_mixed", f"({_OPERANDS}, *, {_OPTIONS}) -> Tensor", run_fused_moe_mixed, fake
)
_WORKSPACE_OP = register(
    "fused_moe_mixed.workspace",
    f"({_OPERANDS}, *, {_OPTIONS}, Tensor(a!) workspace) -> Tensor",
    run_fused_moe_mixed,
    fake,
    scratch=("workspace",),
)
_OUT_OP = register(
    "fused_moe_mixed_out",
    f"({_OPERANDS}, *, {_OPTIONS}, Tensor(a!)? workspace=None, Tensor(b!) out) -> ()",
    run_fused_moe_mixed_out,
    out_fake,
    scratch=("workspace",),
)
