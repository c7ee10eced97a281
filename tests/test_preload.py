"""`preload` loads every kernel once, says what that took, and refuses where it cannot."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
import sys
import types

import moe_ext
import pytest
import torch
from moe_ext import _library, _preload
from moe_ext._dispatch_table_layer import LAYER_TABLES

MAX_MILLISECONDS = 300
MAX_BYTES = 64 * 2**20
IN_A_FRESH_PROCESS = """
import moe_ext

for _ in range(2):
    report = moe_ext.preload()
    print(report.num_kernels, report.milliseconds, report.device_bytes)
"""


@pytest.fixture
def one_gpu(monkeypatch):
    """A GPU that is not there, with 512 MiB free, then 500."""
    free = iter([512 * 2**20, 500 * 2**20])
    state = types.SimpleNamespace(capturing=False, loaded=[], ran=[], taught=[])

    def load_all(index):
        state.loaded.append(index)
        return 170

    kernels = types.SimpleNamespace(
        preload_kernels=load_all,
        fused_moe_teach=lambda number, *table: state.taught.append(number),
    )
    monkeypatch.setattr(_preload, "run_miniatures", lambda device: state.ran.append(device))
    monkeypatch.setattr(_library, "load", lambda: None)
    monkeypatch.setattr(_library, "device_kernels", lambda index: kernels)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 2**30))
    return state


@pytest.mark.parametrize(
    ("device", "index"), [(None, 3), ("cuda", 3), (1, 1), ("cuda:2", 2), (torch.device("cuda"), 3)]
)
def test_which_device(one_gpu, device, index):
    report = moe_ext.preload(device)
    assert one_gpu.loaded == [index]
    assert one_gpu.ran == [torch.device("cuda", index)]
    assert len(one_gpu.taught) == len(set(LAYER_TABLES.values()))
    assert (report.device, report.num_kernels) == (f"cuda:{index}", 170)
    assert report.device_bytes == 12 * 2**20


def test_a_report_prints_and_is_frozen():
    report = moe_ext.PreloadReport("cuda:0", 170, 123.45, 12 * 2**20)
    assert str(report) == "170 kernels on cuda:0 in 123.5 ms, 12.0 MiB of device memory"
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.num_kernels = 1


def test_a_capture_is_refused(one_gpu):
    one_gpu.capturing = True
    with pytest.raises(RuntimeError, match=r"before the capture of a CUDA graph, got .*cuda:3"):
        moe_ext.preload()
    assert not one_gpu.loaded


def test_another_kind_of_device_is_refused():
    with pytest.raises(ValueError, match="`device` must be a CUDA device, got cpu"):
        moe_ext.preload("cpu")


# torch keeps an index in eight bits: 256 is 0 to it.
@pytest.mark.parametrize("device", [-1, 256, True, 0.5, "cuda:-1", "cuda:256", "gpu"], ids=repr)
def test_what_is_no_device_is_refused(one_gpu, device):
    message = f"preload: `device` must be a CUDA device or its index, got {device!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        moe_ext.preload(device)
    assert not one_gpu.loaded


@pytest.fixture
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("default_dtype", [torch.float64, torch.bfloat16], indirect=True)
@pytest.mark.usefixtures("default_dtype")
def test_the_miniatures_are_layers_of_every_layout(monkeypatch):
    outs, layouts = [], []

    def run(*args, **scales):
        outs.append(moe_ext.fused_moe(*args, **scales))
        layouts.append(tuple(tuple(scale.shape) for scale in scales.values()))

    monkeypatch.setattr(_preload, "fused_moe", run)
    _preload.run_miniatures.__wrapped__(torch.device("cpu"))
    layers = ((), ((2,), (2,)), ((2, 256), (2, 128)), ((2, 2, 1), (2, 1, 1)))
    assert layouts == [*layers] * 3
    zeros = [torch.zeros(num_tokens, 128).tolist() for num_tokens in (1, 2, 3) for _ in range(4)]
    assert [out.tolist() for out in outs] == zeros


def test_the_miniatures_need_no_kernel_of_pytorchs(monkeypatch):
    """They would take memory that `preload` has no use for."""
    made = []
    zeros = torch.zeros

    def on_the_cpu(*args, device, **options):
        made.append(device)
        return zeros(*args, device=device, **options)

    monkeypatch.setattr(torch, "zeros", on_the_cpu)
    monkeypatch.setattr(_preload, "fused_moe", lambda *args, **scales: None)
    _preload.run_miniatures.__wrapped__(torch.device("meta"))
    assert made
    assert set(made) == {"cpu"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only where there is no GPU")
def test_without_a_gpu_it_says_what_the_ops_say():
    with pytest.raises(RuntimeError, match=r"^moe_ext: "):
        moe_ext.preload()


@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
def test_all_kernels_are_loaded_once():
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, again = ([float(word) for word in line.split()] for line in done.stdout.splitlines())
    print(
        f"{first[0]:.0f} kernels, {first[1]:.1f} ms, {first[2] / 2**20:.1f} MiB; {again[1]:.2f} ms"
    )
    assert first[0] == again[0] >= len(moe_ext.kernels())
    assert first[1] <= MAX_MILLISECONDS
    assert 0 < first[2] <= MAX_BYTES
    assert again[1] < first[1] / 10
    assert again[2] == 0


@pytest.mark.gpu
def test_it_is_refused_under_capture_which_goes_on():
    moe_ext.preload()
    values = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="before the capture of a CUDA graph"):
            moe_ext.preload()
        values += 1
    graph.replay()
    assert values.tolist() == [1.0] * 4


@pytest.mark.multi_gpu
def test_the_current_device_stays():
    assert moe_ext.preload(1).device == "cuda:1"
    assert torch.cuda.current_device() == 0
