"""A layer in a CUDA graph: captured once, replayed with other tokens and another routing.

python examples/cuda_graph.py

A graph fixes sizes and addresses, not values: which experts the tokens go to is on the device, and
may change with every replay. Without a GPU the same step runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable

import moe_ext
import torch
from moe_ext.nn import Experts

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 16, 4, 256, 384, 8


def capture(step: Callable[[], None]) -> Callable[[], None]:
    """Return what replays `step`."""
    step()  # the first call loads the library and the code of its kernels, outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def main() -> None:
    """Capture the layer, and replay it with what it has not seen."""
    torch.manual_seed(0)
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    weights = {
        "gate_up_proj": torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, device=device) / 16,
        "down_proj": torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, device=device) / 20,
    }
    experts = Experts.from_state_dict(weights)
    # What the graph reads and writes: new values are copied to where these lie.
    hidden = torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
    logits = torch.randn(TOKENS, EXPERTS, device=device)
    out = torch.empty_like(hidden)
    size = experts.workspace_size(TOKENS, TOP_K)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)

    def step() -> None:
        topk_weights, topk_ids = moe_ext.topk_routing(logits, TOP_K)
        experts(hidden, topk_weights, topk_ids, out=out, workspace=workspace)

    if cuda:
        replay = capture(step)
        print("captured: routing and experts are one graph")
    else:
        replay = step
        print("a CUDA graph needs a GPU, got none: the step runs eagerly, on the CPU reference")

    for number in range(3):
        hidden.copy_(torch.randn(TOKENS, HIDDEN))
        logits.copy_(torch.randn(TOKENS, EXPERTS))
        replay()
        topk_weights, topk_ids = moe_ext.topk_routing(logits, TOP_K)
        eager = experts(hidden, topk_weights, topk_ids)
        used = topk_ids.unique().numel()
        same = torch.equal(out, eager)
        print(f"replay {number}: {used} of {EXPERTS} experts hit, equal to an eager call: {same}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
