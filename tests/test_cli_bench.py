"""`moe-ext bench`: tables, JSON and pictures of measured problems, and no GPU."""

from __future__ import annotations

import dataclasses
import json

import moe_ext
import pytest
import torch

pytest.importorskip("typer")
from moe_ext.cli import _bench_run, bench
from support.cli import Shell

LAYER = ("--top-k", 8, "--experts", 128, "--hidden", 2048, "--intermediate", 768)
GEMM = ("--groups", 8, "-n", 1536, "-k", 2048)
CARD = "NVIDIA H200"


@pytest.fixture
def shell(capsys):
    return Shell(capsys)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which everything takes twice its floor."""

    def measured(explain):
        def call(measure_on, **problem):
            told = explain(**problem)
            return dataclasses.replace(told, measured_us=2 * told.floor_us)

        return call

    monkeypatch.setattr(bench, "explain_fused_moe", measured(bench.explain_fused_moe))
    monkeypatch.setattr(bench, "explain_gemm", measured(bench.explain_gemm))
    monkeypatch.setattr(_bench_run, "cuda_device", lambda op, device: (0, None))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: CARD)


def test_a_layer_over_tokens(shell, gpu):
    said = shell("bench", "layer", *LAYER, "--tokens", "256,1, 16", "--dtype", "fp8")
    first, *rows = [line.strip() for line in said.splitlines()]
    assert first == (
        "layer in fp8, scales per block: top 8 of 128 experts, hidden 2048, intermediate 768; "
        f"{CARD}"
    )
    found = [row.split() for row in rows if row[:1].isdigit()]
    assert [row[0] for row in found] == ["1", "16", "256"]
    for tokens, us, floor, ratio, _, *kernels in found:
        told = moe_ext.explain_fused_moe(
            dtype="fp8",
            num_tokens=int(tokens),
            top_k=8,
            hidden_size=2048,
            intermediate_size=768,
            num_experts=128,
            w13_scale="block",
            w2_scale="block",
        )
        assert (us, floor, ratio) == (
            f"{2 * told.floor_us:,.1f}",
            f"{told.floor_us:,.1f}",
            "2.00",
        )
        assert kernels[0] == told.gate_up.config
        assert kernels[-1] == told.down.config


def test_a_gemm_as_json(shell, gpu):
    (row,) = json.loads(shell("bench", "gemm", *GEMM, "--rows", 128, "--json"))
    told = moe_ext.explain(dtype="bf16", num_rows=128, num_groups=8, n=1536, k=2048)
    assert row["config"] == told.config
    assert row["num_rows"] == 128
    assert row["measured_us"] == 2 * told.floor_us
    assert (row["ratio_to_floor"], row["device"]) == (2.0, CARD)


def test_a_picture(shell, gpu, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "times.png"
    said = shell("bench", "layer", *LAYER, "--tokens", "1,16", "--plot", path)
    assert said.endswith(f"{path} written\n")
    assert path.read_bytes().startswith(b"\x89PNG")
    json.loads(shell("bench", "gemm", *GEMM, "--rows", 8, "--json", "--plot", path))


def test_nothing_is_measured_for_a_picture_that_cannot_be_written(shell, gpu, tmp_path):
    said = shell.fails("bench", "gemm", *GEMM, "--plot", tmp_path / "no/times.png")
    assert said.endswith("must be a folder to write times.png in, got none")


def test_a_picture_is_named_as_one(shell, gpu, tmp_path):
    said = shell.fails("bench", "gemm", *GEMM, "--plot", tmp_path / "times.svg", code=2)
    assert said.endswith(f"--plot must be a file named *.png, got {tmp_path / 'times.svg'}")


def test_without_a_gpu_there_is_one_line(shell, monkeypatch):
    def fail(op, device):
        raise RuntimeError("moe_ext: the NVIDIA driver must serve CUDA 13.0, got none")

    monkeypatch.setattr(_bench_run, "cuda_device", fail)
    said = shell.fails("bench", "layer", *LAYER, code=2)
    assert said == (
        "moe-ext bench layer: Invalid value: --device must name a GPU that runs the "
        "kernels, got cuda: the NVIDIA driver must serve CUDA 13.0, got none"
    )


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_devices_that_are_no_gpu(shell, device):
    said = shell.fails("bench", "gemm", *GEMM, "--device", device, code=2)
    assert f"got {device}: must be a CUDA device" in said


def test_what_cannot_be_timed_is_named_as_it_was_typed(shell, gpu):
    said = shell.fails("bench", "gemm", *GEMM[:2], "-n", 1535, "-k", 2048)
    assert said.startswith("moe-ext: -n must be a multiple of 8, ")
    said = shell.fails("bench", "layer", *LAYER, "--tokens", "1,600000")
    assert said == "moe-ext: --tokens times --top-k must be at most 4194304, got 4800000"


@pytest.mark.parametrize("tokens", ["", "0", "1,x", "-1", "1.5", "1,,2"])
def test_counts_that_are_none(shell, tokens):
    said = shell.fails("bench", "layer", *LAYER, f"--tokens={tokens}", code=2)
    assert said.endswith(
        f"--tokens must be whole numbers from 1 on with commas between, as 1,16,256, got {tokens!r}"
    )


@pytest.mark.gpu
def test_on_the_gpu(shell):
    rows = json.loads(shell("bench", "layer", *LAYER, "--tokens", "1,64", "--json"))
    assert [row["num_tokens"] for row in rows] == [1, 64]
    assert all(0.8 < row["ratio_to_floor"] < 10 for row in rows)
