"""`moe-ext doctor`, `kernels` and `explain`."""

from __future__ import annotations

import dataclasses
import json

import moe_ext
import pytest
import torch
from moe_ext import _library

pytest.importorskip("typer")
from moe_ext.cli import _driver, doctor
from support.cli import Shell

HOPPER = _driver.Card("NVIDIA H200", (9, 0))
AMPERE = _driver.Card("NVIDIA A100", (8, 0))


@pytest.fixture
def shell(capsys):
    return Shell(capsys)


@pytest.fixture
def machine(monkeypatch):
    """Make this machine another: its cards, and why the library cannot run."""

    def make(cards=(), driver=None, reason="moe_ext: no reason"):
        monkeypatch.setattr(doctor, "cards", lambda: list(cards))
        monkeypatch.setattr(_library, "driver_cuda_version", lambda: driver)
        monkeypatch.setattr(_library, "unavailable_reason", lambda: reason)

    return make


def states():
    return {check.what: check.state.value for check in doctor._checks()}


def test_a_machine_without_a_gpu_is_well(shell, machine):
    machine(reason="moe_ext: torch must be a CUDA build to run the CUDA kernels, got none")
    said = shell("doctor")
    assert f"moe_ext {moe_ext.__version__}" in said
    assert torch.__version__ in said
    assert "torch must be a CUDA build to run the CUDA kernels, got none" in said
    assert str(len(moe_ext.kernels())) in said
    found = states()
    assert found["CUDA kernels"] == found["GPU"] == found["NVIDIA driver"] == "-"
    assert "wrong" not in found.values()


def test_whoever_needs_the_kernels_is_told_by_the_exit_code(shell, machine):
    machine()
    shell("doctor", "--gpu", code=1)


def test_a_card_without_its_library_is_wrong(shell, machine, monkeypatch, tmp_path):
    machine([HOPPER], 13000, "moe_ext: the CUDA library must be at x, got no such file")
    monkeypatch.setattr(_library, "LIBRARY_PATH", tmp_path / "lost.so")
    found = states()
    assert found["GPU 0"] == found["NVIDIA driver"] == "ok"
    assert found["CUDA library"] == found["CUDA kernels"] == "wrong"
    shell("doctor", code=1)


def test_a_library_of_another_build_is_wrong(machine, monkeypatch, tmp_path):
    machine()
    ids = [config.id for config in moe_ext.kernels()]
    path = tmp_path / "moe_ext_cuda.so"
    monkeypatch.setattr(_library, "LIBRARY_PATH", path)
    path.write_text(" ".join(ids))
    assert states()["CUDA library"] == "ok"
    path.write_text(" ".join(own for own in ids if not own.startswith(ids[-1])))
    checks = {check.what: check for check in doctor._checks()}
    assert checks["CUDA library"].state.value == "wrong"
    assert checks["CUDA library"].advice == (
        f"of another build, without {ids[-1]}: reinstall the package"
    )


def test_an_old_driver_is_wrong(machine):
    machine([HOPPER], 12040, "moe_ext: the NVIDIA driver must serve CUDA 13.0")
    checks = {check.what: check for check in doctor._checks()}
    assert checks["NVIDIA driver"].found == "for CUDA 12.4"
    assert checks["NVIDIA driver"].advice == "install driver 580 or newer"
    assert checks["NVIDIA driver"].state.value == "wrong"


def test_other_cards_are_told_which_ones_would_do(machine):
    machine([AMPERE], 13000)
    checks = {check.what: check for check in doctor._checks()}
    assert checks["GPU 0"].found == "NVIDIA A100, compute capability 8.0"
    assert checks["GPU 0"].advice == "the kernels are for 9.0 alone (H100, H200, H20)"
    assert "wrong" not in states().values()


def test_a_machine_that_runs_the_kernels(machine, shell, monkeypatch):
    machine([HOPPER], 13000, reason=None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(_library, "device_kernels", lambda index: None)
    assert states()["CUDA kernels"] == "ok"

    def fail(index):
        raise RuntimeError("moe_ext: CUDA must be usable on device cuda:0, got: broken")

    monkeypatch.setattr(_library, "device_kernels", fail)
    assert states()["CUDA kernels"] == "wrong"


def test_a_missing_planner_is_wrong(machine, monkeypatch):
    machine()

    def fail():
        raise RuntimeError("moe_ext: the compiled module moe_ext._planner must be importable")

    monkeypatch.setattr(doctor, "all_configs", fail)
    assert states()["kernels listed"] == "wrong"


@pytest.mark.gpu
def test_the_gpu_machine_is_well(shell):
    shell("doctor", "--gpu")


def test_kernels_as_a_table(shell):
    said = shell("kernels")
    for config in moe_ext.kernels():
        assert config.id in said
    assert said.splitlines()[0].strip() == f"{len(moe_ext.kernels())} kernels"


def test_kernels_as_json(shell):
    found = json.loads(shell("kernels", "--json", "--dtype", "bf16"))
    wanted = [dataclasses.asdict(c) for c in moe_ext.kernels() if c.dtype == "bf16"]
    assert found == wanted


def test_a_gemm_is_explained(shell):
    sizes = ("--rows", 128, "--groups", 8, "-n", 1536, "-k", 2048)
    told = moe_ext.explain(dtype="bf16", num_rows=128, num_groups=8, n=1536, k=2048)
    assert shell("explain", "gemm", *sizes) == f"{told}\n"
    sizes = (*sizes, "--dtype", "fp8")
    for scales, options in (
        ((), {"block_scales": True}),
        (("--scales", "channel"), {}),
        (("--accumulate", "fast"), {"accumulate": "fast"}),
    ):
        told = moe_ext.explain(dtype="fp8", num_rows=128, num_groups=8, n=1536, k=2048, **options)
        assert shell("explain", "gemm", *sizes, *scales) == f"{told}\n"


def test_a_layer_is_explained(shell):
    sizes = {"hidden_size": 2048, "intermediate_size": 768, "num_experts": 128}
    told = moe_ext.explain_fused_moe(
        dtype="fp8", num_tokens=16, top_k=8, w13_scale="tensor", w2_scale="tensor", **sizes
    )
    said = shell(
        *("explain", "layer", "--tokens", 16, "--top-k", 8, "--hidden", 2048),
        *("--intermediate", 768, "--experts", 128, "--dtype", "fp8", "--scales", "tensor"),
    )
    assert said == f"{told}\n"


def test_problems_that_are_none(shell):
    sizes = ("--rows", 128, "--groups", 8, "-n", 1535, "-k", 2048)
    said = shell.fails("explain", "gemm", *sizes)
    assert said.startswith("moe-ext: -n must be a multiple of 8")
    sizes = ("--rows", 128, "--groups", 8, "-n", 1536, "-k", 2048)
    said = shell.fails("explain", "gemm", *sizes, "--scales", "row", "--dtype", "fp8", code=2)
    assert said.endswith("--scales must be one of block, channel, tensor, got row")
    said = shell.fails("explain", "gemm", *sizes, "--scales", "block", code=2)
    assert said.endswith("--scales must not be given for bf16, got block")
    said = shell.fails("explain", "gemm", *sizes, "--dtype", "int8", code=2)
    assert said.endswith("--dtype must be one of bf16, fp8, got int8")
