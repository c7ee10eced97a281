"""A tiny random Qwen3-MoE of Transformers on moe_ext: the switch, generate, torch.compile.

python examples/transformers_model.py

A real model differs in its second line: AutoModelForCausalLM.from_pretrained(name,
dtype=torch.bfloat16, device_map="cuda", experts_implementation="moe_ext").
"""

from __future__ import annotations

import torch
from moe_ext.integrations.transformers import register
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

VOCABULARY = 512


def make_model() -> torch.nn.Module:
    """Make the model, with random weights."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        moe_intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        initializer_range=0.05,  # else experts hardly matter among random weights
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def main() -> None:
    """Compare the implementations."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model().to(device)
    ids = torch.randint(VOCABULARY, (2, 16), device=device)

    model.set_experts_implementation("eager")
    expected = model(ids).logits
    register(model)  # checks and packs the experts, and sets experts_implementation="moe_ext"
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for name, logits in (("moe_ext", model(ids).logits), ("compiled", compiled(ids).logits)):
        error = (logits - expected).float().norm() / expected.float().norm()
        print(f"{name}: logits differ from those of eager by {error:.1%}")

    out = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    print(f"generated: {out[0, ids.shape[1] :].tolist()}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
