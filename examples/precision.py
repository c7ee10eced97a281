"""Which experts must not be in FP8: calibrate a layer, plan under a budget, run the mixture.

python examples/precision.py
"""

from __future__ import annotations

import moe_ext
import torch
from moe_ext.precision import ExpertBank, PrecisionPlan, realistic_layer

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 64, 4, 256, 128


def main() -> None:
    """Plan a layer with two super experts, and compare."""
    layer = realistic_layer(EXPERTS, HIDDEN, INTERMEDIATE, top_k=TOP_K, super_experts=2, seed=1)
    experts = layer.experts()  # moe_ext.nn.Experts in BF16, as those of a checkpoint
    stats = moe_ext.calibrate(experts, [tuple(layer.tokens(2048))])
    planned = moe_ext.plan_precision(stats, byte_budget=0.04)
    print(f"super experts {layer.super_experts}; in BF16, by error removed per byte:")
    for choice in planned.choices:
        print(f"  expert {choice.expert} {choice.stage}: {choice.removed:.2%} of FP8's error")
    print(f"{planned.extra_bytes / planned.fp8_bytes:.2%} more bytes than FP8")

    plan = PrecisionPlan.from_json(planned.plan.to_json())  # or save, edit, load
    tokens = layer.tokens(1024, seed=1)  # others than those that were calibrated on
    exact = experts(*tokens).float()
    for name, own in (
        ("FP8", PrecisionPlan.uniform({"experts": EXPERTS})),
        (
            "down stages in BF16",
            PrecisionPlan.uniform({"experts": EXPERTS}).with_bf16(stages="down"),
        ),
        ("the plan", plan),
    ):
        bank = ExpertBank.from_experts(own.layer("experts"), bf16=experts)
        error = (bank(*tokens).float() - exact).norm() / exact.norm()
        print(f"{name}: {bank.num_bytes / 2**20:.2f} MiB, {error:.2%} away from BF16")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
