"""A Qwen2-MoE layer of `nn.Module`s: packed, in BF16 and FP8, cut for two ranks, compiled.

python examples/moe_module.py
"""

from __future__ import annotations

import torch
from moe_ext.nn import Experts, MoELayer
from torch import nn

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 16, 4, 256, 384


class MLP(nn.Module):
    """One expert, as models hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def main() -> None:
    """Make the layer, and compare its forms."""
    torch.manual_seed(0)
    mlps = nn.ModuleList(MLP() for _ in range(EXPERTS)).bfloat16()
    router = nn.Linear(HIDDEN, EXPERTS, bias=False)  # float32, and so are its logits
    shared, gate = MLP().bfloat16(), nn.Linear(HIDDEN, 1, bias=False).bfloat16()
    hidden = torch.randn(2, 10, HIDDEN).bfloat16()  # batch, sequence, hidden

    def layer(experts: Experts, with_shared: bool = True) -> MoELayer:
        beside = {"shared_expert": shared, "shared_expert_gate": gate} if with_shared else {}
        return MoELayer(router, experts, top_k=TOP_K, **beside)

    whole = layer(Experts.from_linears(mlps))
    print(whole)
    out = whole(hidden)
    fp8 = layer(Experts.from_linears(mlps, quantize="block"))(hidden)
    ranks = [
        layer(Experts.from_linears(mlps, first_expert=8 * rank, num_local=8), rank == 0)
        for rank in (0, 1)
    ]
    summed = sum(rank(hidden).float() for rank in ranks)  # an all-reduce does that
    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")(hidden)
    for name, other in (("FP8", fp8), ("two ranks", summed), ("compiled", compiled)):
        error = (other.float() - out.float()).abs().max() / out.float().abs().max()
        print(f"{name}: largest difference {error:.1e} of the largest value")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
