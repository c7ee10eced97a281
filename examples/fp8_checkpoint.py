"""A layer of an FP8 checkpoint: each expert's tensors by name in a file, read into `Experts`.

python examples/fp8_checkpoint.py

Names, dtypes and scales are those of DeepSeek-V3 and Qwen3 in FP8: `weight` in float8_e4m3fn, and
`weight_scale_inv`, one factor for 128 x 128 values. A real checkpoint differs in its path.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import moe_ext
import torch
from moe_ext.nn import Experts
from safetensors import safe_open
from safetensors.torch import save_file

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 8, 2, 256, 384, 20
PREFIX = "model.layers.3.mlp.experts"
SHAPES = {
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
}


def write_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Write the layer in FP8, and return its weights before they were quantised."""
    exact, stored = {}, {}
    for expert in range(EXPERTS):
        for name, shape in SHAPES.items():
            weight = (torch.randn(shape) / shape[1] ** 0.5).bfloat16()
            exact[f"{PREFIX}.{expert}.{name}.weight"] = weight
            values, scales = moe_ext.quantize_fp8(weight, "128x128")
            stored[f"{PREFIX}.{expert}.{name}.weight"] = values
            stored[f"{PREFIX}.{expert}.{name}.weight_scale_inv"] = scales
    save_file(stored, path)
    return exact


def main() -> None:
    """Write the file, read it, and compare the layer with the one before quantisation."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model-00001-of-00001.safetensors")
        exact = write_checkpoint(path)
        with safe_open(path, framework="pt") as file:
            layer = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    print(f"{len(layer)} tensors of {EXPERTS} experts in the file")

    # `consume` lets go of each tensor once it is packed.
    experts = Experts.from_state_dict(layer, prefix=PREFIX, device=device, consume=True)
    print(experts)

    hidden = torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
    weights, ids = moe_ext.topk_routing(torch.randn(TOKENS, EXPERTS, device=device), TOP_K)
    out = experts(hidden, weights, ids)
    wanted = Experts.from_state_dict(exact, prefix=PREFIX, device=device)(hidden, weights, ids)
    error = (out - wanted).float().norm() / wanted.float().norm()
    print(f"FP8 against the weights before quantisation: relative error {error:.1%}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
