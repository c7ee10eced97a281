"""Statistics as files: what is saved comes back, and what does not fit is named."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from moe_ext.precision import PrecisionStats, calibrate, plan_precision, realistic_layer
from moe_ext.precision.stats import NUMBERS, SHAPES
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
        for number in NUMBERS:
            assert getattr(again.layers[name], number) == getattr(own, number), number
        for part in SHAPES:
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
            f'PrecisionStats.load: `layers["a"]` must have {", ".join(NUMBERS)}, got nothing',
        ),
        (
            {"layers": {}},
            "PrecisionStats.load: `layers` must be an object with statistics of layers, got an "
            "empty one",
        ),
        (
            {"layers": [1]},
            "PrecisionStats.load: `layers` must be an object with statistics of layers, got [1]",
        ),
        (
            {"layers": {"a": 3}},
            f'PrecisionStats.load: `layers["a"]` must have {", ".join(NUMBERS)}, got 3',
        ),
        (
            {"worst": torch.full((8, 2), -1.0, dtype=torch.float64)},
            'PrecisionStats.load: `layers["model.layers.1.experts"].worst` must be finite and not '
            "negative, got -1.0 at (0, 0)",
        ),
        (
            {"error": torch.full((8, 2), float("nan"), dtype=torch.float64)},
            'PrecisionStats.load: `layers["model.layers.1.experts"].error` must be finite and not '
            "negative, got nan at (0, 0)",
        ),
        (
            {"more": torch.zeros(1)},
            "PrecisionStats.load: the file must hold nothing else, got ['0.more']",
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


NUMBERS_THAT_ARE_NONE = {
    "hidden_size": (0, "an int of at least 1, got 0"),
    "num_tokens": (2.5, "an int of at least 0, got 2.5"),
    "min_rows": (True, "an int of at least 1, got True"),
    "gated": (1, "True or False, got 1"),
    "down_scales": ("row", 'one of "block", "channel", "tensor", got "row"'),
    "signal": (None, "a finite number, not negative, got None"),
    "fp8_noise": (float("nan"), "a finite number, not negative, got nan"),
    "model_noise": (-1, "a finite number, not negative, got -1"),
}


@pytest.mark.parametrize("name", NUMBERS_THAT_ARE_NONE)
def test_numbers_that_are_none(tmp_path, name):
    value, said = NUMBERS_THAT_ARE_NONE[name]
    path = tmp_path / "stats.safetensors"
    statistics().save(path)
    with safe_open(path, framework="pt") as file:
        layers = json.loads(file.metadata()["moe_ext"])["layers"]
    layers["model.layers.0.experts"][name] = value
    changed(path, layers=layers)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        PrecisionStats.load(path)
    assert str(error.value) == (
        f'PrecisionStats.load: `layers["model.layers.0.experts"].{name}` must be {said}'
    )


@pytest.mark.parametrize("damage", [lambda d: b"", lambda d: d[:-9], lambda d: b"PK" + d[2:]])
def test_damaged_files_are_refused_in_a_line(tmp_path, damage):
    path = tmp_path / "stats.safetensors"
    statistics().save(path)
    path.write_bytes(damage(path.read_bytes()))
    message = (
        r"^PrecisionStats.load: .* must be a whole safetensors file, got .* truncated, damaged"
    )
    with pytest.raises(ValueError, match=message):
        PrecisionStats.load(path)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="No such file"):
        PrecisionStats.load(tmp_path / "stats.safetensors")


def test_without_safetensors_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ModuleNotFoundError) as error:
        statistics().save(tmp_path / "x")
    assert str(error.value) == (
        "PrecisionStats.save: the package `safetensors` must be installed for files of tensors: "
        'pip install "moe-ext[precision]"'
    )
