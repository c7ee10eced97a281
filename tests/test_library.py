"""Each way the CUDA library can be unusable has one clear error, raised by a call."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace

import moe_ext
import pytest
import torch
from moe_ext import _library
from moe_ext._cpu import warn_of_cpu

# `moe_ext.grouped_gemm` is the function; the module of the same name has what it calls.
OPS = tuple(name for name in _library.DeviceKernels._fields if name != "sm_count")


@pytest.fixture(autouse=True)
def _fresh_caches():
    _library.load.cache_clear()
    _library.device_kernels.cache_clear()
    yield
    _library.load.cache_clear()
    _library.device_kernels.cache_clear()


@pytest.fixture
def library(monkeypatch, tmp_path):
    """An environment in which loading would succeed; each test breaks one thing."""
    path = tmp_path / "moe_ext_cuda.so"
    path.write_bytes(b"")
    ops = SimpleNamespace(
        load_library=lambda path: None,
        loaded_libraries={str(path)},
        moe_ext=SimpleNamespace(
            grouped_gemm_configs=lambda: _library.planner().configs_csv(),
            # An overload has a shorter way to call it, `_op`; a stand-in may have none.
            **{name: SimpleNamespace(default=SimpleNamespace(_op=name)) for name in OPS[:-1]},
            **{OPS[-1]: SimpleNamespace(default=OPS[-1])},
            build_info=lambda: "cuda_toolkit=13.0\ncutlass=4.2.0\n",
        ),
    )
    monkeypatch.setattr(_library, "LIBRARY_PATH", path)
    monkeypatch.setattr(torch, "ops", ops)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(_library, "driver_cuda_version", lambda: 13000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu())
    return ops


def gpu(name="NVIDIA H200", major=9, minor=0):
    return SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=132)


def expect(message, call=_library.load):
    with pytest.raises(RuntimeError, match="^moe_ext: .*" + message):
        call()


def test_it_loads_once_and_gives_the_ops(library, monkeypatch):
    loaded = []
    monkeypatch.setattr(library, "load_library", loaded.append)
    for index in (0, 1):
        assert _library.device_kernels(index) == (132, *OPS)
    assert loaded == [str(_library.LIBRARY_PATH)]
    assert _library.unavailable_reason() is None
    assert moe_ext.build_info()["cuda_toolkit"] == "13.0"


@pytest.mark.parametrize("version", ["2.9.1+cu130", "1.13.0", "2.9.0a0+git123"])
def test_old_torch(library, monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    expect(f"torch must be 2.10 or newer .*, got {re.escape(version)}")


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cu130", "2.10.0a0+git123", "3.0.0"])
def test_new_torch(library, monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    _library.load()


@pytest.mark.usefixtures("library")
def test_cpu_only_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    expect("torch must be a CUDA build .*, got 2.11.0.*, built without CUDA")


@pytest.mark.usefixtures("library")
def test_cpu_only_install(monkeypatch, tmp_path):
    monkeypatch.setattr(_library, "LIBRARY_PATH", tmp_path / "absent.so")
    expect("must be at .*absent.so, got no such file: .*CPU only; .*MOE_EXT_BUILD_CUDA=on")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("driver", "said"), [(12080, "got one for CUDA 12.8"), (None, "got none")])
def test_old_or_no_driver(monkeypatch, driver, said):
    monkeypatch.setattr(_library, "driver_cuda_version", lambda: driver)
    expect(f"driver must serve CUDA 13.0 .*580.* or newer, {said}; update")


def test_library_that_does_not_load(library, monkeypatch):
    def fail(path):
        raise OSError("Could not load this library") from OSError("undefined symbol: aoti_x")

    monkeypatch.setattr(library, "load_library", fail)
    expect("must load under torch 2.11.0.*undefined symbol: aoti_x; reinstall")


def test_library_of_another_build(library, monkeypatch):
    planned = _library.planner().configs_csv().strip().splitlines()
    for compiled, said in (
        (planned[:-1], f"{len(planned) - 2} kernels in place of {len(planned) - 1}"),
        ([planned[0], "other,", *planned[2:]], f"'other,' in place of '{planned[1]}' (line 1)"),
    ):
        text = "\n".join(compiled)
        monkeypatch.setattr(library.moe_ext, "grouped_gemm_configs", lambda text=text: text)
        expect(f"the kernels that the planner lists, got {re.escape(said)}; .*reinstall")


@pytest.mark.parametrize("name", OPS)
def test_library_without_an_op(library, name):
    delattr(library.moe_ext, name)
    expect(f"must hold {name}, .*reinstall", lambda: _library.device_kernels(0))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("name", "major", "minor"), [("NVIDIA A100", 8, 0), ("NVIDIA B200", 10, 0), ("L40", 8, 9)]
)
def test_wrong_gpu(monkeypatch, name, major, minor):
    properties = gpu(name, major, minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    said = (
        rf"capability 9.0 \(H100, H200, H20\), got {name} \(cuda:1\) of capability {major}.{minor}"
    )
    expect(said, lambda: _library.device_kernels(1))


@pytest.mark.usefixtures("library")
def test_cuda_that_does_not_start(monkeypatch):
    def fail(index):
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    expect("must be usable on device cuda:0, got: .*too old", lambda: _library.device_kernels(0))


def test_a_failure_is_not_remembered(library, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    expect("torch must be a CUDA build")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    _library.load()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only where there is no GPU")
@pytest.mark.parametrize("call", [moe_ext.grouped_gemm, torch.ops.moe_ext.grouped_gemm])
def test_the_cpu_fall_back_says_so_once_where_it_is_called(call):
    a, b = torch.ones(2, 16).bfloat16(), torch.ones(1, 8, 16).bfloat16()
    offs = torch.tensor([2], dtype=torch.int32)
    warn_of_cpu.cache_clear()
    with pytest.warns(UserWarning, match="no CUDA device here") as caught:
        call(a, b, offs)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(a, b, offs)


def test_build_info_explains_itself():
    info = moe_ext.build_info()
    assert info["version"] == moe_ext.__version__
    assert info["torch"] == torch.__version__
    assert info["kernels"] == len(moe_ext.kernels())
    if not torch.cuda.is_available():
        assert str(info["cuda_unavailable"]).startswith("moe_ext: ")


@pytest.mark.gpu
def test_build_info_on_a_gpu():
    info = moe_ext.build_info()
    assert info["cuda_library"] is True
    assert info["cuda_unavailable"] is None
    assert str(info["cuda_toolkit"]).startswith("13.")
