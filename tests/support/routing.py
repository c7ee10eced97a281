"""Logits for `topk_routing`, a second formulation of it, and its result held against that."""

from __future__ import annotations

import math

import moe_ext
import torch
from moe_ext.reference import topk_routing_reference
from torch import Tensor

SCORINGS = ("softmax", "softmax_topk", "sigmoid", "sqrt_softplus")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Around each number of logits that a lane of the kernel may hold, and those of models.
EXPERTS = (
    *(1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 65, 127, 128, 129, 160, 255, 256, 257),
    *(384, 512, 513, 768, 1024, 1025, 2047, 2048),
)
FLOAT_MAX = torch.finfo(torch.float32).max
INFINITY = float("inf")
NAN = float("nan")
UNWRITTEN_ID = -7
# Scores closer than this may change places by rounding, which differs from device to device.
CLOSE = 1e-6


def normal_logits(
    num_tokens: int, num_experts: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Tensor:
    """Normal ones; few of bfloat16 are equal in a row of 64, many in one of 2048."""
    generator = torch.Generator().manual_seed(num_experts)
    return (2 * torch.randn(num_tokens, num_experts, generator=generator)).to(dtype).to(device)


def some_bias(num_experts: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Of the size of scores, so that it changes the choice but does not make it."""
    generator = torch.Generator().manual_seed(7)
    return (0.3 * torch.randn(num_experts, generator=generator)).to(dtype).to(device)


def among_winners(x: Tensor) -> Tensor:
    """A copy of `x` as a view of a larger tensor whose other values would all be chosen."""
    num_tokens, num_experts = x.shape
    pitch = -(-num_experts // 8) * 8 + 8  # rows at multiples of 16 bytes
    around = torch.full((num_tokens + 2, pitch), 60000.0, dtype=x.dtype, device=x.device)
    view = around[1:-1, :num_experts]
    view.copy_(x)
    return view


def plain_score(logit: float, scoring: str, row: list[float]) -> float:
    if scoring == "softmax":
        return 1 / sum(math.exp(min(other - logit, 700)) for other in row)
    if scoring == "sigmoid":
        return 1 / (1 + math.exp(-logit))
    if scoring == "sqrt_softplus":
        return math.sqrt(math.log1p(math.exp(logit)))
    return logit


def plain_routing(
    row: list[float],
    top_k: int,
    *,
    scoring: str = "softmax",
    bias: list[float] | None = None,
    renormalize: bool = True,
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
) -> tuple[list[float], list[int]]:
    """One token of moderate logits, in Python's own float64."""
    scores = [plain_score(logit, scoring, row) for logit in row]
    keys = scores if bias is None else [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(row) // num_groups
    count = 1 if bias is None else 2
    goodness = [
        sum(sorted(keys[group * size : (group + 1) * size], reverse=True)[:count])
        for group in range(num_groups)
    ]
    kept = sorted(range(num_groups), key=lambda group: -goodness[group])[:topk_groups]
    eligible = [expert for expert in range(len(row)) if expert // size in kept]
    ids = sorted(eligible, key=lambda expert: -keys[expert])[:top_k]
    weights = [scores[expert] for expert in ids]
    if scoring == "softmax_topk":
        weights = [math.exp(weight - max(weights)) for weight in weights]
        weights = [weight / sum(weights) for weight in weights]
    elif renormalize:
        weights = [weight / (sum(weights) + 1e-20) for weight in weights]
    return [weight * scale for weight in weights], ids


def clear_rows(logits: Tensor, top_k: int, options: dict) -> Tensor:
    """Rows whose choice no rounding can change: what is compared is equal, or far enough apart."""
    bias, scoring = options.get("correction_bias"), options.get("scoring", "softmax")
    if bias is None:  # logits are compared, which nothing rounds
        return torch.ones(logits.shape[0], dtype=torch.bool)
    x = logits.double().nan_to_num(nan=-INFINITY, posinf=FLOAT_MAX, neginf=-INFINITY)
    scores = {
        "softmax": lambda: x.softmax(-1),
        "softmax_topk": lambda: x,
        "sigmoid": lambda: x.sigmoid(),
        "sqrt_softplus": lambda: torch.nn.functional.softplus(x, threshold=700).sqrt(),
    }[scoring]()
    keys = (scores + bias.double()).masked_fill(x == -INFINITY, -INFINITY)
    num_groups, topk_groups = options.get("num_groups", 1), options.get("topk_groups", 1)
    if topk_groups == num_groups:
        return _far_apart(keys, top_k + 1)
    groups = keys.unflatten(1, (num_groups, keys.shape[1] // num_groups))
    sums = groups.topk(min(2, groups.shape[2])).values.sum(-1)
    kept = torch.zeros_like(sums).scatter(1, sums.topk(topk_groups).indices, 1).bool()
    eligible = groups.masked_fill(~kept[..., None], -INFINITY).flatten(1)
    return _far_apart(sums, topk_groups + 1) & _far_apart(eligible, top_k + 1)


def _far_apart(keys: Tensor, count: int) -> Tensor:
    best = keys.sort(-1, descending=True).values[:, :count]
    gaps = (best[:, :-1] - best[:, 1:]).nan_to_num(nan=0.0, posinf=INFINITY)
    close = (gaps > 0) & (gaps < CLOSE * best[:, 1:].abs().clamp_min(1))
    return ~close.any(-1)


def assert_routing(
    logits: Tensor, weights: Tensor, ids: Tensor, top_k: int, **options: object
) -> None:
    """Hold a result against the reference on the CPU: ids exactly where the choice is clear."""
    logits = logits.cpu()
    options = {
        name: value.cpu() if isinstance(value, Tensor) else value for name, value in options.items()
    }
    weights, ids = weights.cpu(), ids.cpu()
    expected_weights, expected_ids = topk_routing_reference(logits, top_k, **options)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert weights.shape == ids.shape == (logits.shape[0], top_k)
    assert bool(((ids >= 0) & (ids < logits.shape[1])).all())
    ordered = ids.sort(-1).values
    assert bool((ordered.diff() > 0).all()), "an expert twice"
    same = (ids == expected_ids).all(-1)
    clear = clear_rows(logits, top_k, options)
    assert clear.sum() * 2 >= clear.numel(), "a test of hardly any row"
    wrong = (clear & ~same).nonzero().flatten().tolist()
    assert not wrong, (wrong, ids[wrong[0]], expected_ids[wrong[0]])
    torch.testing.assert_close(weights[same], expected_weights[same], rtol=2e-6, atol=1e-12)
    assert bool(weights.isfinite().all())


def check(logits: Tensor, top_k: int, **options: object) -> None:
    """Route into the middle of poison and hold the result against the reference."""
    num_tokens = logits.shape[0]
    pitch = top_k + 3
    weights = torch.full((num_tokens, pitch), NAN, device=logits.device)
    ids = torch.full((num_tokens, pitch), UNWRITTEN_ID, dtype=torch.int32, device=logits.device)
    moe_ext.topk_routing_out(
        logits, top_k, weights=weights[:, :top_k], ids=ids[:, :top_k], **options
    )
    assert bool(weights[:, top_k:].isnan().all())
    assert bool((ids[:, top_k:] == UNWRITTEN_ID).all())
    assert_routing(logits, weights[:, :top_k], ids[:, :top_k], top_k, **options)
