"""Fixtures and rules for all tests: seeds, devices, and what is skipped where."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from moe_ext._configs import GroupedGemmConfig

sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    # Said once by design, on machines without a GPU; torch's own deprecations are not ours to fix.
    for ignored in (
        "ignore:moe_ext. no CUDA device here:UserWarning",
        "ignore::DeprecationWarning:torch.*",
        "ignore::FutureWarning:torch.*",
        "ignore::UserWarning:torch.*",
    ):
        config.addinivalue_line("filterwarnings", ignored)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        needed = 2 if "multi_gpu" in item.keywords else 1 if "gpu" in item.keywords else 0
        if num_gpus < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, got {num_gpus}"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _as_served(request: pytest.FixtureRequest) -> Iterator[None]:
    """Without gradients on a GPU, where functions then go past torch (`_call.py`).

    Tests of registration, `test_*_registration.py`, are with gradients on both devices.
    """
    with torch.set_grad_enabled(not request.path.stem.endswith("_gpu")):
        yield


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Callable[[GroupedGemmConfig, dict[str, Any]], None]:
    """A function that makes every layer run a kernel and its partner."""
    from moe_ext import _fused_moe_launch, _fused_moe_run
    from moe_ext._fused_moe_kernels import Kernels
    from support.kernels import rows_kernel

    def force(config: GroupedGemmConfig, layer: dict[str, Any]) -> None:
        hidden = layer["hidden_states"].shape[1]
        kernels = Kernels(config.index, rows_kernel(config, hidden).index)
        monkeypatch.setattr(_fused_moe_launch, "choose_kernels", lambda *_: kernels)
        # Not the choice that a problem met before is remembered with.
        monkeypatch.setattr(_fused_moe_run, "launch", lambda *_: None)

    return force


@pytest.fixture
def alone(request: pytest.FixtureRequest) -> None:
    """For what tests in other processes change: the host's time, the memory that is free."""
    if hasattr(request.config, "workerinput"):
        pytest.skip("measures what tests in other processes change")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device the op runs on."""
    return request.param
