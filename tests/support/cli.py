"""A small model on disk, and commands run in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from moe_ext.cli import main
from moe_ext.precision import RealisticLayer, realistic_layer
from safetensors.torch import save_file

from support.nn import per_expert

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 16, 4, 128, 64, 256
NUMBERS = (0, 1)
CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "num_experts_per_tok": TOP_K,
}


def prefix_of(number: int) -> str:
    """The experts of a layer, as plans name it."""
    return f"model.layers.{number}.mlp.experts"


def write_model(directory: Path) -> dict[int, RealisticLayer]:
    """Write a checkpoint `model` and hidden states `data.safetensors` to a folder."""
    model = directory / "model"
    model.mkdir()
    layers, tensors, data = {}, {}, {}
    for number in NUMBERS:
        layer = realistic_layer(
            EXPERTS, HIDDEN, INTERMEDIATE, top_k=TOP_K, super_experts=1, seed=number
        )
        layers[number] = layer
        tensors |= per_expert({"w13": layer.w13, "w2": layer.w2}, f"{prefix_of(number)}.")
        router = torch.randn(EXPERTS, HIDDEN) / 32
        tensors[f"model.layers.{number}.mlp.gate.weight"] = router.bfloat16()
        data[f"layers.{number}.hidden_states"] = layer.tokens(TOKENS, number).hidden_states
    save_file(tensors, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps(CONFIG))
    save_file(data, directory / "data.safetensors")
    return layers


class Shell:
    """Commands with their output, in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object, code: int = 0) -> str:
        """Run one that ends with a code; return what it printed: on stderr where it failed."""
        self._capsys.readouterr()
        found = main([str(argument) for argument in arguments])
        out, err = self._capsys.readouterr()
        assert found == code, (out, err)
        if code == 0:
            assert err == ""
            return out
        return err

    def fails(self, *arguments: object, code: int = 1) -> str:
        """Run one that fails; return the one line of it."""
        err = self(*arguments, code=code)
        assert err.endswith("\n")
        assert err.count("\n") == 1, err
        return err[:-1]
