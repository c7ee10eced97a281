"""Seeded routing draws, the same on every machine and shared with the peers' measurements.

Rule ("zipf0.6"): the popularity of an expert is proportional to 1 / rank**s with s = 0.6, where the
ranks are a random permutation of the experts; each token draws its top-k experts without
replacement by the Gumbel-top-k trick (the k largest of log popularity + Gumbel noise). "uniform" is
the same with s = 0. NumPy's PCG64 stream gives everything, so the ids depend on nothing else.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SEED_PERM = 1234


def zipf_exponent(kind: str) -> float:
    """Return the exponent s of a routing kind: "uniform" or "zipf<s>"."""
    if kind == "uniform":
        return 0.0
    if kind.startswith("zipf"):
        return float(kind[4:])
    raise ValueError(f"routing: `kind` must be uniform or zipf<exponent>, got {kind!r}")


def expert_log_popularity(
    experts: int, kind: str, seed_perm: int = SEED_PERM
) -> npt.NDArray[np.float64]:
    """Return the log of every expert's popularity: (experts,)."""
    s = zipf_exponent(kind)
    rng = np.random.Generator(np.random.PCG64([seed_perm, experts]))
    rank = rng.permutation(experts).astype(np.float64) + 1.0
    log_p: npt.NDArray[np.float64] = -s * np.log(rank)
    log_p -= np.log(np.exp(log_p).sum())
    return log_p


def make_routing(
    tokens: int,
    experts: int,
    topk: int,
    kind: str = "zipf0.6",
    seed: int = 0,
    seed_perm: int = SEED_PERM,
    device: str | torch.device = "cpu",
) -> tuple[Tensor, Tensor]:
    """Draw the experts of every token.

    Args:
        tokens: Number of tokens.
        experts: Number of experts.
        topk: Experts per token, at most `experts`.
        kind: "uniform" or "zipf<exponent>".
        seed: Fixes the noise of every token.
        seed_perm: Fixes which experts are popular; different seeds share one popularity.
        device: Where the result goes.

    Returns:
        ids (tokens, topk) int32, no expert twice in a row of ids, in order of decreasing noisy
        logit, and weights (tokens, topk) float32, positive, rows sum to 1.
    """
    if not 0 < topk <= experts:
        raise ValueError(f"routing: `topk` must be in 1..{experts}, got {topk}")
    log_p = expert_log_popularity(experts, kind, seed_perm)
    rng = np.random.Generator(np.random.PCG64([seed, tokens, experts, topk]))
    # Exponential races are the Gumbel trick without log(0): -log(E / p) = log p + Gumbel.
    noisy = log_p[None, :] - np.log(rng.standard_exponential((tokens, experts)))
    if topk < experts:
        part = np.argpartition(-noisy, topk - 1, axis=1)[:, :topk]
    else:
        part = np.broadcast_to(np.arange(experts), (tokens, experts)).copy()
    value = np.take_along_axis(noisy, part, axis=1)
    order = np.argsort(-value, axis=1, kind="stable")
    ids = np.take_along_axis(part, order, axis=1)
    value = np.take_along_axis(value, order, axis=1)
    weights = np.exp(value - value[:, :1])
    weights = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    return (
        torch.from_numpy(ids.astype(np.int32)).to(device),
        torch.from_numpy(weights).to(device),
    )


def counts(ids: Tensor, experts: int) -> Tensor:
    """Return the rows of every expert: (experts,) int64 on the CPU."""
    return torch.bincount(ids.reshape(-1).cpu().long(), minlength=experts)
