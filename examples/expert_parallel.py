"""Expert parallelism: two processes with half of the experts each, outputs summed by all_reduce.

python examples/expert_parallel.py

Every rank has all tokens and the router's choices for them. Ids of experts that are elsewhere add
nothing to its output, so the sum over the ranks is the layer. With two GPUs or more the ranks talk
through NCCL, else through gloo on the CPU.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import moe_ext
import torch
import torch.distributed as dist
from moe_ext.nn import Experts

RANKS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 2, 16, 4, 256, 384, 20


def make_layer() -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make weights, hidden states, and routing: the same in every process, by the seed."""
    torch.manual_seed(0)
    weights = {
        "gate_up_proj": (torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / 16).bfloat16(),
        "down_proj": (torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / 20).bfloat16(),
    }
    hidden = torch.randn(TOKENS, HIDDEN).bfloat16()
    topk_weights, topk_ids = moe_ext.topk_routing(torch.randn(TOKENS, EXPERTS), TOP_K)
    return weights, hidden, topk_weights, topk_ids


@torch.inference_mode()
def run_rank(rank: int, store: str, cuda: bool) -> None:
    """Run this rank's half of the experts, and add what the other one has."""
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS
    )
    weights, *call = make_layer()
    call = [tensor.to(device) for tensor in call]
    share = EXPERTS // RANKS
    experts = Experts.from_state_dict(
        weights, first_expert=rank * share, num_local=share, device=device
    )
    # Summed in float32: each rank's output is rounded to BF16 once already.
    out = experts(*call).float()
    dist.all_reduce(out)
    if rank == 0:
        whole = Experts.from_state_dict(weights, device=device)(*call).float()
        error = (out - whole).abs().max() / whole.abs().max()
        print(f"{RANKS} ranks with {share} of {EXPERTS} experts each, on {device.type}")
        print(f"summed against one rank: largest difference {error:.1e} of the largest value")
    dist.destroy_process_group()


def main() -> None:
    """Start a process for each rank."""
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= RANKS
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        torch.multiprocessing.spawn(run_rank, args=(store, cuda), nprocs=RANKS)


if __name__ == "__main__":
    main()
