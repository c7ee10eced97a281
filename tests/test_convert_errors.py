"""What `convert_checkpoint` refuses, and what a failure half-way leaves: nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import moe_ext
import pytest
import torch
from moe_ext.precision import ExpertBank, PrecisionPlan, convert_checkpoint

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file
from support.checkpoints import SIZES, plan_of, write_checkpoint

INDEX = "model.safetensors.index.json"
LAYER = "model.layers.1.mlp.experts"
UNIFORM = PrecisionPlan.uniform({LAYER: SIZES.num_experts})


def convert(tmp_path, plan=UNIFORM, **options):
    return convert_checkpoint(tmp_path / "in", plan, tmp_path / "out", **options)


def expect(message, tmp_path, plan=UNIFORM, kind=ValueError, **options):
    with pytest.raises(kind) as error:
        convert(tmp_path, plan, **options)
    assert str(error.value) == message.replace("TMP", str(tmp_path))
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.incomplete").exists()


def change(tmp_path, edit):
    """Write the only file of a checkpoint again, changed."""
    path = tmp_path / "in/model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_a_plan_with_a_layer_that_is_not_there(tmp_path):
    write_checkpoint(tmp_path / "in")
    expect(
        "convert_checkpoint: the plan must name layers of experts that the checkpoint has "
        '("model.layers.1.mlp.experts", "model.layers.2.mlp.experts", '
        '"model.layers.10.mlp.experts"), got "model.layers.3.mlp.experts"',
        tmp_path,
        PrecisionPlan.uniform({"model.layers.3.mlp.experts": 6}),
    )


@pytest.mark.parametrize("form", ["qwen3", "packed"])
def test_a_plan_with_another_number_of_experts(tmp_path, form):
    write_checkpoint(tmp_path / "in", form)
    expect(
        f'convert_checkpoint: the plan must have 6 experts in "{LAYER}", as the checkpoint, got 8',
        tmp_path,
        PrecisionPlan.uniform({LAYER: 8}),
    )


def test_a_missing_matrix(tmp_path):
    write_checkpoint(tmp_path / "in", files=1)
    change(tmp_path, lambda tensors: tensors.pop(f"{LAYER}.4.up_proj.weight"))
    with pytest.raises(ValueError, match=r"`checkpoint` must have") as error:
        convert(tmp_path)
    assert f'"{LAYER}.4.up_proj.weight", got' in str(error.value)
    assert not (tmp_path / "out").exists()


def test_weights_that_are_fp8_already(tmp_path):
    write_checkpoint(tmp_path / "in", files=1)

    def edit(tensors):
        for name in list(tensors):
            if name.startswith(LAYER):
                tensors[name] = tensors[name].to(torch.float8_e4m3fn)
                tensors[f"{name}_scale"] = torch.ones(1)

    change(tmp_path, edit)
    expect(
        f"convert_checkpoint: `{LAYER}.0.gate_proj.weight` must be bfloat16, float16 or float32, "
        "got float8_e4m3fn, which is quantised already",
        tmp_path,
    )


def test_a_quantised_checkpoint(tmp_path):
    write_checkpoint(tmp_path / "in")
    (tmp_path / "in/config.json").write_text('{"quantization_config": "fp8"}')
    expect(
        "convert_checkpoint: TMP/in/config.json must have no quantization_config, got "
        '"fp8": the checkpoint is quantised already',
        tmp_path,
    )


def test_a_checkpoint_without_a_config(tmp_path):
    write_checkpoint(tmp_path / "in")
    (tmp_path / "in/config.json").unlink()
    expect(
        "convert_checkpoint: TMP/in must hold config.json, which is to say that experts are in "
        "FP8, got none",
        tmp_path,
    )


def test_an_empty_config_is_marked_too(tmp_path):
    write_checkpoint(tmp_path / "in")
    (tmp_path / "in/config.json").write_text("{}")
    convert(tmp_path)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "moe_ext"


@pytest.mark.parametrize("place", ["in/sub", "in/deep/sub", "link/sub", "link"])
def test_an_output_in_the_source(tmp_path, place):
    write_checkpoint(tmp_path / "in")
    (tmp_path / "in/deep").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "in/deep")
    before = sorted(tmp_path.rglob("*"))
    for source in ("in", "also"):
        with pytest.raises(ValueError, match="`out` must be outside of ") as error:
            convert_checkpoint(tmp_path / source, UNIFORM, tmp_path / place)
        assert str(error.value).endswith(f"{tmp_path / source}, got {tmp_path / place}")
        assert sorted(tmp_path.rglob("*")) == before
        if source == "in":
            (tmp_path / "also").symlink_to(tmp_path / "in")
            before = sorted(tmp_path.rglob("*"))


def test_an_output_beside_the_source_may_begin_with_its_name(tmp_path):
    write_checkpoint(tmp_path / "in")
    convert_checkpoint(tmp_path / "in", UNIFORM, tmp_path / "in-fp8")
    assert (tmp_path / "in-fp8/config.json").is_file()


def test_the_source_is_no_output(tmp_path):
    write_checkpoint(tmp_path / "in")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="`out` must be a new or empty folder"):
        convert_checkpoint(tmp_path / "in", UNIFORM, tmp_path / "in")
    assert sorted(tmp_path.rglob("*")) == before


def test_an_index_that_names_what_is_not_there(tmp_path):
    write_checkpoint(tmp_path / "in")
    index = tmp_path / "in" / INDEX
    value = json.loads(index.read_text())
    value["weight_map"]["lost"] = "model-1.safetensors"
    index.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=r'model-1.safetensors must hold "lost", as model.saf'):
        convert(tmp_path)
    value["weight_map"]["lost"] = "model-4.safetensors"
    index.write_text(json.dumps(value))
    expect(
        f"convert_checkpoint: TMP/in/{INDEX} must name files that are there, got "
        "model-4.safetensors",
        tmp_path,
    )


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": 1}'])
def test_an_index_that_is_none(tmp_path, text):
    write_checkpoint(tmp_path / "in")
    (tmp_path / "in" / INDEX).write_text(text)
    expect(
        f"convert_checkpoint: TMP/in/{INDEX} must be a JSON object whose weight_map says the file "
        "of each tensor, got something else",
        tmp_path,
    )


def test_an_index_cannot_lead_elsewhere(tmp_path):
    write_checkpoint(tmp_path / "in")
    (tmp_path / "in" / INDEX).write_text('{"weight_map": {"a": "../model.safetensors"}}')
    with pytest.raises(ValueError, match="weight_map says the file of each tensor"):
        convert(tmp_path)


def test_folders_without_a_checkpoint(tmp_path):
    expect(
        "convert_checkpoint: TMP/in must be a folder with a safetensors checkpoint, got none",
        tmp_path,
    )
    (tmp_path / "in").mkdir()
    expect(
        f"convert_checkpoint: TMP/in must hold {INDEX} or *.safetensors, got neither",
        tmp_path,
    )


DAMAGED = {
    "empty": (lambda data: b"", "0 bytes without a header"),
    "other": (lambda data: b"PK" * 400, "800 bytes without a header"),
    "no json": (lambda data: data[:8] + b"x" + data[9:], "a header that is no JSON"),
    "cut off": (lambda data: data[:-100], " bytes in place of "),
    "longer": (lambda data: data + b"x", " bytes in place of "),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(tmp_path, name):
    write_checkpoint(tmp_path / "in", files=1)
    path = tmp_path / "in/model.safetensors"
    damage, said = DAMAGED[name]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="must be a whole safetensors file, got") as error:
        convert(tmp_path)
    assert said in str(error.value)
    assert str(error.value).endswith(": it is truncated, damaged or of another form")


HEADERS = {
    "no place": ({"a": {"dtype": "F32", "shape": [1]}}, '"a" without dtype, shape and place'),
    "wrong size": (
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        '"a" of F32 (2,) in 4 bytes',
    ),
    "a hole": (
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        '"a" at byte ',
    ),
    "negative": (
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}},
        '"a" of F32 (-1,) in -4 bytes',
    ),
    "a list": ([1], "a header that is no object"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_do_not_fit(tmp_path, name):
    value, said = HEADERS[name]
    text = json.dumps(value).encode()
    (tmp_path / "in").mkdir()
    path = tmp_path / "in/model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ValueError, match="must be a whole safetensors file, got") as error:
        convert(tmp_path)
    assert said in str(error.value)


def test_an_output_that_is_there(tmp_path):
    write_checkpoint(tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/keep").write_text("mine")
    with pytest.raises(ValueError, match="`out` must be a new or empty folder, got a folder with"):
        convert(tmp_path)
    assert (tmp_path / "out/keep").read_text() == "mine"
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="`out` must be a new or empty folder, got a file"):
        convert(tmp_path)
    with pytest.raises(ValueError, match="`out` must be in a folder that is there"):
        convert_checkpoint(tmp_path / "in", UNIFORM, tmp_path / "none/out")


def test_what_another_run_left_is_refused_and_kept(tmp_path):
    write_checkpoint(tmp_path / "in")
    (tmp_path / "out.incomplete").mkdir()
    with pytest.raises(ValueError, match="must not be there, got what a run has left or is wri"):
        convert(tmp_path)
    assert (tmp_path / "out.incomplete").is_dir()


def test_a_full_disk_is_known_beforehand(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "in")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10, 10, 1000))
    with pytest.raises(OSError, match=r"must have \d+ bytes free, got 1000") as error:
        convert(tmp_path)
    assert str(error.value).startswith("convert_checkpoint: the disk of ")
    assert not (tmp_path / "out.incomplete").exists()


@pytest.mark.parametrize("workers", [1, 3])
def test_a_failure_half_way_leaves_nothing(tmp_path, monkeypatch, workers):
    layers = write_checkpoint(tmp_path / "in")
    before = {path: path.read_bytes() for path in (tmp_path / "in").iterdir()}
    calls, write = [], os.pwrite

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) > 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr("os.pwrite", fail)
    threads = torch.get_num_threads()
    with pytest.raises(OSError, match="No space left"):
        convert(tmp_path, plan_of(layers), workers=workers)
    assert len(calls) <= 40 + workers
    assert torch.get_num_threads() == threads
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert {path: path.read_bytes() for path in (tmp_path / "in").iterdir()} == before


SLOW = """
import sys, time
from moe_ext.precision import PrecisionPlan, convert_checkpoint

def note(count, total):
    print(count, flush=True)
    time.sleep(0.05)

convert_checkpoint(sys.argv[1], PrecisionPlan.load(sys.argv[2]), sys.argv[3], progress=note)
"""


def test_a_killed_process_leaves_nothing_that_looks_complete(tmp_path):
    layers = write_checkpoint(tmp_path / "in")
    plan_of(layers).save(tmp_path / "plan")
    paths = [str(tmp_path / name) for name in ("in", "plan", "out")]
    environment = {**os.environ, "PYTHONPATH": str(Path(moe_ext.__file__).parent.parent)}
    command = [sys.executable, "-W", "ignore", "-c", SLOW, *paths]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    left = {path.name for path in (tmp_path / "out.incomplete").iterdir()}
    assert left == {f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"plan": "plan.json"},
            'convert_checkpoint: `plan` must be a PrecisionPlan, got "plan.json"',
        ),
        (
            {"gate_up_layout": "mixed"},
            'convert_checkpoint: `gate_up_layout` must be None or one of "concatenated", '
            '"interleaved", got "mixed"',
        ),
        (
            {"workers": 0},
            "convert_checkpoint: `workers` must be None or an int of at least 1, got 0",
        ),
    ],
)
def test_arguments(tmp_path, options, message):
    expect(message, tmp_path, **options)


def converted(tmp_path):
    layers = write_checkpoint(tmp_path / "in", files=1)
    convert(tmp_path, plan_of(layers))
    return tmp_path / "out"


def test_a_bank_is_of_a_layer_of_the_plan(tmp_path):
    out = converted(tmp_path)
    with pytest.raises(ValueError, match="a layer must be a name or position among 3 layers"):
        ExpertBank.from_checkpoint(out, "model.layers.4.mlp.experts")
    with pytest.raises(ValueError, match=r"must hold precision_plan.json, as `convert_checkpoint`"):
        ExpertBank.from_checkpoint(tmp_path / "in", LAYER)
    with pytest.raises(ValueError, match='`gate_up_layout` must be "concatenated", as'):
        ExpertBank.from_checkpoint(out, LAYER, gate_up_layout="interleaved")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"experts": 2},
            f"`{LAYER}.2.gate_proj.weight` must be bfloat16 (136, 192), as precision_plan.json and "
            "the other experts say, got float8_e4m3fn (136, 192) with scales per block",
        ),
        ({"stages": "gate_up"}, f"`{LAYER}.0.gate_proj.weight` must be bfloat16 (136, 192), as"),
    ],
)
def test_a_bank_is_what_its_plan_says(tmp_path, change, said):
    out = converted(tmp_path)
    path = out / "precision_plan.json"
    PrecisionPlan.load(path).with_bf16(**change).save(path)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        ExpertBank.from_checkpoint(out, LAYER)
    assert said in str(error.value)


@pytest.mark.parametrize("version", [2, 0, "1", None, True])
def test_a_bank_of_another_version_is_refused(tmp_path, version):
    out = converted(tmp_path)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["version"] = version
    (out / "config.json").write_text(json.dumps(config))
    message = (
        r"^ExpertBank.from_checkpoint: `quantization_config.version` must be an int from 1 to 1, "
        r"which this moe_ext reads, got "
    )
    with pytest.raises(ValueError, match=message):
        ExpertBank.from_checkpoint(out, LAYER)


def test_a_bank_without_a_version_is_of_the_first(tmp_path):
    out = converted(tmp_path)
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]["version"]
    (out / "config.json").write_text(json.dumps(config))
    assert ExpertBank.from_checkpoint(out, LAYER).num_experts
    (out / "config.json").unlink()
    assert ExpertBank.from_checkpoint(out, LAYER).num_experts


@pytest.mark.parametrize("name", DAMAGED)
def test_a_bank_of_a_damaged_file(tmp_path, name):
    path = converted(tmp_path) / "model-00001-of-00001.safetensors"
    path.write_bytes(DAMAGED[name][0](path.read_bytes()))
    with pytest.raises(ValueError, match=r"of-00001\.safetensors must be a whole safetensors file"):
        ExpertBank.from_checkpoint(path.parent, LAYER)


def test_a_bank_has_as_many_experts_as_its_plan(tmp_path):
    out = converted(tmp_path)
    PrecisionPlan.uniform({LAYER: 5}).save(out / "precision_plan.json")
    with pytest.raises(ValueError) as error:  # noqa: PT011
        ExpertBank.from_checkpoint(out, LAYER)
    assert str(error.value) == (
        f'ExpertBank.from_checkpoint: "{LAYER}" must have 5 experts, as precision_plan.json says, '
        "got 6"
    )
