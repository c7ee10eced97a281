"""Times of a whole model: until the first token of a prompt, and of a decode step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

CACHE, POSITION = 1024, 512
"""Tokens that the static cache of a decode step has room for, and that it holds."""


@dataclass(frozen=True)
class CallTime:
    """Milliseconds of a call, median over samples, by the wall clock."""

    ms: float
    num_samples: int


class TooSlow(RuntimeError):
    """The first call took longer than a call may."""


@torch.no_grad()
def time_to_first_token(
    model: Any, batch: int, prompt_tokens: int, samples: int, max_seconds: float
) -> CallTime:
    """Time a prompt of random ids, from the call to the chosen token, with a new dynamic cache."""
    device = model.device
    vocabulary = model.config.vocab_size
    ids = torch.randint(vocabulary, (batch, prompt_tokens), device=device)

    def call() -> Tensor:
        logits: Tensor = model(input_ids=ids, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1)

    return _timed(call, device, samples, max_seconds)


@torch.no_grad()
def time_decode(
    model: Any, batch: int, captured: bool, samples: int, max_seconds: float
) -> CallTime:
    """Time a step of one token for each of a batch, replayed as a CUDA graph where captured."""
    device = model.device
    cache = _filled_cache(model, batch)
    ids = torch.randint(model.config.vocab_size, (batch, 1), device=device)

    def step() -> Tensor:
        logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        return ids.copy_(logits[:, -1:].argmax(-1))

    if not captured:
        return _timed(step, device, samples, max_seconds)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # nothing may be loaded for the first time under capture
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return _timed(graph.replay, device, samples, max_seconds)


def _filled_cache(model: Any, batch: int) -> StaticCache:
    """Make a cache with random keys and values, as a prompt of `POSITION` tokens would leave it."""
    config = model.config
    cache = StaticCache(config=config, max_cache_len=CACHE)
    cache.early_initialization(
        batch_size=batch,
        num_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=model.dtype,
        device=model.device,
    )
    for layer in cache.layers:
        layer.keys[:, :, :POSITION].normal_()
        layer.values[:, :, :POSITION].normal_()
        layer.cumulative_length.fill_(POSITION)
    return cache


def _timed(
    call: Callable[[], object], device: torch.device, samples: int, max_seconds: float
) -> CallTime:
    """Call once to warm up, then time each of the samples from an idle device to an idle device."""
    first = _seconds(call, device)
    if first > max_seconds:
        # The first call of all loads and compiles; what the second takes is what counts.
        first = _seconds(call, device)
        if first > max_seconds:
            raise TooSlow(f"a call took {first:.1f} s, over {max_seconds:g} s")
    times = [_seconds(call, device) for _ in range(samples)]
    return CallTime(statistics.median(times) * 1e3, samples)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    begin = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
