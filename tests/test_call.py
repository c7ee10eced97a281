"""Calls that go past torch to an op's implementation: which do, and that nobody can tell."""

from __future__ import annotations

import contextlib

import moe_ext
import pytest
import torch
from moe_ext._call import call_straight, goes_straight
from support.fused_moe import OPERANDS, Sizes, random_layer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

X = torch.ones(2, 8)
TWO_TENSORS = torch.ops.moe_ext.grouped_gemm.default


def straight(*operands):
    return goes_straight(TWO_TENSORS, operands, {})


class Subclass(torch.Tensor):
    """Has a say in every op that it is given to."""


class Watching(TorchDispatchMode):
    """Sees every op."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def layer():
    return random_layer("bf16", "swiglu", Sizes(5, 3, 2, 64, 32), "cpu", 1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("tensor", [X, torch.nn.Parameter(X)], ids=["tensor", "parameter"])
def test_eager_without_gradients(mode, tensor):
    with mode():
        assert straight(X, tensor)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert straight(X, tensor)


def test_with_gradients():
    assert not straight(X)


@pytest.mark.parametrize("other", [X.as_subclass(Subclass), None, [1.0], 2], ids=str)
@torch.no_grad()
def test_what_is_no_plain_tensor(other):
    assert not straight(X, other)


@pytest.mark.parametrize(
    "mode",
    [
        FakeTensorMode,
        Watching,
        lambda: torch.device("cpu"),
        forward_ad.dual_level,
    ],
    ids=["fake", "dispatch", "function", "forward AD"],
)
@torch.no_grad()
def test_in_a_mode(mode):
    with mode():
        assert not straight(X)
    assert straight(X)


@pytest.mark.parametrize(
    "run",
    [
        lambda f: torch.vmap(f)(X),
        lambda f: torch.func.functionalize(f)(X),
        lambda f: make_fx(f)(X),
        lambda f: torch.compile(f, backend="eager", fullgraph=True)(X),
    ],
    ids=["vmap", "functionalize", "make_fx", "compile"],
)
@torch.no_grad()
def test_in_a_transformation(run):
    said = []

    def function(x):
        said.append(straight(x))
        return x + 1

    run(function)
    assert said
    assert not any(said)


@torch.no_grad()
def test_a_profiler_sees_the_op(layer):
    with torch.profiler.profile() as profile:
        moe_ext.fused_moe(**layer)
    assert "moe_ext::fused_moe" in {event.key for event in profile.key_averages()}


@torch.no_grad()
def test_a_mode_sees_the_op(layer):
    with Watching() as watching:
        moe_ext.fused_moe(**layer)
    assert watching.seen[0] is torch.ops.moe_ext.fused_moe.default


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_same_bits(layer, mode):
    expected = torch.ops.moe_ext.fused_moe(*(layer[name] for name in OPERANDS))
    with mode():
        assert torch.equal(moe_ext.fused_moe(**layer), expected)
        out = torch.full_like(expected, torch.nan)
        moe_ext.fused_moe_out(**layer, out=out)
        assert torch.equal(out, expected)


def test_writes_are_counted(layer):
    out = torch.empty_like(layer["hidden_states"])
    workspace = torch.empty(1 << 20, dtype=torch.uint8)
    versions = out._version, workspace._version
    with torch.no_grad():
        moe_ext.fused_moe_out(**layer, out=out, workspace=workspace)
    assert out._version > versions[0]
    assert workspace._version > versions[1]


@torch.no_grad()
def test_what_the_implementation_refuses_the_op_is_asked_again():
    asked = []

    def refuse(*operands, **options):
        asked.append("implementation")
        raise TypeError

    class Op:
        _schema = torch.ops.moe_ext.sort_tokens.default._schema

        def __call__(self, *operands, **options):
            asked.append("op")
            return 3

    assert call_straight(Op(), refuse, (X, 4), {}) == 3
    assert asked == ["implementation", "op"]
