"""The module `Experts`: a layer's packed weights, and the call of `fused_moe` with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ext._activations import ACTIVATIONS, INTERLEAVED
from moe_ext._fused_moe_checks import check_fused_moe
from moe_ext._words import name_of
from moe_ext.fused_moe import fused_moe, fused_moe_out
from moe_ext.nn._call import check_call, rows_of, rows_of_out
from moe_ext.nn._checkpoints import FromCheckpoint
from moe_ext.nn._options import LayerOptions, check_dtype_and_scales, check_kinds, check_sizes
from moe_ext.nn._pieces import quoted
from moe_ext.nn._store import empty_rows, scale_shape


class Experts(LayerOptions, FromCheckpoint):
    """The experts of a Mixture-of-Experts layer, with their weights packed for `fused_moe`.

    Made empty, for `load_state_dict` with tensors of the same names and shapes; or full, by
    `from_state_dict` or `from_linears`.

    Args:
        num_experts: that are here, 1 to 4,096.
        hidden_size: a multiple of 8.
        intermediate_size: that is here, a multiple of 8.
        dtype: of the weights, bfloat16 or float8_e4m3fn.
        device: of all tensors; None is torch's default, "meta" has no memory.
        scales: how FP8 weights share scales: "block" (128 x 128), "channel" (a row) or "tensor" (an
            expert); None for bfloat16. It also says how activations are quantised, see `fused_moe`.
        static_scales: whether there are scales of activations, with `scales="tensor"` alone.
        bias: whether both GEMMs have one, in bfloat16.
        activation: see `fused_moe`, as for all arguments below.
        alpha: see `fused_moe`.
        limit: see `fused_moe`.
        gate_up_layout: see `fused_moe`.
        apply_router_weight_on_input: see `fused_moe`.
        first_expert: see `fused_moe`.
        routed_scale: see `fused_moe`.
        accumulate: see `fused_moe`.
        batch_invariant: see `fused_moe`.

    Attributes:
        w13: parameter (num_experts, n, hidden_size), n = 2 * intermediate_size, or
            intermediate_size for ungated activations. Rows 16-byte aligned, so not contiguous where
            a row has another number of bytes.
        w2: parameter (num_experts, hidden_size, intermediate_size), likewise.
        w13_bias: parameter (num_experts, n), or None.
        w2_bias: parameter (num_experts, hidden_size), or None.
        w13_scale: buffer, float32, or None: "tensor" (num_experts,); "channel" (num_experts, n);
            "block" (num_experts, ceil(n / 128), ceil(hidden_size / 128)), but (num_experts, 2,
            ceil(intermediate_size / 128), ceil(hidden_size / 128)) for concatenated gate and up
            whose size is not a multiple of 128.
        w2_scale: the same for `w2`, never with two grids.
        a1_scale: buffer, float32, (), or None.
        a2_scale: buffer, float32, (), or None.

    Raises:
        ValueError: an argument differs from the above; the message has what was expected and what
            came.

    Notes:
        No tensor requires grad: inference only. `to`, `half` and the like move tensors and leave
        their dtypes, since FP8 values are nothing without their scales and `fused_moe` takes no
        other dtypes. Weights may be changed in place at any time.

    Example:
        >>> experts = Experts(4, 64, 32, scales="block", dtype=torch.float8_e4m3fn)
        >>> experts.w13.shape, experts.w13_scale.shape
        (torch.Size([4, 64, 64]), torch.Size([4, 2, 1, 1]))
    """

    w13: Tensor
    w2: Tensor
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    w13_scale: Tensor | None
    w2_scale: Tensor | None
    a1_scale: Tensor | None
    a2_scale: Tensor | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        scales: str | None = None,
        static_scales: bool = False,
        bias: bool = False,
        activation: str = "swiglu",
        alpha: float | None = None,
        limit: float | None = None,
        gate_up_layout: str = "concatenated",
        apply_router_weight_on_input: bool = False,
        first_expert: int = 0,
        routed_scale: float = 1.0,
        accumulate: str = "promoted",
        batch_invariant: bool = False,
    ) -> None:
        """Allocate the tensors, without values."""
        super().__init__()
        self.activation = activation
        self.alpha = alpha
        self.limit = limit
        self.gate_up_layout = gate_up_layout
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.first_expert = first_expert
        self.routed_scale = routed_scale
        self.accumulate = accumulate
        self.batch_invariant = batch_invariant
        check_kinds("Experts", {**self._choices(), "static_scales": static_scales, "bias": bias})
        check_sizes("Experts", num_experts, hidden_size, intermediate_size)
        check_dtype_and_scales("Experts", dtype, scales, static_scales)
        gated = activation not in ACTIVATIONS or ACTIVATIONS[activation].gated
        n = intermediate_size * (2 if gated else 1)
        tensors = {
            "w13": empty_rows((num_experts, n, hidden_size), dtype, device),
            "w2": empty_rows((num_experts, hidden_size, intermediate_size), dtype, device),
        }
        if bias:
            tensors["w13_bias"] = torch.empty(num_experts, n, dtype=torch.bfloat16, device=device)
            tensors["w2_bias"] = tensors["w13_bias"].new_empty(num_experts, hidden_size)
        if scales is not None:
            halves = gated and gate_up_layout != INTERLEAVED
            shapes = {
                "w13_scale": scale_shape(scales, num_experts, n, hidden_size, halves),
                "w2_scale": scale_shape(scales, num_experts, hidden_size, intermediate_size, False),
            }
            shapes |= {"a1_scale": (), "a2_scale": ()} if static_scales else {}
            for name, shape in shapes.items():
                tensors[name] = torch.empty(shape, dtype=torch.float32, device=device)
        self._set_tensors(tensors)
        self._check()

    def _options(self, expert_map: Tensor | None = None) -> dict[str, Any]:
        """Return what `fused_moe` takes besides operands, as keyword arguments."""
        return {
            **self._choices(),
            "w13_scale": self.w13_scale,
            "w2_scale": self.w2_scale,
            "a1_scale": self.a1_scale,
            "a2_scale": self.a2_scale,
            "w13_bias": self.w13_bias,
            "w2_bias": self.w2_bias,
            "first_expert": self.first_expert if expert_map is None else 0,
            "expert_map": expert_map,
        }

    def _check(self) -> None:
        """Raise a ValueError unless `fused_moe` would take the tensors and options."""
        device = self.w13.device
        hidden = torch.empty(0, self.w2.shape[1], dtype=torch.bfloat16, device=device)
        weights = torch.empty(0, 1, dtype=torch.float32, device=device)
        ids = torch.empty(0, 1, dtype=torch.int32, device=device)
        operands = (hidden, self.w13, self.w2, weights, ids)
        check_fused_moe("Experts", None, *operands, **self._options(), has_memory=False)

    @property
    def num_experts(self) -> int:
        """How many experts are here."""
        return self.w2.shape[0]

    @property
    def hidden_size(self) -> int:
        """Columns of hidden states."""
        return self.w2.shape[1]

    @property
    def intermediate_size(self) -> int:
        """How many intermediate features are here, with the zeros of `pad_blocks`."""
        return self.w2.shape[2]

    def forward(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *,
        addend: Tensor | None = None,
        expert_map: Tensor | None = None,
        out: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> Tensor:
        """Run the experts: see `moe_ext.fused_moe`.

        Args:
            hidden_states: (..., hidden_size), bfloat16, on the device of the weights.
            topk_weights: (..., top_k), bfloat16 or float32, the same leading dimensions.
            topk_ids: (..., top_k), int32 or int64, likewise; ids of experts elsewhere contribute
                nothing.
            addend: (..., hidden_size), bfloat16 or float32, likewise: added, as a shared expert's
                result. None is 0.
            expert_map: (num_global_experts,), int32, in place of `first_expert`.
            out: (..., hidden_size), bfloat16, likewise, contiguous unless it has two dimensions;
                receives the result. None allocates it.
            workspace: scratch memory of at least `workspace_size` bytes, which layers that run one
                after the other may share. None allocates it.

        Returns:
            (..., hidden_size), bfloat16; `out` itself where it is given.

        Raises:
            ValueError: an argument differs from the above.
            RuntimeError: the CUDA library cannot run here.

        Notes:
            As `fused_moe`: one node of a compiled graph, no synchronisation, safe in CUDA graphs,
            deterministic, backward raises.
        """
        check_call(
            "Experts",
            self.hidden_size,
            hidden_states,
            topk_weights,
            topk_ids,
            addend,
            expert_map,
            out,
            workspace,
        )
        hidden, weights, ids = rows_of(hidden_states), rows_of(topk_weights), rows_of(topk_ids)
        operands = (hidden, self.w13, self.w2, weights, ids)
        options = self._options(expert_map)
        options["addend"] = None if addend is None else rows_of(addend)
        options["workspace"] = workspace
        if out is None:
            return fused_moe(*operands, **options).reshape(hidden_states.shape)
        fused_moe_out(*operands, **options, out=rows_of_out("Experts", out))
        return out

    def extra_repr(self) -> str:
        """Say sizes and what differs from the defaults."""
        parts = [
            f"num_experts={self.num_experts}",
            f"hidden_size={self.hidden_size}",
            f"intermediate_size={self.intermediate_size}",
            f"dtype={name_of(self.w13.dtype)}",
            f"activation={quoted(self.activation)}",
        ]
        if self.w13_scale is not None:
            parts.append(f"w13_scale={tuple(self.w13_scale.shape)}")
        if self.w2_scale is not None:
            parts.append(f"w2_scale={tuple(self.w2_scale.shape)}")
        for name, value, default in (
            ("bias", self.w13_bias is not None, False),
            ("static_scales", self.a1_scale is not None, False),
            ("alpha", self.alpha, None),
            ("limit", self.limit, None),
            ("gate_up_layout", quoted(self.gate_up_layout), quoted("concatenated")),
            ("apply_router_weight_on_input", self.apply_router_weight_on_input, False),
            ("first_expert", self.first_expert, 0),
            ("routed_scale", self.routed_scale, 1.0),
            ("accumulate", quoted(self.accumulate), quoted("promoted")),
            ("batch_invariant", self.batch_invariant, False),
        ):
            if value != default:
                parts.append(f"{name}={value}")
        return ", ".join(parts)
