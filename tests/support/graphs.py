"""CUDA graphs for the tests: capture, and many replays back to back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

REPLAYS = 1000


def captured(function: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Run `function` on a side stream, then capture it into a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def assert_every_replay_is_right(
    graph: torch.cuda.CUDAGraph,
    argument: Tensor,
    draws: Sequence[tuple[Tensor, Tensor]],
    outs: Sequence[Tensor],
) -> None:
    """Replay `graph` back to back, with the draws in turn; nothing waits before the last replay.

    Each draw is a value of `argument` and the bfloat16 result that all of `outs` must then have,
    bit for bit; where nothing is written that is NaN, as `fill_` writes it.
    """
    wrong = torch.zeros((), dtype=torch.int64, device=argument.device)
    for replay in range(REPLAYS):
        value, expected = draws[replay % len(draws)]
        argument.copy_(value)
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for out in outs:
            wrong += (out.view(torch.int16) != expected.view(torch.int16)).sum()
    assert int(wrong) == 0, f"{int(wrong)} wrong values in {REPLAYS} replays"
