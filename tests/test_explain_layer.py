"""`explain_fused_moe` says what a layer would run, with the planner's tiles, and prints it."""

from __future__ import annotations

import dataclasses

import moe_ext
import pytest
import torch
from moe_ext import _explain_layer
from moe_ext._fused_moe_kernels import choose_kernels
from moe_ext._problems import asked_fused_moe

SIZES = {"hidden_size": 2048, "intermediate_size": 768, "num_experts": 128}
BF16 = {"dtype": "bf16", "num_tokens": 16, "top_k": 8, **SIZES}
BLOCK = BF16 | {"dtype": "fp8", "w13_scale": "block", "w2_scale": "block"}
KERNELS = moe_ext.kernels()


@pytest.mark.parametrize(
    "problem",
    [
        BF16,
        BLOCK,
        BLOCK | {"w13_scale": "tensor", "w2_scale": "channel"},
        BLOCK | {"num_tokens": 4096, "w13_bias": True},
        BF16 | {"activation": "relu2", "batch_invariant": True},
    ],
    ids=str,
)
def test_it_agrees_with_what_the_op_chooses(problem):
    told = moe_ext.explain_fused_moe(**problem)
    kernels = choose_kernels(*asked_fused_moe(**problem), 132)
    assert (told.gate_up.config_index, told.down.config_index) == kernels
    assert [told.gate_up.config, told.down.config] == [KERNELS[index].id for index in kernels]
    assert told.source in ("table", "likeness", "cost model")
    assert told.reason
    assert told.active_experts == 128
    assert told.largest_expert == problem["num_tokens"] * 8 // 128
    assert told.predicted_us == told.gate_up.predicted_us + told.down.predicted_us
    assert told.floor_us <= told.predicted_us
    assert told.measured_us is None


def test_sizes_of_both_gemms():
    told = moe_ext.explain_fused_moe(**BF16)
    assert (told.gate_up.n, told.gate_up.k, told.down.n, told.down.k) == (1536, 2048, 2048, 768)
    assert told.gate_up.weight_bytes == 128 * 1536 * 2048 * 2
    assert told.floor_us == pytest.approx(2 + 128 * 3 * 768 * 2048 * 2 / 4.5e6)
    width = KERNELS[told.gate_up.config_index].tile_weights
    assert told.gate_up.num_tiles == 128 * 1536 // width
    assert told.gate_up.padded_rows == 128 * told.gate_up.token_widths[0] - 128


def test_without_up_there_are_as_many_tiles_and_half_the_weights():
    gated, alone = (
        moe_ext.explain_fused_moe(**BF16, activation=name).gate_up for name in ("swiglu", "relu2")
    )
    assert alone.config == gated.config
    assert alone.num_tiles == gated.num_tiles
    assert 2 * alone.weight_bytes == gated.weight_bytes


def test_offsets_decide_what_is_active_and_largest():
    offs = [0, 5, 5, 128, *[128] * 124]
    told = moe_ext.explain_fused_moe(**BF16, offs=offs)
    assert (told.active_experts, told.largest_expert) == (2, 123)
    assert told.down.weight_bytes == 2 * 2048 * 768 * 2


@pytest.mark.parametrize(
    ("offs", "active"), [(None, 128), ([0, 5, 5, 128, *[128] * 124], 2)], ids=["even", "given"]
)
def test_times_say_which_rows_they_are_for(offs, active):
    told = moe_ext.explain_fused_moe(**BLOCK, offs=offs)
    assert str(told).splitlines()[-1] == (
        f"time     floor {told.floor_us:.1f} us, predicted {told.predicted_us:.1f} us, for rows "
        f'in {active} of 128 experts ("why" is for likely routings)'
    )


def test_it_is_frozen_and_prints_every_line():
    told = moe_ext.explain_fused_moe(**BLOCK)
    with pytest.raises(dataclasses.FrozenInstanceError):
        told.num_tokens = 1
    text = str(told)
    for part in ("problem", "gate/up", "down", "why", "work", "time", "16 tokens with 8 of 128"):
        assert part in text
    assert told.gate_up.config in text
    assert told.source in text
    assert all(len(line) < 130 for line in text.splitlines())


def test_another_gpu():
    told = moe_ext.explain_fused_moe(**BLOCK, sm_count=78)
    assert told.sm_count == 78
    assert told.source == "cost model"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 2041}, "fused_moe: `hidden_states` must have a positive hidden size"),
        (
            {"dtype": "mxfp4"},
            "explain_fused_moe: `dtype` must be torch's or one of bf16, fp8, got 'mxfp4'",
        ),
        ({"w13_scale": None}, "fused_moe: `w13_scale` must be given for float8_e4m3fn weights"),
        ({"w13_scale": "rows"}, "explain_fused_moe: `w13_scale` must be None, a shape or o"),
        ({"offs": [1, 2]}, "explain_fused_moe: `offs` must have 128 entries, got 2"),
        ({"offs": [200] * 128}, "`offs` must not decrease and end at num_rows = 128 at most"),
        ({"sm_count": 0}, "explain_fused_moe: `sm_count` must be a whole number from 1 to 1024"),
        ({"num_tokens": 10**20}, "explain_fused_moe: sizes must make tensors of less than 2.59"),
        ({"hidden_size": 2**60}, r"less than 2.59 elements, got \(\d+, 1152921504606846976\)"),
        ({"num_tokens": 0, "hidden_size": 2**60}, "less than 2.59 elements, got"),
    ],
)
def test_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        moe_ext.explain_fused_moe(**(BLOCK | changes))


def test_something_missing_is_a_type_error():
    message = "^explain_fused_moe: a problem of fused_moe must have .*, got none of top_k$"
    with pytest.raises(TypeError, match=message):
        moe_ext.explain_fused_moe(dtype="bf16", num_tokens=4, **SIZES)


SMALL = {"hidden_size": 256, "intermediate_size": 144, "num_experts": 4}


@pytest.mark.filterwarnings("ignore:moe_ext. no CUDA device")
@pytest.mark.parametrize(
    "problem",
    [
        {"dtype": "bf16", "w13_bias": True, "w2_bias": True, "addend": True},
        {"dtype": "bf16", "activation": "relu2"},
        {"dtype": "fp8", "w13_scale": "tensor", "w2_scale": "channel", "a1_scale": True},
        {"dtype": "fp8", "w13_scale": (4, 2, 2, 2), "w2_scale": "block"},
    ],
    ids=str,
)
def test_a_measured_call_is_one_of_the_op(problem, monkeypatch):
    """The call that would be timed, made on the CPU."""
    called = []

    def median_us(op, device_index, call, copies, expected_us):
        called.append(call(copies - 1))
        return 12.5

    def layer_call(**arguments):
        return real(**(arguments | {"device": cpu, "copies": 2}))

    cpu, real, tensors = (
        torch.device("cpu"),
        _explain_layer.layer_call,
        _explain_layer.tensor_options,
    )
    monkeypatch.setattr(_explain_layer, "gpu_of", lambda op, device, sm_count: (0, 132))
    monkeypatch.setattr(_explain_layer, "layer_call", layer_call)
    monkeypatch.setattr(_explain_layer, "median_us", median_us)
    monkeypatch.setattr(_explain_layer, "num_copies", lambda num_bytes: 2)
    monkeypatch.setattr(
        _explain_layer, "tensor_options", lambda *arguments: tensors(*arguments[:3], cpu)
    )
    told = moe_ext.explain_fused_moe(num_tokens=6, top_k=2, measure_on=0, **SMALL, **problem)
    assert told.measured_us == 12.5
    assert "measured 12.5 us" in str(told)
    [out] = called
    assert out.shape == (6, 256)
    assert bool(out.isfinite().all())
    assert bool(out.any())
    with pytest.raises(ValueError, match=r"must end at num_tokens \* top_k = 12, and"):
        moe_ext.explain_fused_moe(
            num_tokens=6, top_k=2, measure_on=0, offs=[1, 2, 3, 4], **SMALL, **problem
        )


@pytest.mark.gpu
def test_a_layer_on_a_gpu_takes_longer_than_its_floor():
    told = moe_ext.explain_fused_moe(**BLOCK, measure_on="cuda")
    assert told.floor_us < told.measured_us < 4 * told.predicted_us
