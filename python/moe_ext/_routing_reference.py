"""What the routing kernel must compute, in plain PyTorch: defined once, for all."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ext._reference_mode import without_autocast

_FLOAT_MAX = torch.finfo(torch.float32).max
_LEAST_SUM = 1e-20  # keeps the sum of weights from being zero


def _scores(logits: Tensor, scoring: str) -> Tensor:
    if scoring == "softmax":
        return logits.softmax(-1)
    if scoring == "sigmoid":
        return logits.sigmoid()
    if scoring == "sqrt_softplus":
        return (logits.clamp_min(0) + logits.abs().neg().exp().log1p()).sqrt()
    return logits  # "softmax_topk": the softmax comes after the choice


def _group_scores(keys: Tensor, num_groups: int, biased: bool) -> Tensor:
    """Return the largest key of each group, or with a bias the sum of the largest two."""
    size = keys.shape[1] // num_groups
    best = keys.reshape(keys.shape[0], num_groups, size).topk(min(size, 2)).values
    if not biased or size == 1:
        return best[..., 0]
    # A group with one expert that counts is still better than a group with none.
    return best[..., 0] + best[..., 1].clamp_min(-_FLOAT_MAX)


def _best_first(keys: Tensor) -> Tensor:
    return keys.sort(dim=-1, descending=True, stable=True).indices


@without_autocast
def topk_routing_reference(
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
    """Choose and weigh experts as `moe_ext.topk_routing` does, on the device of `logits`.

    Args:
        logits: (num_tokens, num_experts), any floating dtype, any strides.
        top_k: experts of a token.
        scoring: "softmax", "softmax_topk", "sigmoid" or "sqrt_softplus".
        correction_bias: (num_experts,), any floating dtype, or None.
        renormalize: divide the weights by their sum.
        num_groups: groups of neighbouring experts.
        topk_groups: groups that experts are chosen from.
        scale: multiplies the weights.

    Returns:
        `weights`, float32, and `ids`, int32, both (num_tokens, top_k).
    """
    # NaN is -infinity, infinity the largest float; adding zero makes -0 and 0 the same.
    logits = logits.float().nan_to_num(nan=-torch.inf, posinf=_FLOAT_MAX, neginf=-torch.inf) + 0.0
    scores = _scores(logits, scoring)
    keys = logits
    if correction_bias is not None:
        keys = scores + correction_bias.float() + 0.0
        keys = keys.masked_fill((logits == -torch.inf) | keys.isnan(), -torch.inf)
    order = _best_first(keys)
    if topk_groups < num_groups:
        groups = _best_first(_group_scores(keys, num_groups, correction_bias is not None))
        size = keys.shape[1] // num_groups
        kept = torch.zeros_like(groups).scatter(1, groups[:, :topk_groups], 1)
        # Experts of kept groups first, each part in the order that it has.
        order = order.gather(1, _best_first(kept.gather(1, order // size)))
    ids = order[:, :top_k]
    counts = keys.gather(1, ids) > -torch.inf
    if scoring == "softmax_topk":
        chosen = logits.gather(1, ids)
        weights = torch.where(counts, chosen, -torch.inf).softmax(-1)
    else:
        weights = scores.gather(1, ids)
    weights = torch.where(counts, weights, 0.0)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
    return weights * scale, ids.int()
