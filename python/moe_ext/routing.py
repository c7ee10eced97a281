"""The op `moe_ext::topk_routing`: contract, schema, CPU and CUDA implementation, fake."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ext._autograd import autograd_kernel
from moe_ext._call import call
from moe_ext._routing_checks import check_topk_routing
from moe_ext._routing_run import empty_outputs, run_topk_routing, run_topk_routing_out
from moe_ext._words import check_given

_OPTIONS = (
    "str scoring='softmax', Tensor? correction_bias=None, bool renormalize=True, "
    "int num_groups=1, int topk_groups=1, float scale=1.0"
)
_LIBRARY = torch.library.Library("moe_ext", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_LIBRARY.define(
    f"topk_routing(Tensor logits, int top_k, *, {_OPTIONS}) -> (Tensor weights, Tensor ids)",
    tags=_TAGS,
)
_LIBRARY.define(
    f"topk_routing_out(Tensor logits, int top_k, *, {_OPTIONS}, Tensor(a!) weights, "
    "Tensor(b!) ids) -> ()",
    tags=_TAGS,
)
_TOPK_ROUTING = torch.ops.moe_ext.topk_routing.default
_TOPK_ROUTING_OUT = torch.ops.moe_ext.topk_routing_out.default


def topk_routing(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    correction_bias: Tensor | None = None,
    renormalize: bool = True,
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose the `top_k` best experts of each token and weigh them, from router logits.

    scores = scoring(logits), ids = the largest of scores + bias;
    weights = scores[ids] / sum * scale

    Args:
        logits: (num_tokens, num_experts), bfloat16, float16 or float32, experts contiguous, rows
            any stride apart; CUDA, or CPU for the slow reference. 1 to 2048 experts, any number of
            tokens. Computed in float32.
        top_k: experts of a token: 1 to 32, no more than there are in `topk_groups` groups.
        scoring: "softmax": over all experts, then the choice; "softmax_topk": the choice by logits,
            then a softmax over the chosen; "sigmoid"; "sqrt_softplus": sqrt(log(1 + exp(logit))).
        correction_bias: (num_experts,), float32 or bfloat16, any stride, same device: added to the
            scores (with "softmax_topk" to the logits) for the choice alone; weights are without it.
        renormalize: divide the weights of a token by their sum, plus 1e-20. No effect with
            "softmax_topk", whose sum is 1.
        num_groups: experts form so many groups of neighbours, of equal size: 1 to 32.
        topk_groups: so many groups are kept, and experts chosen among theirs. A group is as good as
            its best expert or, with a bias, as the sum of its best two, bias included.
        scale: multiplies the weights, last; finite in float32.

    Returns:
        `weights`, float32, and `ids`, int32, both (num_tokens, top_k), contiguous, the best expert
        first. Among equals the lowest id comes first. Without a bias the order is that of the
        logits, which tells experts apart whose scores round to the same number.

    Raises:
        ValueError: an argument differs from the above; the message has what was expected and what
            came.
        RuntimeError: the CUDA library cannot run here.

    Notes:
        A token's ids are distinct whatever the logits hold, and no weight is NaN. A logit of NaN or
        -infinity takes its expert out, bias or not (so -infinity masks an expert), as does a bias
        of NaN or -infinity: such experts come after all others of the kept groups, by id, and weigh
        0; a row of NaN gives ids 0 .. top_k - 1 with weights 0. An infinite logit counts as the
        largest float32. Groups that are equally good are kept from the lowest on.
        Deterministic; a token's result does not depend on other tokens. CPU and CUDA agree on ids
        where no bias is given, and otherwise unless scores are within rounding of each other. Does
        not synchronise on CUDA; safe in CUDA graphs. Inputs that require grad are accepted,
        backward raises: inference only.

    Example:
        >>> weights, ids = topk_routing(torch.tensor([[0.0, 2.0, 1.0, -1.0]]), 2)
        >>> ids.tolist(), weights.sum().item()
        ([[1, 2]], 1.0)
    """
    check_given("topk_routing", "logits", logits)
    weights, ids = call(
        _TOPK_ROUTING,
        (logits, top_k),
        {
            "scoring": scoring,
            "correction_bias": correction_bias,
            "renormalize": renormalize,
            "num_groups": num_groups,
            "topk_groups": topk_groups,
            "scale": scale,
        },
    )
    return weights, ids


def topk_routing_out(
    logits: Tensor,
    top_k: int,
    *,
    weights: Tensor,
    ids: Tensor,
    scoring: str = "softmax",
    correction_bias: Tensor | None = None,
    renormalize: bool = True,
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
) -> None:
    """Choose and weigh experts as `topk_routing`, into tensors of the caller.

    Args:
        logits: as in `topk_routing`, like all arguments but the two below.
        top_k: see `topk_routing`.
        weights: (num_tokens, top_k), float32, contiguous along top_k, rows at least top_k apart,
            same device. Must overlap neither `ids` nor an input (not checked).
        ids: the same in int32.
        scoring: see `topk_routing`.
        correction_bias: see `topk_routing`.
        renormalize: see `topk_routing`.
        num_groups: see `topk_routing`.
        topk_groups: see `topk_routing`.
        scale: see `topk_routing`.

    Raises:
        ValueError: an argument differs from the above.
        RuntimeError: the CUDA library cannot run here.

    Notes:
        What lies between rows keeps what it held. Otherwise as `topk_routing`.
    """
    check_given("topk_routing_out", "logits", logits)
    call(
        _TOPK_ROUTING_OUT,
        (logits, top_k),
        {
            "scoring": scoring,
            "correction_bias": correction_bias,
            "renormalize": renormalize,
            "num_groups": num_groups,
            "topk_groups": topk_groups,
            "scale": scale,
            "weights": weights,
            "ids": ids,
        },
    )


def _topk_routing_fake(logits: Tensor, top_k: int, **options: Any) -> tuple[Tensor, Tensor]:
    check_topk_routing("topk_routing", None, logits, top_k, **options)
    return empty_outputs(logits, top_k)


def _topk_routing_out_fake(
    logits: Tensor, top_k: int, *, weights: Tensor, ids: Tensor, **options: Any
) -> None:
    check_topk_routing("topk_routing_out", (weights, ids), logits, top_k, **options)


for _name, _op, _implementation, _fake, _outputs in (
    ("topk_routing", _TOPK_ROUTING, run_topk_routing, _topk_routing_fake, ()),
    (
        "topk_routing_out",
        _TOPK_ROUTING_OUT,
        run_topk_routing_out,
        _topk_routing_out_fake,
        ("weights", "ids"),
    ),
):
    _LIBRARY.impl(_name, _implementation, "CPU")
    _LIBRARY.impl(_name, _implementation, "CUDA")
    _LIBRARY.impl(
        _name, autograd_kernel(_op, _implementation, _outputs), "Autograd", with_keyset=True
    )
    torch.library.register_fake(f"moe_ext::{_name}", _fake, lib=_LIBRARY)
