"""`explain` says what the dispatcher would do, with the planner's tiles, and prints it."""

from __future__ import annotations

import contextlib
import dataclasses
import types

import moe_ext
import pytest
import torch
from moe_ext import _dispatch, _explain, _library, _measure

QWEN3_30B = {"num_groups": 128, "n": 1536, "k": 2048}


def test_explanation_agrees_with_dispatch_and_planner():
    explanation = moe_ext.explain(dtype=torch.float8_e4m3fn, num_rows=512, **QWEN3_30B)
    index = _dispatch.select(dtype="fp8", accumulate="promoted", num_rows=512, **QWEN3_30B)
    config = moe_ext.kernels()[index]
    assert (explanation.config, explanation.config_index) == (config.id, index)
    assert explanation.accumulate == "promoted"
    assert explanation.active_groups == 128
    assert explanation.largest_group == 4
    assert explanation.weight_bytes == 128 * 1536 * 2048
    assert explanation.floor_us == pytest.approx(2 + 128 * 1536 * 2048 / 4.5e6)
    assert explanation.predicted_us >= explanation.floor_us
    assert explanation.num_tiles >= 128 * 1536 / config.tile_weights
    assert explanation.padded_rows == 128 * explanation.token_widths[0] - 512


def test_offsets_decide_what_is_active_and_largest():
    offs = [0, 5, 5, 300, *[300] * 124]
    explanation = moe_ext.explain(dtype="bf16", num_rows=310, offs=offs, **QWEN3_30B)
    assert explanation.active_groups == 2
    assert explanation.largest_group == 295
    assert explanation.weight_bytes == 2 * 1536 * 2048 * 2


@pytest.mark.parametrize(
    ("offs", "active"), [(None, 128), ([0, 5, 5, 310, *[310] * 124], 2)], ids=["even", "given"]
)
def test_times_say_which_rows_they_are_for(offs, active):
    told = moe_ext.explain(dtype="bf16", num_rows=310, offs=offs, **QWEN3_30B)
    assert str(told).splitlines()[-1] == (
        f"time     floor {told.floor_us:.1f} us, predicted {told.predicted_us:.1f} us, for rows "
        f'in {active} of 128 groups ("why" is for likely routings)'
    )


def test_no_rows():
    explanation = moe_ext.explain(dtype="bf16", num_rows=0, **QWEN3_30B)
    assert explanation.num_tiles == 0
    assert explanation.token_widths == ()
    assert "none" in str(explanation)


def test_it_is_frozen_and_prints_every_line():
    explanation = moe_ext.explain(dtype="bf16", num_rows=64, **QWEN3_30B)
    with pytest.raises(dataclasses.FrozenInstanceError):
        explanation.n = 1
    text = str(explanation)
    for part in (
        "problem",
        "kernel",
        "why",
        "work",
        "tiles",
        "weights",
        "time",
        explanation.config,
    ):
        assert part in text
    assert explanation.source in text
    assert all(len(line) < 120 for line in text.splitlines())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float16}, "`dtype` must be bfloat16"),
        ({"dtype": "int8"}, "`dtype` must be bfloat16"),
        ({"accumulate": "fast"}, '`accumulate` must be "promoted", or "fast" for fp8'),
        ({"num_rows": -1}, "`num_rows` must be a whole number from 0 to 2147482623, got -1"),
        ({"num_groups": 0}, "`num_groups` must be a whole number from 1 to 4096, got 0"),
        ({"offs": [1, 2]}, "`offs` must have 3 entries, got 2"),
        ({"offs": [3, 2, 6]}, "`offs` must not decrease"),
        ({"offs": [1, 2, 9]}, "`offs` must not decrease and end at num_rows = 6 at most"),
    ],
)
def test_errors(changes, message):
    valid = {"dtype": "bf16", "num_rows": 6, "num_groups": 3, "n": 64, "k": 64}
    with pytest.raises(ValueError, match="explain: " + message.replace("(", r"\(")):
        moe_ext.explain(**(valid | changes))


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_rows": 2**31},
        {"n": 2**40},
        {"n": 512.0},
        {"n": "512"},
        {"k": None},
        {"num_rows": True},
        {"sm_count": 2**31},
        {"sm_count": True},
        {"num_groups": 5000},
    ],
    ids=str,
)
def test_numbers_out_of_range_are_named(wrong):
    problem = {"num_rows": 64, "num_groups": 8, "n": 256, "k": 256} | wrong
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be a whole number from"):
        moe_ext.explain(dtype="bf16", **problem)


@pytest.mark.parametrize(("n_segments", "orders"), [(1, {"Plain"}), (2, {"SwapAB"})])
def test_scales_per_block_have_kernels_of_their_own(n_segments, orders):
    explanation = moe_ext.explain(
        dtype="fp8",
        num_rows=65536,
        num_groups=128,
        n=352 * 4,
        k=2048,
        block_scales=True,
        n_segments=n_segments,
    )
    config = moe_ext.kernels()[explanation.config_index]
    assert (explanation.accumulate, config.accumulate) == ("block", "block")
    assert config.order in orders


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bf16", "block_scales": True}, "`block_scales` must be False"),
        ({"accumulate": "fast", "block_scales": True}, "`block_scales` must be False"),
        ({"n_segments": 3}, "`n_segments` must be 1, or 2 with `block_scales`, got 3"),
        ({"n_segments": 2}, "`n_segments` must be 1, or 2 with `block_scales`, got 2"),
        ({"scale_b_offset": (0, 8)}, "`scale_b_offset` must be .* 0 without, got"),
        ({"scale_b_offset": (128, 0), "block_scales": True}, "each 0 to 127 with"),
        ({"scale_b_offset": (1,), "block_scales": True}, "`scale_b_offset` must be"),
        ({"scale_b_offset": (0.5, 0), "block_scales": True}, "`scale_b_offset` must be"),
        ({"scale_b_offset": 5, "block_scales": True}, "`scale_b_offset` must be a sequence"),
        ({"n_segments": 2.0, "block_scales": True}, "`n_segments` must be 1, or 2"),
        ({"offs": 3}, "`offs` must be a sequence"),
        ({"dtype": [1]}, "`dtype` must be"),
        ({"accumulate": None}, '`accumulate` must be "promoted", .*, got None for fp8$'),
        ({"block_scales": "yes"}, "`block_scales` must be True or False, got 'yes'"),
        ({"block_scales": 1}, "`block_scales` must be True or False, got 1"),
        ({"n_segments": True}, "`n_segments` must be 1, or 2 with `block_scales`, got True"),
        ({"scale_b_offset": (True, 0), "block_scales": True}, "`scale_b_offset` must be"),
        ({"measure_on": 1.5}, "`measure_on` must be a CUDA device or its index, got 1.5"),
        ({"n": 7}, "`n` must be a multiple of 8, or of 4 for float32 results, got 7"),
    ],
)
def test_what_the_op_would_refuse_is_not_explained(changes, message):
    arguments = {"dtype": "fp8", "num_rows": 4, "num_groups": 2, "n": 64, "k": 64} | changes
    with pytest.raises(ValueError, match=message):
        moe_ext.explain(**arguments)


def test_numbers_of_other_types_are_taken_if_they_are_whole():
    sizes = {"dtype": "bf16", "num_groups": 2, "n": 64, "k": 64}
    plain = moe_ext.explain(num_rows=16, offs=[7, 16], **sizes)
    offs = torch.tensor([7, 16], dtype=torch.int32)
    assert moe_ext.explain(num_rows=torch.tensor(16), offs=offs, **sizes) == plain
    for offs in ([7.5, 16], "ab", [7, "16"]):
        with pytest.raises(ValueError, match=r"`offs\[\d\]` must be a whole number"):
            moe_ext.explain(num_rows=16, offs=offs, **sizes)


@pytest.mark.parametrize(
    ("n_segments", "offset", "sums", "orders"),
    [
        (1, (0, 0), "block", {"Plain"}),
        (1, (64, 0), "block", {"SwapAB"}),
        (2, (64, 0), "block", {"SwapAB"}),
        (1, (0, 64), "shifted", {"SwapAB"}),
    ],
)
def test_blocks_off_the_grid_are_explained_with_the_kernel_that_takes_them(
    n_segments, offset, sums, orders
):
    told = moe_ext.explain(
        dtype="fp8",
        num_rows=4096,
        num_groups=8,
        n=4096,
        k=1856,
        block_scales=True,
        n_segments=n_segments,
        scale_b_offset=offset,
    )
    kernel = moe_ext.kernels()[told.config_index]
    assert kernel.accumulate == told.accumulate == sums
    assert kernel.order in orders


# measured times, on a GPU that is not there


class Event:
    """An event of a clock that moves by as much as is replayed."""

    clock_ms = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.clock_ms

    def elapsed_time(self, other):
        return other.at - self.at


@pytest.fixture
def one_gpu(monkeypatch):
    """A GPU of 78 SMs on which a captured call takes 5 us, and 50 in the first replay."""
    state = types.SimpleNamespace(capturing=False, replays=0, calls=0)

    class Graph:
        def replay(self):
            state.replays += 1
            Event.clock_ms += 1e-3 * self.calls * (50 if state.replays == 1 else 5)

    @contextlib.contextmanager
    def capture(graph):
        before = state.calls
        yield
        graph.calls = state.calls - before

    monkeypatch.setattr(_library, "load", lambda: None)
    kernels = types.SimpleNamespace(sm_count=78)
    monkeypatch.setattr(_library, "device_kernels", lambda index: kernels)
    for name, stand_in in {
        "current_device": lambda: 0,
        "device": contextlib.nullcontext,
        "is_current_stream_capturing": lambda: state.capturing,
        "CUDAGraph": Graph,
        "graph": capture,
        "Event": Event,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return state


def count_calls(state, monkeypatch, module, name):
    """Let a maker of calls count what is called."""
    make = getattr(module, name)
    seen = []

    def counted(**arguments):
        seen.append(arguments)
        run = make(**{**arguments, "device": torch.device("cpu")})

        def call(copy):
            state.calls += 1
            return run(copy) if state.calls == 1 else None  # the reference is slow

        return call

    monkeypatch.setattr(module, name, counted)
    return seen


SMALL = {"num_groups": 3, "n": 24, "k": 160}


@pytest.mark.filterwarnings("ignore:moe_ext. no CUDA device")
@pytest.mark.parametrize(
    "layout",
    [
        {"dtype": "bf16"},
        {"dtype": "fp8", "accumulate": "fast"},
        {"dtype": "fp8", "block_scales": True},
        {"dtype": "fp8", "block_scales": True, "n_segments": 2, "scale_b_offset": (64, 0)},
        {"dtype": "fp8", "block_scales": True, "scale_b_offset": (0, 8)},
        {"dtype": "bf16", "n": 20},
        {"dtype": "fp8", "k": 232},
    ],
    ids=str,
)
def test_a_time_is_measured_where_it_is_asked_for(one_gpu, monkeypatch, layout):
    seen = count_calls(one_gpu, monkeypatch, _explain, "gemm_call")
    told = moe_ext.explain(num_rows=7, measure_on=0, **(SMALL | layout))
    assert told.measured_us == pytest.approx(5.0)
    assert told.sm_count == 78
    assert "measured 5.0 us" in str(told)
    assert seen[0]["config"] == told.config
    weight_bytes = told.weight_bytes
    assert seen[0]["copies"] == _measure.num_copies(weight_bytes) == 64
    assert (one_gpu.calls - 1) % seen[0]["copies"] == 0
    assert one_gpu.replays == 23
    assert moe_ext.explain(num_rows=7, sm_count=78, **(SMALL | layout)).config == told.config


def test_nothing_is_measured_unless_asked():
    told = moe_ext.explain(dtype="bf16", num_rows=7, **SMALL)
    assert told.measured_us is None
    assert told.sm_count == 132
    assert "measured" not in str(told).splitlines()[-1]


def test_what_cannot_be_measured(one_gpu, monkeypatch):
    count_calls(one_gpu, monkeypatch, _explain, "gemm_call")
    with pytest.raises(ValueError, match="`measure_on` must be None where nothing is computed"):
        moe_ext.explain(dtype="bf16", num_rows=0, measure_on=0, **SMALL)
    with pytest.raises(ValueError, match="explain: `measure_on` must be a CUDA device, got c"):
        moe_ext.explain(dtype="bf16", num_rows=7, measure_on="cpu", **SMALL)
    one_gpu.capturing = True
    with pytest.raises(RuntimeError, match="explain: must measure outside the capture"):
        moe_ext.explain(dtype="bf16", num_rows=7, measure_on=0, **SMALL)


def test_without_a_gpu_the_reason_is_the_librarys():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="moe_ext: "):
        moe_ext.explain(dtype="bf16", num_rows=7, measure_on="cuda", **SMALL)


def test_copies_and_calls():
    assert _measure.num_copies(0) == _measure.num_copies(1e6) == 64
    assert _measure.num_copies(100e6) == 3
    assert _measure.num_copies(1e9) == 2
    assert _measure.num_calls(3, 1e6) == 3
    assert _measure.num_calls(3, 1.0) == 66
    assert _measure.num_calls(100, 1.0) == 100


@pytest.mark.gpu
@pytest.mark.parametrize(
    "layout", [{"dtype": "bf16"}, {"dtype": "fp8", "block_scales": True}], ids=str
)
def test_a_time_on_a_gpu_is_near_its_prediction(layout):
    told = moe_ext.explain(num_rows=512, measure_on="cuda", **QWEN3_30B, **layout)
    assert told.floor_us / 2 < told.measured_us < 4 * told.predicted_us
