"""The module `MoELayer`: router, experts, and a shared expert beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_ext._routing_checks import MAX_EXPERTS, MAX_GROUPS
from moe_ext.nn._arguments import (
    check_bool,
    check_hidden_states,
    check_int,
    check_module,
    check_number,
    check_string,
    check_tensor,
    shown,
)
from moe_ext.nn._pieces import quoted
from moe_ext.nn._weights import PackedWeights
from moe_ext.routing import topk_routing


class MoELayer(nn.Module):
    """A Mixture-of-Experts layer: out = experts(x, topk_routing(router(x))) + gate(x) * shared(x).

    Args:
        router: from (num_tokens, hidden) to logits (num_tokens, all experts), an `nn.Linear` or
            any module. Rows reach it in the dtype of its first parameter: a float32 router
            computes in float32.
        experts: all of the layer's, or those of this rank: `Experts`, or an `ExpertBank` of
            `moe_ext.precision`.
        top_k: see `moe_ext.topk_routing`, as for all arguments up to `scale`.
        scoring: see `topk_routing`.
        correction_bias: see `topk_routing`; becomes a buffer, which
            `to`, `half` and the like move and leave in its dtype. None is none.
        renormalize: see `topk_routing`.
        num_groups: see `topk_routing`.
        topk_groups: see `topk_routing`.
        scale: see `topk_routing`: multiplies the weights.
        shared_expert: any module from (..., hidden) to (..., hidden), bfloat16 or float32: added.
            Across ranks whose results are summed it belongs to one of them, or is sharded as they
            are. None is none.
        shared_expert_gate: a module from (..., hidden) to (..., 1), whose sigmoid multiplies the
            shared expert's result, as in Qwen2-MoE; its input has the dtype of its first
            parameter. None is 1.

    Raises:
        ValueError: an argument differs from the above; the message has what was expected and what
            came.

    Example:
        >>> from moe_ext.nn import Experts
        >>> experts = Experts(4, 64, 32)
        >>> layer = MoELayer(torch.nn.Linear(64, 4, bias=False), experts, top_k=2)
        >>> layer.top_k, layer.experts.num_experts
        (2, 4)
    """

    correction_bias: Tensor | None

    def __init__(
        self,
        router: nn.Module,
        experts: PackedWeights,
        *,
        top_k: int,
        scoring: str = "softmax",
        correction_bias: Tensor | None = None,
        renormalize: bool = True,
        num_groups: int = 1,
        topk_groups: int = 1,
        scale: float = 1.0,
        shared_expert: nn.Module | None = None,
        shared_expert_gate: nn.Module | None = None,
    ) -> None:
        """Take the modules."""
        super().__init__()
        for name, module, kind, said in (
            ("router", router, nn.Module, "Module"),
            ("experts", experts, PackedWeights, "Experts"),
        ):
            if not isinstance(module, kind):
                raise ValueError(
                    f"MoELayer: `{name}` must be of {said}, got {type(module).__name__}"
                )
        check_module("MoELayer", "shared_expert", shared_expert)
        check_module("MoELayer", "shared_expert_gate", shared_expert_gate)
        if shared_expert_gate is not None and shared_expert is None:
            raise ValueError(
                "MoELayer: `shared_expert_gate` must be None where `shared_expert` is, got "
                f"{type(shared_expert_gate).__name__}"
            )
        check_tensor("MoELayer", "correction_bias", correction_bias, optional=True)
        check_string("MoELayer", "scoring", scoring)
        check_bool("MoELayer", "renormalize", renormalize)
        check_number("MoELayer", "scale", scale)
        counts = {"top_k": top_k, "num_groups": num_groups, "topk_groups": topk_groups}
        for name, count in counts.items():
            check_int("MoELayer", name, count)
        self.router = router
        self.experts = experts
        self.shared_expert = shared_expert
        self.shared_expert_gate = shared_expert_gate
        self.register_buffer("correction_bias", correction_bias)
        self.top_k = top_k
        self.scoring = scoring
        self.renormalize = renormalize
        self.num_groups = num_groups
        self.topk_groups = topk_groups
        self.scale = scale
        if isinstance(router, nn.Linear):
            self._check_router(router)
        if isinstance(shared_expert_gate, nn.Linear):
            self._check_gate(shared_expert_gate)
        # The fake of the op checks what is asked of it.
        logits = torch.empty(0, self._num_logits(), dtype=torch.float32, device="meta")
        self._route(logits)

    def _check_router(self, router: nn.Linear) -> None:
        experts = self.experts
        if router.in_features != experts.hidden_size:
            raise ValueError(
                f"MoELayer: `router` must have {experts.hidden_size} columns, the hidden size of "
                f"`experts`, got {router.in_features}"
            )
        end = experts.first_expert + experts.num_experts
        if router.out_features < end:
            raise ValueError(
                f"MoELayer: `router` must have at least {end} rows, for the experts "
                f"{experts.first_expert} to {end - 1} that are here, got {router.out_features}"
            )

    def _check_gate(self, gate: nn.Linear) -> None:
        shape, wanted = (gate.out_features, gate.in_features), (1, self.experts.hidden_size)
        if shape != wanted:
            raise ValueError(
                f"MoELayer: `shared_expert_gate` must have a weight of shape (1, hidden) = "
                f"{wanted}, got {shape}"
            )

    def _num_logits(self) -> int:
        """Return how many experts there are; as many as may be, where nothing tells."""
        if isinstance(self.router, nn.Linear):
            return self.router.out_features
        if self.correction_bias is not None:
            return self.correction_bias.numel()
        groups = self.num_groups if 1 <= self.num_groups <= MAX_GROUPS else 1
        return MAX_EXPERTS // groups * groups

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        bias = self.correction_bias
        return topk_routing(
            logits,
            self.top_k,
            scoring=self.scoring,
            correction_bias=bias if bias is None or not logits.is_meta else bias.to("meta"),
            renormalize=self.renormalize,
            num_groups=self.num_groups,
            topk_groups=self.topk_groups,
            scale=self.scale,
        )

    def route(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Choose and weigh experts.

        Args:
            hidden_states: (..., hidden).

        Returns:
            `weights`, float32, and `ids`, int32, both (..., top_k).
        """
        check_hidden_states("MoELayer", hidden_states, self.experts.hidden_size)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.router(_like_parameters(rows, self.router))
        if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[0] != rows.shape[0]:
            raise ValueError(
                f"MoELayer: `router` must return logits of shape (num_tokens, num_experts) = "
                f"({rows.shape[0]}, *), got {_result(logits)}"
            )
        weights, ids = self._route(logits)
        shape = (*hidden_states.shape[:-1], self.top_k)
        return weights.reshape(shape), ids.reshape(shape)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        expert_map: Tensor | None = None,
        out: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> Tensor:
        """Run the layer.

        Args:
            hidden_states: (..., hidden), bfloat16, on the device of the weights.
            expert_map: see `Experts`.
            out: see `Experts`.
            workspace: see `Experts`.

        Returns:
            (..., hidden), bfloat16; `out` itself where it is given.

        Raises:
            ValueError: an argument differs from the above, or a module gave something else than
                its description says.
            RuntimeError: the CUDA library cannot run here.

        Notes:
            As `fused_moe`, and what the router and the shared expert do.
        """
        weights, ids = self.route(hidden_states)
        result: Tensor = self.experts(
            hidden_states,
            weights,
            ids,
            addend=self._shared(hidden_states),
            expert_map=expert_map,
            out=out,
            workspace=workspace,
        )
        return result

    def _shared(self, hidden_states: Tensor) -> Tensor | None:
        """Return what the shared expert adds."""
        if self.shared_expert is None:
            return None
        result: Tensor = self.shared_expert(hidden_states)
        _check_result("shared_expert", result, (*hidden_states.shape,), "(..., hidden)")
        if self.shared_expert_gate is not None:
            gate = self.shared_expert_gate(_like_parameters(hidden_states, self.shared_expert_gate))
            _check_result("shared_expert_gate", gate, (*hidden_states.shape[:-1], 1), "(..., 1)")
            result = torch.sigmoid(gate).to(result.dtype) * result
        return result

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoELayer:
        """Move tensors as `to`, `cuda` and others ask, and leave the dtype of the bias."""
        bias = self.correction_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved = self.correction_bias
        if bias is not None and moved is not None and moved.dtype is not bias.dtype:
            self.correction_bias = bias.to(moved.device)
        return self

    def extra_repr(self) -> str:
        """Say how experts are chosen."""
        parts = [f"top_k={self.top_k}", f"scoring={quoted(self.scoring)}"]
        for name, value, default in (
            ("correction_bias", self.correction_bias is not None, False),
            ("renormalize", self.renormalize, True),
            ("num_groups", self.num_groups, 1),
            ("topk_groups", self.topk_groups, 1),
            ("scale", self.scale, 1.0),
        ):
            if value != default:
                parts.append(f"{name}={value}")
        return ", ".join(parts)


def _like_parameters(tensor: Tensor, module: nn.Module) -> Tensor:
    """Return a tensor in the dtype of a module's first parameter."""
    parameter = next(module.parameters(), None)
    return tensor if parameter is None else tensor.to(parameter.dtype)


def _check_result(name: str, result: Any, shape: tuple[int, ...], form: str) -> None:
    """Raise a ValueError unless a module returned a tensor of a shape."""
    if not isinstance(result, Tensor) or result.shape != shape:
        raise ValueError(
            f"MoELayer: `{name}` must return a tensor of shape {form} = {shape}, got "
            f"{_result(result)}"
        )


def _result(result: Any) -> str:
    """Return what a module returned as a message has it."""
    if isinstance(result, Tensor):
        return f"shape {tuple(result.shape)}"
    return shown(result) if result is None else type(result).__name__
