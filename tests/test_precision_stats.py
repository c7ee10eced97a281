"""Statistics as files: what is saved comes back, and what does not fit is named."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from moe_ext.precision import PrecisionStats, calibrate, plan_precision, realistic_layer
from moe_ext.precision.stats import _NUMBERS, _SHAPES
from support.precision import layer_stats

pytest.importorskip("safetensors")
from safetensors import safe_open
from safetensors.torch import save_file


def statistics():
    layer = realistic_layer(8, 64, 32, top_k=2, super_experts=1)
    one = calibrate(layer.experts(), [tuple(layer.tokens(100))]).layers["experts"]
    other = layer_stats([(1.0, 2.0)], model_signal=2.0, model_noise=0.5)
    return PrecisionStats({"model.layers.1.experts": one, "model.layers.0.experts": other})


def test_files_hold_everything(tmp_path):
    stats = statistics()
    stats.save(tmp_path / "stats.safetensors")
    again = PrecisionStats.load(tmp_path / "stats.safetensors")
    assert list(again.layers) == list(stats.layers)
    for name, own in stats.layers.items():
        for number in _NUMBERS:
            assert getattr(again.layers[name], number) == getattr(own, number), number
        for part in _SHAPES:
            assert torch.equal(getattr(again.layers[name], part), getattr(own, part)), part
    plans = [plan_precision(each, byte_budget=0.5) for each in (stats, again)]
    assert plans[0] == plans[1]


def test_a_file_appears_when_it_is_complete(tmp_path, monkeypatch):
    path = tmp_path / "stats.safetensors"
    statistics().save(path)
    before = path.read_bytes()

    def fail(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError("no space")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="no space"):
        statistics().save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["stats.safetensors"]
    assert path.read_bytes() == before


def changed(path, **changes):
    """Write the file again with parts of its header, or tensors, changed."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["moe_ext"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, value in changes.items():
        if isinstance(value, torch.Tensor):
            tensors[f"0.{name}"] = value
        else:
            header[name] = value
    save_file(tensors, path, metadata={"moe_ext": json.dumps(header)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"format": "x"},
            'PrecisionStats.load: `format` must be "moe_ext.precision_stats", got "x"',
        ),
        (
            {"version": 7},
            "PrecisionStats.load: `version` must be an int from 1 to 1, which this moe_ext reads, "
            "got 7",
        ),
        (
            {"error": torch.zeros(8)},
            'PrecisionStats.load: `layers["model.layers.1.experts"].error` must be float64 of '
            "shape (8, 2), got float32 of shape (8,)",
        ),
        (
            {"layers": {"a": {}, "b": {}}},
            f'PrecisionStats.load: `layers["a"]` must have {", ".join(_NUMBERS)}, got nothing',
        ),
    ],
)
def test_what_is_wrong_in_a_file(tmp_path, changes, message):
    path = tmp_path / "stats.safetensors"
    statistics().save(path)
    changed(path, **changes)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        PrecisionStats.load(path)
    assert str(error.value) == message


def test_a_file_of_others_is_refused(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"w": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"`format` must be .*, got None"):
        PrecisionStats.load(path)


def test_without_safetensors_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ModuleNotFoundError) as error:
        statistics().save(tmp_path / "x")
    assert str(error.value) == (
        "PrecisionStats.save: the package `safetensors` must be installed for files of tensors: "
        'pip install "moe-ext[precision]"'
    )
